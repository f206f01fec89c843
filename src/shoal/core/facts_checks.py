"""Checks of hosts and links that a caller describes, as for `shoal.plan(…, cluster=…)`.

Each runs as the record is made, so that a wrong number is named before it is a wrong prediction.
"""

from __future__ import annotations

import math
from typing import Any

from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_RANKS, MOST_SECONDS, check_number, check_whole, shown

_LEAST_CORES = 1e-3
_FORM = 'shoal.Topology(("one", "other"))'
_LINK = "give for instance shoal.Link(latency_s=1e-4, bytes_per_s=125e6), which is 1 Gbit/s"


def as_names(rule: str, names: Any) -> tuple[str, ...]:
    """Return a tuple of names from a tuple or a list of them (UsageError for anything else)."""
    is_many = isinstance(names, tuple | list)
    if not is_many or not all(isinstance(name, str) for name in names):
        raise UsageError(rule, got=shown(names), do=f"give for instance {_FORM}")
    return tuple(names)


def check_topology(topology: Any) -> None:
    """Check a `Topology`: names of hosts, and numbers of ranks that do not train."""
    for field in ("hosts", "processors"):
        names = as_names(f"{field} has a name for each rank", getattr(topology, field))
        object.__setattr__(topology, field, names)
    if not topology.hosts:
        raise UsageError("a topology has no host", do=f"give for instance {_FORM}")
    for field in ("servers", "tail"):
        rule = f"{field} is a number of ranks, fewer than there are"
        most = min(MOST_RANKS, len(topology.hosts) - 1)
        check_whole(rule, getattr(topology, field), 0, most, do="leave it out: it is 0")


def check_link(link: Any) -> None:
    """Check a `Link`: seconds and rates."""
    check_number("latency_s is a number of seconds", link.latency_s, 0, MOST_SECONDS, do=_LINK)
    rule = "bytes_per_s is a number of bytes a second, above 0"
    check_number(rule, link.bytes_per_s, 1e-3, math.inf, do=_LINK)
    for field in ("cpu_s_per_byte", "burst_bytes", "tried"):
        do = "leave it out: shoal measures it"
        check_number(f"{field} is a number, at least 0", getattr(link, field), 0, math.inf, do=do)


def check_cluster(cluster: Any, topology: type[Any], link: type[Any]) -> None:
    """Check a `Cluster`: the types of its parts, and its numbers.

    Args:
        cluster: the record.
        topology: the type of its topology.
        link: the type of its link.
    """
    for field, kind, form in (
        ("topology", topology, _FORM),
        ("link", link, "shoal.Link(1e-4, 1e8)"),
    ):
        value = getattr(cluster, field)
        if not isinstance(value, kind):
            rule = f"{field} of a cluster is no shoal.{kind.__name__}"
            raise UsageError(rule, got=shown(value), do=f"give for instance {field}={form}")
    rule = "cores_per_rank is a number of processor cores, above 0"
    do = "give for instance 2.0"
    check_number(rule, cluster.cores_per_rank, _LEAST_CORES, MOST_RANKS, do=do)
    for field in ("pack_byte_s", "pack_each_s", "duplex"):
        do = "leave it out: shoal measures it"
        rule = f"{field} is a number, at least 0"
        check_number(rule, getattr(cluster, field), 0, MOST_SECONDS, do=do)
    for field in ("servers", "tail"):
        names = as_names(f"{field} has names of hosts", getattr(cluster, field))
        object.__setattr__(cluster, field, names)
