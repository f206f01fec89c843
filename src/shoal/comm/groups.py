"""Makes process groups, or says who or what was not there for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from shoal.comm.heartbeat import Heartbeat
from shoal.comm.inside import Inside
from shoal.comm.meeting import INTERFACE
from shoal.core.errors import UsageError

# what gloo says where not the others are at fault
_OWN_FAULTS = ("Unable to find address", "Unable to find interface", "Cannot resolve", "bind")


def made(
    make: Callable[[], object],
    heartbeat: Heartbeat,
    inside: Inside,
    ranks: Sequence[int],
    limit_s: float,
) -> dist.ProcessGroup:
    """Make a process group of these ranks, while the beats of all of them are looked at.

    It is returned once every rank has it: one that went on and ended its program would close
    connections that others still make.

    Args:
        make: makes it on this rank.
        heartbeat: looks at the beats.
        inside: makes the calls into torch.distributed.
        ranks: its ranks, among all there are.
        limit_s: seconds that it may take.

    Raises:
        UsageError: this host has no such interface or address.
        WorldError: a rank is lost that is to make it, too, or has not made it in time.
    """
    with heartbeat.awaiting(ranks):
        group = inside.run(partial(_everywhere, make, heartbeat), in_time=limit_s)
    if heartbeat.store is not None:
        heartbeat.store.is_made()
    return group


def _everywhere(make: Callable[[], object], heartbeat: Heartbeat) -> dist.ProcessGroup:
    """Make it on every rank; what this host lacks for it is said in the library's words."""
    try:
        group = make()
        assert isinstance(group, dist.ProcessGroup)
        dist.all_reduce(torch.zeros(1, device="cpu"), group=group)
        return group
    except RuntimeError as error:
        heartbeat.check()  # what another rank lacks comes this way too
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
