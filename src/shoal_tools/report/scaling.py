"""A simulation's pictures: the speed-up, and the parts of a step. Reads core only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from shoal.core.foresight import BUBBLE, COMPUTE, LINK, OWNERS, STRAGGLERS, Scale
from shoal_tools.report.drawing import (
    FLOOR,
    LEFT,
    RIGHT,
    TOP,
    axes,
    duration,
    line,
    picture,
    rule,
    text,
    ticks,
)

# a class of the page's style for each limit
LIMITS = {COMPUTE: "c0", LINK: "c1", OWNERS: "c2", BUBBLE: "c4", STRAGGLERS: "c3"}


def curve(scales: Sequence[Scale]) -> Markup:
    """Draw the speed-up over one host by number of hosts, in powers of two, with the ideal."""
    most = math.log2(max(2, *(scale.hosts for scale in scales)))
    powers = [math.log2(scale.times) for scale in scales]
    least, top = min(0.0, *powers), max(most, *powers)

    def point(hosts: float, times: float) -> tuple[float, float]:
        part = (math.log2(times) - least) / (top - least)
        return LEFT + math.log2(hosts) / most * (RIGHT - LEFT), FLOOR - part * (FLOOR - TOP)

    parts = [axes("hosts")]
    for mark in (2**power for power in range(int(most) + 1)):
        y = point(1, mark)[1]
        parts.append(rule(y))
        parts.append(text(point(mark, 2**least)[0], FLOOR + 18, f"{mark:,}", "middle"))
        parts.append(text(LEFT - 8, y + 4, f"{mark:,}", "end"))
    parts.append(line("ideal", [point(1, 1), point(2**most, 2**most)], "as many times as hosts"))
    known = [point(scale.hosts, scale.times) for scale in scales]
    parts.append(line("curve c0", known))
    for scale, (x, y) in zip(scales, known, strict=True):
        said = f"{scale.hosts} hosts: {scale.times:.2f} times"
        dot = f'<circle class="c0" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        parts.append(f"{dot}<title>{said}</title></circle>")
    return picture("times as fast as one host, by number of hosts", parts)


def bars(scales: Sequence[Scale]) -> Markup:
    """Draw a bar for each number of hosts, with the seconds of each part of the step."""
    longest = max(scale.step_s for scale in scales)
    slot = (RIGHT - LEFT) / len(scales)
    wide = min(0.7 * slot, 70.0)
    high = FLOOR - TOP - 20
    parts = [axes("hosts")]
    for tick in ticks(0.0, longest):
        y = FLOOR - tick / longest * high
        parts.append(rule(y))
        parts.append(text(LEFT - 8, y + 4, duration(tick), "end"))
    for number, scale in enumerate(scales):
        middle, y = LEFT + slot * (number + 0.5), float(FLOOR)
        for limit, seconds in scale.limits.items():
            tall = min(max(seconds, 0.0) / longest, 1.0) * high
            y = max(y - tall, 0.0)
            parts.append(
                f'<rect class="{LIMITS.get(limit, "c4")}" x="{middle - wide / 2:.1f}" '
                f'y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}"><title>{scale.hosts} hosts: '
                f"{limit} {duration(seconds)}</title></rect>"
            )
        parts.append(text(middle, FLOOR + 18, f"{scale.hosts:,}", "middle"))
    there = {limit for scale in scales for limit in scale.limits}
    shown = [each for each in LIMITS.items() if each[0] in there]
    for number, (limit, colour) in enumerate(shown):
        x = LEFT + 10 + number * 130
        parts.append(f'<rect class="{colour}" x="{x}" y="2" width="12" height="12"/>')
        parts.append(text(x + 18, 13, limit, "start"))
    return picture("seconds of a step, by number of hosts", parts)
