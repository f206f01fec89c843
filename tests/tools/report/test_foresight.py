"""The first screen of a simulation says whether it is worth it."""

from __future__ import annotations

import pytest

from shoal.core.foresight import Foresight, Help, Question, Scale
from shoal.core.plan import Choice, Plan
from shoal.front.text import plain
from shoal_tools.report.foresight import foresight, verdict


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
        "1,000 ms",
        "1,250 ms",
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
