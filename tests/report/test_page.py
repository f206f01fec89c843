"""The page of a simulation is whole, needs no network, and says what the screen says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from shoal.core.foresight import Foresight, Help, Question, Scale
from shoal.core.plan import Choice, Plan
from shoal.report.foresight import verdict
from shoal.report.page import page

ALONE = {"meta", "!doctype"}  # have no end


def scale(hosts: int, times: float) -> Scale:
    choices = (Choice("fc", "factor"), Choice("<b>", "replicate", "ring")) if hosts > 1 else ()
    limits = {"compute": 0.6, "link": 0.3, "owners": 0.0, "stragglers": 0.1}
    return Scale(hosts, 1.0, 1.25, times, limits, Plan(hosts, "", choices, 1 << 20, 3))


def answer(*scales: Scale) -> Foresight:
    return Foresight(Question(), 1.0, scales, (Help("links 2 times as fast", 1.4),))


class Tags(HTMLParser):
    """Which are open, and which attributes would fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "scales",
    [
        [scale(1, 1.0)],
        [scale(1, 1.0), scale(2, 0.4), scale(1024, 300.0)],
        [scale(3, 2.0)],
    ],
)
def test_the_page_is_whole_and_fetches_nothing(scales: list[Scale]) -> None:
    text = page(answer(*scales), 'a <model> & "more"')
    tags = Tags()
    tags.feed(text)
    assert tags.open == tags.fetched == []
    assert "<script" not in text
    assert "a &lt;model&gt; &amp; &quot;more&quot;" in text
    assert verdict(answer(*scales)) in text
    assert len(text) < 100_000
    assert not re.search(r"\b(nan|inf)\b", text)


def test_points_and_bars_are_inside_the_pictures() -> None:
    text = page(answer(scale(1, 1.0), scale(2, 0.5), scale(64, 40.0)), "a model")
    curve, bars = (ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S))
    space = "{http://www.w3.org/2000/svg}"
    dots = curve.iter(f"{space}circle")
    circles = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in dots]
    assert len(circles) == 3
    assert all(0 <= x <= 640 and 0 <= y <= 300 for x, y in circles)
    assert circles[1][1] > circles[0][1] > circles[2][1]  # slower than one host is below it
    parts = [rect for rect in bars.iter(f"{space}rect") if rect.find("*") is not None]
    heights = [float(part.get("height", "")) for part in parts]
    assert len(heights) == 3 * 4
    assert min(heights) == 0
    assert all(float(part.get("y", "")) >= 0 for part in parts)


def test_what_flips_and_helps_is_told() -> None:
    text = page(answer(scale(1, 1.0), scale(4, 3.0)), "a model")
    assert "links 2 times as fast 1.40" in text
    assert "1 replicate:ring" in text
