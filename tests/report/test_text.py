"""What is printed holds the figures, in a width that a log can carry."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from shoal.core.cost import Pace, Price
from shoal.core.explanation import Alternative, Explanation, LayerExplanation
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.plan import Choice
from shoal.report import text


def printed(what: object) -> str:
    console = Console(width=130, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_an_explained_plan_shows_choice_alternatives_and_refusals() -> None:
    chosen = Alternative(Choice("fc", "factor"), 1.5e6, 0.012, 0.4)
    others = (
        Alternative(Choice("fc", "replicate", "ring"), 3e8, 2.5, 2.9),
        Alternative(Choice("fc", "column"), 0.0, 0.0, 0.0, refusal="too narrow"),
    )
    row = LayerExplanation(
        "fc", "Linear", 1000, 8, 0.1, chosen, others, "sends less", "factor sends less while K < 9"
    )
    explanation = Explanation(4, 125e6, 1e-4, 4 << 20, 3, 0.1, 0.2, 0.05, 0.05, 1.5e6, (row,))
    out = printed(text.explained(explanation))
    for expected in (
        "* factor",
        "1.50 MB",
        "12.0 ms",
        "replicate ring",
        "2900.0 ms",
        "cannot: too narrow",
        "K < 9",
    ):
        assert expected in out
    assert "predicted step 400.0 ms" in out and "1,000 Mbit/s" in out
    assert max(map(len, out.splitlines())) <= 130
    assert "placement" not in out
    brief = printed(text.explained(explanation, refused=False))
    assert "replicate ring" in brief and "too narrow" not in brief and "`shoal plan`" in brief


def test_a_placement_is_shown_where_it_is_not_the_default() -> None:
    plain = Explanation(4, 125e6, 1e-4, 4 << 20, 3, 0.1, 0.2, 0.05, 0.05, 1.5e6, ())
    assert "placement round-robin" in printed(
        text.explained(replace(plain, placement="round-robin"))
    )
    assert "head.weight to rank 2, b to rank 0" in printed(
        text.explained(replace(plain, placement={"head.weight": 2, "b": 0}))
    )


def test_ranks_that_a_plan_has_nothing_to_do_for_are_named() -> None:
    plain = Explanation(4, 125e6, 1e-4, 4 << 20, 3, 0.1, 0.2, 0.05, 0.05, 1.5e6, ())
    assert "nothing to do" not in printed(text.explained(plain))
    idle = "rank 4 (h4)", "rank 5 (h5)"
    assert "nothing to do for rank 4 (h4), rank 5 (h5)" in printed(
        text.explained(replace(plain, idle=idle))
    )


def test_a_cluster_shows_link_and_paces() -> None:
    ring = Pace(wall=Price(3e-4, 5e-8), cpu=Price(4e-5, 7e-9))
    out = printed(
        text.measured_cluster(
            Cluster(Topology(("a", "b")), Link(2e-4, 25e6, 1e-9), 0.5, {"ring": ring})
        )
    )
    for expected in (
        "2 ranks on 2 hosts",
        "200 Mbit/s",
        "200 µs",
        "1.00 ns",
        "160 Mbit/s",
        "300 µs",
        "7.00 ns",
        "40 µs",
    ):
        assert expected in out
    assert "a rank's share" not in out
    assert "a rank's share" in printed(
        text.measured_cluster(Cluster(Topology(tuple("aab")), Link(2e-4, 25e6)))
    )


def test_a_histogram_of_staleness_adds_up() -> None:
    out = printed(text.staleness(4, {2: 10, 0: 30}))
    assert "rank 4" in out
    assert out.index("0 steps") < out.index("2 steps")
    assert "75%" in out and "25%" in out


def test_differences_come_worst_first() -> None:
    out = printed(text.differences([("a", 1e-12), ("b", 3e-5)]))
    assert out.index("3.0e-05") < out.index("1.0e-12")
