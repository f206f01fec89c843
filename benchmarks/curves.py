"""Draws how runs are judged as they train, means over seeds: for accuracy.py.

Above the curves themselves, below how far each is from the first way, which is grey.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

Curve = list[tuple[int, float]]
WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 700, 200, 56, 190, 34, 48
COLOURS = (
    "#57606a",
    "#0969da",
    "#1a7f37",
    "#bc4c00",
    "#8250df",
    "#bf3989",
    "#9a6700",
    "#0f8b8d",
    "#cf222e",
    "#4d2d00",
    "#ff80c8",
)
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f }
  line { stroke: #d0d7de } polyline { fill: none; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } line { stroke: #3d444d } }
"""


def drawn(judged_by: str, curves: Mapping[str, Mapping[str, Curve]]) -> str:
    """The picture as SVG text, of a curve for each way; the first is what others are held against.

    Of the first fifth of the steps only the upper panel has something, as all is steep there.
    """
    means = {way: _mean(list(runs.values())) for way, runs in curves.items()}
    exact = next(iter(means.values()))
    begin = exact[-1][0] / 5
    off = {
        way: [
            (step, value - own)
            for (step, value), (_, own) in zip(curve, exact, strict=True)
            if step > begin
        ]
        for way, curve in means.items()
    }
    late = {way: [point for point in curve if point[0] > begin] for way, curve in means.items()}
    height = TOP + 2 * PANEL + 2 * GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{judged_by}, by step">',
        f"<style>{STYLE}</style>",
        *_panel(f"{judged_by}, by step", late, TOP),
        *_panel(f"difference to {next(iter(means))}", off, TOP + PANEL + GAP),
    ]
    for number, way in enumerate(means):
        y, colour = TOP + 14 + 18 * number, COLOURS[number % len(COLOURS)]
        x = WIDTH - RIGHT + 12
        lines.append(f'<rect x="{x}" y="{y - 9}" width="14" height="4" fill="{colour}"/>')
        lines.append(f'<text x="{x + 20}" y="{y - 3}">{way}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _mean(runs: list[Curve]) -> Curve:
    return [
        (points[0][0], mean(value for _, value in points)) for points in zip(*runs, strict=True)
    ]


def _panel(title: str, curves: dict[str, Curve], top: int) -> list[str]:
    points = [point for curve in curves.values() for point in curve]
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    across, up = (WIDTH - LEFT - RIGHT) / (last - first), PANEL / ((high - low) or 1.0)
    lines = [f'<text x="{LEFT}" y="{top - 8}">{title}</text>']
    for part in range(5):
        value = low + part * (high - low) / 4
        y = top + PANEL - (value - low) * up
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for number, curve in enumerate(curves.values()):
        drawn = " ".join(
            f"{LEFT + (step - first) * across:.1f},{top + PANEL - (value - low) * up:.1f}"
            for step, value in curve
        )
        colour = COLOURS[number % len(COLOURS)]
        lines.append(f'<polyline points="{drawn}" stroke="{colour}"/>')
    for step, anchor in ((first, "start"), (last, "end")):
        x = LEFT + (step - first) * across
        lines.append(
            f'<text x="{x:.1f}" y="{top + PANEL + 16}" text-anchor="{anchor}">{step}</text>'
        )
    return lines
