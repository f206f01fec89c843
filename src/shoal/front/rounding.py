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
from shoal.core.names import first_names
from shoal.core.plan import Plan
from shoal.core.registry import named


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
    unlike = []
    for text, names in hosts.items():
        own = " ".join(word for word in text.split() if word not in shared)
        unlike.append(f"{first_names(names)}: {own or 'less'}")
    warnings.warn(
        f"processors round unlike one another ({'; '.join(unlike)}), so that ranks' copies of "
        f"{first_names(layers)} drift apart by about 1e-7: each rank updates these itself. To keep "
        'all ranks alike to the last bit, give them to owners: strategies=["sliced"]',
        stacklevel=3,
    )
