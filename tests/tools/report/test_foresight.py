"""The first screen of a simulation says whether it is worth it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.core.foresight import Foresight, Help, Question, Scale
from shoal.core.plan import Choice, Plan
from shoal.front.text import plain
from shoal_tools.report.foresight import foresight, notes, verdict


def scale(hosts: int, times: float, way: str = "factor", link_s: float = 0.4) -> Scale:
    plan = Plan(hosts, "", (Choice("fc", way), Choice("head", way)), 1 << 20, 3)
    return Scale(hosts, 1.0, 1.25, times, {"compute": 0.6, "link": link_s}, plan)


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ([scale(1, 1.0)], "One host alone: nothing is sent."),
        ([scale(2, 0.8)], "Not worth it: 2 hosts train 0.80 times as fast as one."),
        (
            [scale(8, 1.6)],
            "Hardly worth it: 8 hosts train 1.6 times as fast as one, "
            "each at 20 % of what it could.",
        ),
        (
            [scale(2, 1.8), scale(4, 3.0), scale(8, 3.2)],
            "Worth it: 4 hosts train 3.0 times as fast as one, each at 75 % of what it could. "
            "From 8 hosts on it is less than half.",
        ),
    ],
)
def test_the_answer_is_a_sentence(scales: list[Scale], said: str) -> None:
    assert verdict(Foresight(Question(), 1.0, tuple(scales), ())) == said


def test_one_screen_has_the_steps_what_limits_flips_and_helps() -> None:
    scales = scale(2, 1.9, link_s=0.0), scale(4, 3.0, "replicate")
    helps = Help("links 2 times as fast", 1.4), Help("codecs", 1.2)
    page = plain(foresight(Foresight(Question(straggler=0.03), 1.0, scales, helps)))
    for words in (
        "1.00 s",
        "1.25 s",
        "75%",
        "link (40%)",
        "2 replicate",
        "from 4 hosts on: 2 layers by replicate, no longer by factor",
        "with 4 hosts, so many times as fast: links 2 times as fast 1.40, codecs 1.20",
        "step times vary by 3.0%",
    ):
        assert words in page
    two = next(line for line in page.splitlines() if line.split()[:1] == ["2"])
    assert "compute" in two
    assert len(page.splitlines()) < 15


def test_it_says_where_ddp_would_do_as_well() -> None:
    two, four = replace(scale(2, 1.9), ddp_s=1.04), replace(scale(4, 3.0), ddp_s=1.5)
    assert notes(Foresight(Question(), 1.0, (two, four), ()))[0] == (
        "DDP, with an all-reduce of all layers, would do as well on 2 hosts, and would take "
        "1.50 times as long on 4 hosts"
    )


def test_more_than_a_host_each_has_a_reason() -> None:
    more = scale(2, 2.1, link_s=0.0), scale(4, 4.4, link_s=0.0)
    (note,) = [said for said in notes(Foresight(Question(), 1.0, more, ())) if "100%" in said]
    assert "on 2, 4 hosts: on 4 a rank computes 400 ms less than one host alone" in note
    assert "updates or holds a part" in note
    whole = scale(4, 4.0)
    assert not any("100%" in said for said in notes(Foresight(Question(), 1.0, (whole,), ())))


def test_a_figure_that_is_shown_above_the_hosts_has_a_reason() -> None:
    shown = scale(16, 16.06, way="replicate")
    answer = Foresight(Question(), 1.0, (shown,), ())
    assert "16 hosts train 16.1 times as fast as one" in verdict(answer)
    (note,) = [said for said in notes(answer) if "100%" in said]
    assert note.endswith(
        "because gradients land in buckets that are there already, and take no new memory"
    )


def test_of_the_rows_of_one_host_a_share_of_its_step_is_the_measure() -> None:
    shown = replace(scale(4, 4.4), limits={"compute": 0.2})
    (note,) = [n for n in notes(Foresight(Question(strong=True), 1.0, (shown,), ())) if "100%" in n]
    assert "on 4 a rank computes 50.0 ms less than its share of one host's step" in note
