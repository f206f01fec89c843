"""Makes process groups, or names the rank or interface that was missing."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from shoal.comm.heartbeat import Heartbeat
from shoal.comm.meeting import INTERFACE
from shoal.comm.torch_calls import Inside
from shoal.core.errors import UsageError

# words in gloo's errors about this host, not about the others
_OWN_FAULTS = ("Unable to find address", "Unable to find interface", "Cannot resolve", "bind")


def made(
    make: Callable[[], object],
    heartbeat: Heartbeat,
    inside: Inside,
    ranks: Sequence[int],
    limit_s: float,
) -> dist.ProcessGroup:
    """Make a process group of these ranks, and watch the beats of all of them meanwhile.

    It returns once every rank has the group. A rank that went on and ended its program earlier
    would close connections that others still make.

    Args:
        make: makes the group on this rank.
        heartbeat: watches the beats.
        inside: makes the calls into torch.distributed.
        ranks: the group's ranks, among all ranks.
        limit_s: seconds that it may take.

    Raises:
        UsageError: this host has no such interface or address.
        WorldError: a rank of the group is lost, or has not made it in time.
    """
    with heartbeat.awaiting(ranks):
        group = inside.run(partial(_everywhere, make, heartbeat), in_time=limit_s)
    if heartbeat.store is not None:
        heartbeat.store.is_made()
    return group


def _everywhere(make: Callable[[], object], heartbeat: Heartbeat) -> dist.ProcessGroup:
    """Make the group on every rank.

    If this host lacks an address for it, raise with gloo's own words.
    """
    try:
        group = make()
        assert isinstance(group, dist.ProcessGroup)
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"), group=group)
        return group
    except RuntimeError as error:
        heartbeat.check()  # if another rank lacks something, its error arrives here, too
        reason = str(error).splitlines()[0]
        if not any(words in reason for words in _OWN_FAULTS):
            raise
        raise UsageError(
            "this host has no such network interface or address to meet the other ranks at",
            where=heartbeat.who,
            got=f"{INTERFACE}={os.environ.get(INTERFACE)!r}; {reason[-200:]}",
            do=f"set {INTERFACE} on this host to one of "
            + ", ".join(name for _, name in socket.if_nameindex()),
        ) from None
