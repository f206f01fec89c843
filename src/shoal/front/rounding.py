"""A warning for ranks with processors that round differently.

A layer that every rank updates itself starts equal on all ranks, and each rank adds the same sum to
it. But an update has its own rounding, and processors with other instructions round differently:
copies drift apart, by about 1e-7 of a value. A layer with owners is updated once, and the result is
sent.
"""

from __future__ import annotations

import warnings

from shoal.contracts.strategy import Strategy
from shoal.core.facts import Topology
from shoal.core.plan import Plan
from shoal.core.registry import named

_MOST_NAMES = 4


def warn_of_rounding(topology: Topology, plan: Plan) -> None:
    """Warn where copies of a layer may drift apart."""
    hosts: dict[str, list[str]] = {}
    for host, processor in zip(topology.hosts, topology.processors, strict=False):
        if host not in hosts.setdefault(processor, []):
            hosts[processor].append(host)
    layers = [
        choice.layer
        for choice in plan.choices
        if named(Strategy, choice.strategy).role.is_updated_everywhere
    ]
    if len(hosts) < 2 or not layers:
        return
    shared = set.intersection(*(set(processor.split()) for processor in hosts))
    unlike = [
        f"{_some(names)}: {' '.join(word for word in text.split() if word not in shared) or 'less'}"
        for text, names in hosts.items()
    ]
    warnings.warn(
        f"processors round unlike one another ({'; '.join(unlike)}), so that ranks' copies of "
        f"{_some(layers)} drift apart by about 1e-7: each rank updates these itself. To keep all "
        'ranks alike to the last bit, give them to owners: strategies=["sliced"]',
        stacklevel=3,
    )


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
