"""The network interfaces that carry a job's traffic, among all interfaces of a machine.

Ranks meet at interfaces that `init` has chosen or the user has named. Ranks of one host reach each
other through the loopback, whatever their addresses.
"""

from __future__ import annotations

import torch

from shoal.comm import rendezvous
from shoal.contracts.comm import Comm
from shoal.core.interfaces import interface_of, stays_here
from shoal.profiling.interfaces import carried

_LOOPBACK = "127.0.0.1"


def job_interfaces(comm: Comm) -> tuple[str, ...]:
    """Return the interfaces by which this rank reaches the others; () if they are not known."""
    topology = comm.topology
    hosts = topology.ranks_on
    if len(hosts) > 1 and torch.cuda.is_available():
        return ()  # NCCL chooses interfaces itself
    named = [name.strip() for name in rendezvous.interface().split(",") if name.strip()]
    if not named:
        return ()
    is_shared = len(hosts[topology.hosts[comm.rank]]) > 1
    loopback = interface_of(_LOOPBACK) if is_shared else None
    return tuple(dict.fromkeys([*named, *filter(None, [loopback])]))


def sent_to_other_hosts(comm: Comm) -> int:
    """Return the bytes that this host's interfaces have sent to other hosts until now.

    If the job's interfaces are not known, all interfaces to other machines count.
    """
    known = job_interfaces(comm)
    ways = ((*name.rpartition(", "), nbytes) for name, nbytes in carried().items())
    return sum(
        nbytes
        for interface, _, way, nbytes in ways
        if way == "sent" and not stays_here(interface) and (not known or interface in known)
    )
