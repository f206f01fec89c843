"""What is printed holds the figures, in a width that a log can carry."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.console import Console

from shoal.core.cost import Pace, Price
from shoal.core.explanation import Alternative, Explanation, LayerExplanation, PredictedStep
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.plan import Choice
from shoal.front import text

WIDTH, HEIGHT = 80, 24  # of a terminal as it opens


def printed(what: object) -> str:
    console = Console(width=WIDTH, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def way(layer: str, strategy: str, exchange: str = "", refusal: str = "") -> Alternative:
    if refusal:
        return Alternative(Choice(layer, strategy), 0.0, 0.0, 0.0, refusal)
    return Alternative(Choice(layer, strategy, exchange), 1.5e6, 0.012, 0.4)


def explanation_of(*layers: LayerExplanation) -> Explanation:
    step = PredictedStep(0.1, 0.2, 0.05, 0.05, 1.5e6)
    return Explanation(4, 125e6, 1e-4, 4 << 20, 3, step, layers)


def layer(name: str, parameters: int, *others: Alternative) -> LayerExplanation:
    flips = "factor sends less while K < 9"
    chosen = way(name, "factor")
    return LayerExplanation(name, "Linear", parameters, 8, 0.1, chosen, others, "sends less", flips)


# sizes and names of AlexNet's layers with parameters
ALEXNET = [
    ("classifier.6", 4_097_000),
    ("classifier.4", 16_781_312),
    ("classifier.1", 37_752_832),
    ("features.10", 590_080),
    ("features.8", 884_992),
    ("features.6", 663_936),
    ("features.3", 307_392),
    ("features.0", 23_296),
]
# and of a model with many layers, whose names are long
DEEP = [(f"transformer.blocks.{n}.attention.projection", 1000 + n) for n in reversed(range(500))]


@pytest.mark.parametrize("sizes", [ALEXNET, DEEP], ids=["AlexNet", "500 layers"])
def test_a_plan_fits_one_screen_of_80_columns(sizes: list[tuple[str, int]]) -> None:
    explanation = explanation_of(*(layer(*size) for size in sizes))
    lines = printed(text.explained(explanation)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= HEIGHT
    assert "+ waiting for exchanges 50.0 ms +" in " ".join(" ".join(lines).split())
    total = sum(int(found[1].replace(",", "")) for found in map(_PARAMETERS.search, lines) if found)
    assert total == sum(size for _, size in sizes), "every layer is in the table"


_PARAMETERS = re.compile(r"([\d,]+) +8? +factor")


def test_of_many_layers_the_largest_have_rows_of_their_own() -> None:
    explanation = explanation_of(*(layer(*size) for size in DEEP))
    out = printed(text.explained(explanation))
    assert "…blocks.486.attention.projection"[-25:] in out and "blocks.485." not in out
    assert "486 smaller layers" in out
    assert "729.00 MB" in out, "what 486 layers send"
    fifteen = printed(text.explained(explanation_of(*(layer(*size) for size in DEEP[:15]))))
    assert "smaller" not in fifteen


@pytest.mark.parametrize(
    "exchange", ["direct+bfloat16", "hierarchical+bfloat16", "direct+top_k(share=0.02)"]
)
def test_ways_with_codecs_leave_all_figures(exchange: str) -> None:
    rows = [layer(*size) for size in [*ALEXNET[:3], ("blocks.11.query_key_value", 123_456_789)]]
    coded = [replace(row, chosen=way(row.layer, "replicate", exchange)) for row in rows]
    lines = printed(text.explained(explanation_of(*coded))).splitlines()
    assert max(map(len, lines)) <= WIDTH
    for row in coded:
        (line,) = (line for line in lines if f"{row.parameters:,}" in line)
        assert f"replicate:{exchange}" in line and line.rstrip().endswith("1.50 MB")
        assert line.split()[0].lstrip("…") == row.layer[-len(line.split()[0].lstrip("…")) :]


def test_reasons_show_alternatives_and_each_refusal_once() -> None:
    others = (
        Alternative(Choice("fc", "replicate", "ring"), 3e8, 2.5, 2.9),
        way("fc", "column", refusal="too narrow"),
        way("fc", "server", refusal="there are no servers"),
    )
    explanation = explanation_of(layer("fc", 1000, *others), layer("other", 9, others[2]))
    out = printed(text.explained(explanation, reasons=True))
    for expected in (
        "* factor",
        "1.50 MB",
        "12.0 ms",
        "replicate:ring",
        "2900.0 ms",
        "cannot: column, server\n",
        "column: too narrow (fc)",
        "server: there are no servers (fc and 1 more)",
        "K < 9",
        "sends less",
    ):
        assert expected in out
    assert "predicted step 400.0 ms" in out and "1,000 Mbit/s" in out
    assert "placement" not in out
    brief = printed(text.explained(explanation))
    assert "replicate:ring" not in brief and "too narrow" not in brief


def test_what_cannot_serve_a_layer_takes_one_line() -> None:
    others = [way("fc", f"strategy{number}", refusal="no") for number in range(20)]
    out = printed(text.explained(explanation_of(layer("fc", 1, *others)), reasons=True))
    (line,) = (line for line in out.splitlines() if "cannot: " in line)
    assert line.endswith(" …")
    assert max(map(len, out.splitlines())) <= WIDTH


def test_reasons_of_500_layers_fit_80_columns() -> None:
    explanation = explanation_of(
        *(layer(*size, way(size[0], "sliced", "ring")) for size in DEEP[:96]),
        *(layer(*size) for size in DEEP[96:]),
    )
    out = printed(text.explained(explanation, reasons=True))
    assert max(map(len, out.splitlines())) <= WIDTH
    assert "only the 96 largest layers were compared" in out


def test_a_placement_is_shown_where_it_is_not_the_default() -> None:
    plain = explanation_of()
    assert "placement round-robin" in printed(
        text.explained(replace(plain, placement="round-robin"))
    )
    assert "head.weight to rank 2, b to rank 0" in printed(
        text.explained(replace(plain, placement={"head.weight": 2, "b": 0}))
    )


def test_ranks_that_a_plan_has_nothing_to_do_for_are_named() -> None:
    plain = explanation_of()
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
    out = printed(text.lags(4, {2: 10, 0: 30}))
    assert "rank 4" in out
    assert out.index("0 steps") < out.index("2 steps")
    assert "75%" in out and "25%" in out


def test_differences_come_worst_first() -> None:
    out = printed(text.differences([("a", 1e-12), ("b", 3e-5)]))
    assert out.index("3.0e-05") < out.index("1.0e-12")


def test_names_are_no_markup_no_emoji_and_have_no_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    names = ["blocks.[red]x[/red]", "a:warning:b", "layer.12", "[/]"]
    table = text.differences([(name, 1e-12) for name in names])
    text.console().print(table)
    for name in names:
        text.console().print(f"wrote {name}")
    shown = capsys.readouterr().out
    for name in names:
        assert name in text.plain(table) and shown.count(name) == 2
