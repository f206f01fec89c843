"""A run's page is whole, needs no network, and says what is in the record."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from made_records import everything, explanation, simulation, timed, trained

from shoal.core.foresight import Foresight, Help, Question, Scale
from shoal.core.plan import Choice, Plan
from shoal.core.record import Curve, Record, Training
from shoal_tools.report.foresight import verdict
from shoal_tools.report.page import page
from shoal_tools.report.scaling import bars, curve

ALONE = {"meta", "link", "input", "!doctype"}  # have no end
SPACE = "{http://www.w3.org/2000/svg}"


def scale(hosts: int, times: float) -> Scale:
    choices = (Choice("fc", "factor"), Choice("<b>", "replicate", "ring")) if hosts > 1 else ()
    limits = {"compute": 0.6, "link": 0.3, "owners": 0.0, "stragglers": 0.1}
    return Scale(hosts, 1.0, 1.25, times, limits, Plan(hosts, "", choices, 1 << 20, 3))


def answer(*scales: Scale) -> Foresight:
    return Foresight(Question(), 1.0, scales, (Help("links 2 times as fast", 1.4),))


class Tags(HTMLParser):
    """Which are open, which attributes would fetch something, and what links point to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.pointed: set[str] = set()
        self.names: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.names.append(str(value))
            if name in ("src", "href") and str(value).startswith("#"):
                self.pointed.add(str(value)[1:])
            elif name in ("src", "href") and value != "data:,":
                self.fetched.append(str(value))
        if tag not in ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags_of(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    return tags


RECORDS = {
    "nothing": Record("empty"),
    "trained": trained(5),
    "many layers": everything(500),
    "timed": timed(12),
    "one host": Record("one", simulation=answer(scale(1, 1.0))),
    "hosts": Record("hosts", simulation=answer(scale(1, 1.0), scale(2, 0.4), scale(1024, 300.0))),
    "three hosts": Record("three", simulation=answer(scale(3, 2.0))),
    "not finite": Record(
        "nan", training=Training(2, 0.1, Curve(1, (None, None)), Curve(1, (0.1,)))
    ),
    "no tracks": replace(trained(5), tracks=(), step_s=None),
    "planned": Record("planned", explanation=explanation(40)),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", RECORDS)
def test_a_page_is_whole_and_fetches_nothing(name: str) -> None:
    text = page(replace(RECORDS[name], title='a <model> & "more"'))
    tags = tags_of(text)
    assert tags.open == tags.fetched == []
    assert len(tags.names) == len(set(tags.names))
    assert tags.pointed <= set(tags.names)
    assert "a &lt;model&gt; &amp; &#34;more&#34;" in text
    assert len(text) < 3_000_000
    for attribute in re.findall(r'(?:[xy]\d?|c[xy]|width|height|points|style)="([^"]*)"', text):
        assert not re.search(r"nan|inf|-\d[\d.]*%", attribute)


@pytest.mark.quick
@pytest.mark.parametrize("layers", [1, 5, 30, 31, 500])
def test_every_layer_has_a_row_with_its_reason(layers: int) -> None:
    text = page(trained(layers))
    rows = re.findall(r'<details id="layer-(\d+)" class="layer( small)?" data-words="(\S+)', text)
    assert [int(number) for number, _, _ in rows] == list(range(layers))
    assert rows[0][2] == "blocks.0.attention", "forward begins with it"
    hidden = sum(bool(small) for _, small, _ in rows)
    assert hidden == (layers - 16 if layers > 30 else 0)
    assert (f"{hidden} layers that take and send least are not shown" in text) == bool(hidden)
    assert text.count("add 50.0 ms a step") == layers
    assert text.count("it is no embedding") == layers
    assert text.count("factor sends less while K &lt; 512") == layers


def test_the_first_words_are_the_answer() -> None:
    assert "A step takes 720 ms. The prediction is 2.8 % under that." in page(trained(5))
    assert "ddp, 25 MB buckets: 5.30 times Shoal&#39;s step." in page(timed(5))
    assert verdict(simulation()) in page(everything(5))
    planned = page(Record("planned", explanation=explanation(5)))
    assert "A step is predicted to take 700 ms." in planned


def test_what_was_off_most_is_named() -> None:
    text = page(trained(5))
    assert "Off most: <strong>backward</strong> took 420 ms, and 380 ms were predicted." in text


def test_of_many_steps_the_term_that_was_off_is_named_with_its_causes() -> None:
    text = page(everything(5))
    assert "Off most: <strong>exchanges</strong> took 160 ms, and 60.0 ms were predicted." in text
    assert "<li>rank 2 is slowest, by 50.0 ms a step</li>" in text
    assert "Measured: mean of the middle half of 40 steps, slowest rank." in text


def test_the_timeline_is_data_of_the_page() -> None:
    record = trained(5)
    evil = replace(record.tracks[1].events[0], what="</script><script>alert(1)</script>")
    tracks = (*record.tracks[:1], replace(record.tracks[1], events=(evil,)))
    text = page(replace(record, tracks=tracks))
    assert "alert(1)</script>" not in text
    data = re.search(r'id="timeline-data">(.*?)</script>', text, re.S)
    assert data is not None
    assert json.loads(data[1])["labels"][-1][0] == evil.what


def test_points_and_bars_are_inside_the_pictures() -> None:
    scales = [scale(1, 1.0), scale(2, 0.5), scale(64, 40.0)]
    drawn, barred = (ElementTree.fromstring(draw(scales)) for draw in (curve, bars))
    circles = [
        (float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in drawn.iter(f"{SPACE}circle")
    ]
    assert len(circles) == 3
    assert all(0 <= x <= 640 and 0 <= y <= 300 for x, y in circles)
    assert circles[1][1] > circles[0][1] > circles[2][1]  # slower than one host is below it
    parts = [rect for rect in barred.iter(f"{SPACE}rect") if rect.find("*") is not None]
    heights = [float(part.get("height", "")) for part in parts]
    assert len(heights) == 3 * 4
    assert min(heights) == 0
    assert all(float(part.get("y", "")) >= 0 for part in parts)


def test_what_flips_and_helps_is_told() -> None:
    text = page(Record("a model", simulation=answer(scale(1, 1.0), scale(4, 3.0))))
    assert "links 2 times as fast 1.40" in text
    assert "1 replicate:ring" in text
