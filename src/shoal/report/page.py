"""A simulation as one page of HTML: curves, what limits, what flips and helps. Reads core only.

Nothing on it comes from a network, and no script runs. Pictures are SVG in the page, and colours
follow the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from shoal.core.foresight import COMPUTE, LINK, OWNERS, STRAGGLERS, Foresight, Scale
from shoal.report.foresight import notes, verdict

_COLOURS = {COMPUTE: "#4878a8", LINK: "#d1702a", OWNERS: "#6f8f2f", STRAGGLERS: "#9b6bb3"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 300, 84, 40, 16
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #ffffff; --faint: #8a8a8a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #181818; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }
.answer { font-size: 1.3rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--faint); }
th, td { white-space: nowrap; }
th:last-child, td:last-child { text-align: left; white-space: normal; }
svg { width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 13px; }
.axis { stroke: var(--faint); }
.ideal { stroke: var(--faint); stroke-dasharray: 5 4; fill: none; }
.curve { stroke: #4878a8; stroke-width: 2.5; fill: none; }
"""


def page(answer: Foresight, title: str) -> str:
    """The page as text.

    Args:
        answer: of a simulation.
        title: what was simulated.
    """
    name = escape(title)
    told = "".join(f"<li>{escape(line)}</li>" for line in notes(answer))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{name}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{name}</h1>\n"
        f'<p class="answer">{escape(verdict(answer))}</p>\n'
        f"<h2>Times as fast as one host</h2>\n{_curve(answer.scales)}\n"
        f"<h2>What takes the step</h2>\n{_bars(answer.scales)}\n"
        f"<h2>Figures</h2>\n{_table(answer.scales)}\n<ul>{told}</ul>\n</body>\n</html>\n"
    )


def _curve(scales: Sequence[Scale]) -> str:
    """Times as fast as one host by number of hosts, both by powers of two, beside the ideal."""
    most = math.log2(max(2, *(scale.hosts for scale in scales)))
    powers = [math.log2(scale.times) for scale in scales]
    least, top = min(0.0, *powers), max(most, *powers)

    def point(hosts: float, times: float) -> tuple[float, float]:
        x = _LEFT + math.log2(hosts) / most * (_WIDTH - _LEFT - 20)
        part = (math.log2(times) - least) / (top - least)
        return round(x, 1), round(_HEIGHT - _BOTTOM - part * (_HEIGHT - _BOTTOM - _TOP), 1)

    marks = [2**power for power in range(int(most) + 1)]
    parts = [_axes("hosts")]
    for mark in marks:
        parts.append(_text(point(mark, 2**least)[0], _HEIGHT - _BOTTOM + 18, f"{mark:,}", "middle"))
        parts.append(_text(_LEFT - 8, point(1, mark)[1] + 4, f"{mark:,}", "end"))
    parts.append(_line("ideal", [point(1, 1), point(2**most, 2**most)]))
    known = [point(scale.hosts, scale.times) for scale in scales]
    parts.append(_line("curve", known))
    for scale, (x, y) in zip(scales, known, strict=True):
        said = f"{scale.hosts} hosts: {scale.times:.2f} times"
        dot = f'<circle cx="{x}" cy="{y}" r="4" fill="{_COLOURS[COMPUTE]}">'
        parts.append(f"{dot}<title>{said}</title></circle>")
    return _picture("times as fast as one host, by number of hosts", parts)


def _bars(scales: Sequence[Scale]) -> str:
    """A bar for each number of hosts, of the seconds of what takes the step."""
    longest = max(scale.step_s for scale in scales)
    slot = (_WIDTH - _LEFT - 20) / len(scales)
    high = _HEIGHT - _BOTTOM - _TOP - 20
    parts = [_axes("hosts")]
    for tick in (0.0, 0.5, 1.0):
        y = _HEIGHT - _BOTTOM - tick * high
        parts.append(_text(_LEFT - 8, y + 4, f"{tick * longest * 1e3:,.0f} ms", "end"))
    for number, scale in enumerate(scales):
        x, y = _LEFT + slot * (number + 0.15), float(_HEIGHT - _BOTTOM)
        for limit, seconds in scale.limits.items():
            tall = seconds / longest * high
            y -= tall
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{slot * 0.7:.1f}" height="{tall:.1f}" '
                f'fill="{_COLOURS[limit]}"><title>{scale.hosts} hosts: {limit} '
                f"{seconds * 1e3:,.1f} ms</title></rect>"
            )
        middle = x + slot * 0.35
        parts.append(_text(middle, _HEIGHT - _BOTTOM + 18, f"{scale.hosts:,}", "middle"))
    for number, (limit, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 10 + number * 130
        parts.append(f'<rect x="{x}" y="2" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, 13, limit, "start"))
    return _picture("milliseconds of a step, by number of hosts", parts)


def _table(scales: Sequence[Scale]) -> str:
    names = "hosts", "step", "p95", "times one", "of a host", "served"
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n"
        for cells in (
            (
                f"{scale.hosts:,}",
                f"{scale.step_s * 1e3:,.1f} ms",
                f"{scale.p95_s * 1e3:,.1f} ms",
                f"{scale.times:.2f}",
                f"{scale.efficiency:.0%}",
                ", ".join(f"{count} {way}" for way, count in scale.ways.items()),
            )
            for scale in scales
        )
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"


def _axes(below: str) -> str:
    floor = _HEIGHT - _BOTTOM
    return (
        f'<line class="axis" x1="{_LEFT}" y1="{floor}" x2="{_WIDTH - 10}" y2="{floor}"/>'
        f'<line class="axis" x1="{_LEFT}" y1="{_TOP}" x2="{_LEFT}" y2="{floor}"/>'
        + _text((_WIDTH + _LEFT) / 2, _HEIGHT - 6, below, "middle")
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(kind: str, points: Sequence[tuple[float, float]]) -> str:
    joined = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline class="{kind}" points="{joined}"/>'


def _picture(label: str, parts: Sequence[str]) -> str:
    inside = "".join(parts)
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{inside}</svg>'
