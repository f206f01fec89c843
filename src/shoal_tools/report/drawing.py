"""Pictures for a page: charts as SVG text in the page's colours, and numbers for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup, escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 84, 40, 16
RIGHT = WIDTH - 20
FLOOR = HEIGHT - BOTTOM
Points = Sequence[tuple[float, float | None]]  # None: a gap


def duration(seconds: float) -> str:
    """Write seconds as people read them.

    Examples:
        >>> duration(0.0), duration(2.5e-5), duration(0.0421), duration(0.7041), duration(6.438)
        ('0', '25 µs', '42.1 ms', '704 ms', '6.44 s')
    """
    if not seconds:
        return "0"
    if abs(seconds) >= 1:
        return f"{seconds:,.{2 if abs(seconds) < 10 else 1}f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.{0 if abs(seconds) >= 0.1 else 1}f} ms"
    return f"{seconds * 1e6:.0f} µs"


def size(nbytes: float) -> str:
    """Write bytes as people read them.

    Examples:
        >>> size(0), size(812), size(37_752_832), size(2.5e9)
        ('0', '812 B', '37.8 MB', '2.5 GB')
    """
    if not nbytes:
        return "0"
    for least, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= least:
            number = nbytes / least
            return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{nbytes:.0f} B"


def percent(part: float) -> str:
    """Write a part as people read it.

    Examples:
        >>> percent(0.756), percent(0.0042)
        ('76 %', '0.42 %')
    """
    return f"{part * 100:.2g} %" if abs(part) < 0.1 else f"{part * 100:,.0f} %"


def ticks(least: float, most: float, number: int = 5) -> list[float]:
    """Return about so many round numbers from `least` to `most`.

    Examples:
        >>> ticks(0, 7.3)
        [0.0, 2.0, 4.0, 6.0]
    """
    if not most > least:
        return [least]
    rough = (most - least) / number
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    first = math.ceil(least / step)
    return [round(n * step, 12) for n in range(first, math.floor(most / step + 1e-9) + 1)]


def line_chart(
    label: str, curves: Mapping[str, Points], across: str, up: Callable[[float], str]
) -> Markup:
    """Draw curves over one axis, each with its name; return nothing if there is no point."""
    known = [(x, y) for points in curves.values() for x, y in points if y is not None]
    if not known:
        return Markup()
    first, last = min(x for x, _ in known), max(x for x, _ in known)
    low, high = min(y for _, y in known), max(y for _, y in known)
    if low > 0 and low < 0.5 * high:
        low = 0.0
    if low == high:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    span = (last - first) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - first) / span * (RIGHT - LEFT),
            FLOOR - (y - low) / (high - low) * (FLOOR - TOP),
        )

    parts = [axes(across)]
    for tick in ticks(low, high):
        y = place(first, tick)[1]
        parts.append(rule(y))
        parts.append(text(LEFT - 8, y + 4, up(tick), "end"))
    for tick in ticks(first, last):
        parts.append(text(place(tick, low)[0], FLOOR + 18, f"{tick:,.6g}", "middle"))
    for number, (name, points) in enumerate(curves.items()):
        for run in _runs(points):
            parts.append(line(f"curve c{number}", [place(x, y) for x, y in run], name))
        if len(curves) > 1:
            x = LEFT + 12 + 150 * number
            parts.append(f'<rect class="c{number}" x="{x}" y="2" width="12" height="12"/>')
            parts.append(text(x + 18, 13, name, "start"))
    return picture(label, parts)


def _runs(points: Points) -> list[list[tuple[float, float]]]:
    """Divide points at their gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def axes(below: str) -> str:
    """Draw the two axes, and name the unit of the lower one."""
    return (
        f'<line class="axis" x1="{LEFT}" y1="{FLOOR}" x2="{RIGHT}" y2="{FLOOR}"/>'
        f'<line class="axis" x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{FLOOR}"/>'
        + text((RIGHT + LEFT) / 2, HEIGHT - 6, below, "middle")
    )


def rule(y: float) -> str:
    """Draw a faint line across."""
    return f'<line class="rule" x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>'


def text(x: float, y: float, words: str, anchor: str) -> str:
    """Write words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(kind: str, points: Sequence[tuple[float, float]], title: str = "") -> str:
    """Draw a line through points, or a dot for one point."""
    told = f"<title>{escape(title)}</title>" if title else ""
    if len(points) == 1:
        x, y = points[0]
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3">{told}</circle>'
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{joined}">{told}</polyline>'


def picture(label: str, parts: Sequence[str], width: int = WIDTH, height: int = HEIGHT) -> Markup:
    """Join the parts into a picture, with a label for readers who cannot see it."""
    box = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"'
    return Markup(f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>')
