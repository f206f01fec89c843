"""Shoal and its peers in words: where DDP does as well, and why a step may be too short.

Reads core only. Guarded by tests/tools/report/test_peer_words.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.record import Contender
from shoal_tools.report.drawing import duration

AS_WELL = 1.05  # a predicted step up to so many times as long is as good
_DDP, _PLAIN = "ddp", "plain"


def in_words(contenders: Iterable[Contender], strategies: Iterable[str]) -> list[str]:
    """Return sentences on DDP, and on a step that is shorter than compute alone.

    Args:
        contenders: Shoal and its peers, with the peers' ratios.
        strategies: the strategies that serve the layers.
    """
    lines = []
    for peer in contenders:
        if peer.ratio is None:
            continue
        median, low, high = peer.ratio
        kind = peer.name.partition(",")[0]
        if kind == _DDP and high < 1:
            lines.append(
                f"DDP is faster here: its step is {median:.2f} of Shoal's. "
                "--pin '*=replicate:allreduce' does as DDP does"
            )
        elif kind == _DDP and low <= 1:
            lines.append("DDP does as well here: the interval of its ratio reaches 1")
        elif kind == _PLAIN and low > 1:
            lines.append(
                "Shoal's step is shorter than that of a rank alone, which sends nothing, because "
                + why_less(strategies)
            )
    return lines


def as_ddp(step_s: float, ddp_s: float) -> str:
    """Compare a predicted step with DDP's.

    Examples:
        >>> as_ddp(0.100, 0.102)
        'DDP, with an all-reduce of all layers, would do as well: 102 ms'
        >>> as_ddp(0.100, 0.250)
        'DDP, with an all-reduce of all layers, would take 2.50 times as long: 250 ms'
    """
    times = ddp_s / step_s
    how = "do as well" if times < AS_WELL else f"take {times:.2f} times as long"
    return f"DDP, with an all-reduce of all layers, would {how}: {duration(ddp_s)}"


def why_less(strategies: Iterable[str]) -> str:
    """Say why a rank computes less than a process alone, given how its layers are served.

    Examples:
        >>> why_less(["replicate"])
        'gradients land in buckets that are there already, and take no new memory'
    """
    if set(strategies) <= {"replicate"}:
        return "gradients land in buckets that are there already, and take no new memory"
    return (
        "it updates or holds a part of the parameters, leaves work to other cores, or takes no new "
        "memory for gradients"
    )
