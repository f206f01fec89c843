"""Meeting of the ranks, and the network by which they will reach one another.

    1  connect     to the store, which the launcher holds, or rank 0
    2  roll call   the ranks that are there, and whether all were started alike (roll_call.py)
    3  interface   the one of the connection to the store. A rank on the store's own host reaches
                   it by loopback, so it takes the interface that leads to a rank elsewhere

Why so: PyTorch takes the interface of the host's own name. On Debian as installed that name means
127.0.1.1, and with several networks it may mean one that leads nowhere. But every rank has reached
the store, by a way that works.

Cost: one more connection, to learn the way.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed import TCPStore

from shoal.comm.blocking_calls import Aside
from shoal.comm.roll_call import Arrival, RollCall
from shoal.contracts.launcher import Meeting, Seat, scope
from shoal.contracts.store import open_store
from shoal.contracts.store_values import Values
from shoal.core.errors import MissingRank, PeerLost, RanksDiffer, UsageError
from shoal.core.facts import Topology
from shoal.core.interfaces import interface_of, is_loopback, own_addresses, source_towards

INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable that names it
_KNOCK_S = 1.0
_AGAIN_S = 0.1
_LATE_S = 0.3  # seconds after the limit: an error of the limit itself says more
_LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True)
class Roster:
    """The ranks that have come together.

    `values` belong to this start of the job, and to no other.
    """

    values: Values
    rank: int
    everyone: tuple[Arrival, ...] = field(repr=False)
    # interface by which this rank reaches the others; None: torch chooses
    interface: str | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.everyone)

    @property
    def topology(self) -> Topology:
        """Hosts and processors of the ranks."""
        first = self.everyone[0]
        return Topology(
            tuple(here.host for here in self.everyone),
            first.servers,
            first.tail,
            tuple(here.versions.rounding for here in self.everyone),
        )

    @property
    def beside_store(self) -> tuple[int, ...]:
        """The ranks on the store's host."""
        return tuple(here.rank for here in self.everyone if here.is_beside_store)


def meet(seat: Seat, timeout_s: float) -> Roster:
    """Meet the other ranks.

    Args:
        seat: this process's place, from the launcher; without a `meeting` if the program has a
            process group.
        timeout_s: seconds to wait for every rank.

    Raises:
        MissingRank: not every rank came in time. The error names the missing ranks.
        PeerLost: the store has gone.
        UsageError: a rank is there twice, or was started unlike this one; or the servers and the
            tail leave too few workers.
    """
    began_s = time.monotonic()

    def look() -> None:
        if time.monotonic() > began_s + timeout_s + _LATE_S:
            raise _silent(seat, timeout_s)

    roster = Aside().run(partial(_meet, seat, timeout_s, began_s), look)
    if roster.rank == 0:
        if not seat.token:
            _warn_of_strangers(roster.everyone)
        _warn_of_python(roster.everyone)
    return roster


def _meet(seat: Seat, timeout_s: float, began_s: float) -> Roster:
    """Meet the ranks.

    If the store is stopped, or a stranger is in its place, this may block for ever.
    """
    if seat.meeting is None:
        rank, size = dist.get_rank(), dist.get_world_size()
        store, found = dist.distributed_c10d._get_default_store(), {}
    else:
        rank, size = seat.meeting.rank, seat.meeting.size
        check_workers(seat, size)
        store, way = connect(seat.meeting, rank == seat.holder, timeout_s, seat.host)
        found = {"address": way.own, "is_beside_store": way.stays}
    problem = interface_problem(seat.interface, seat.host)
    what = problem.what if problem else ""
    own = Arrival.at(seat, rank, size, machine=_machine(), problem=what, **found)
    name = scope(seat.job)
    values = Values(store, seat.token, name)
    roll = RollCall(values, own, timeout_s, restarts=seat.restarts, began_s=began_s)
    try:
        start, everyone = roll.take()
    except RanksDiffer:
        # the others hear of the problem, and this rank's own error says more
        if problem is not None:
            raise problem from None
        raise
    except dist.DistError as error:
        raise PeerLost(
            "the store where ranks meet went away before all had come: rank 0 (or the launcher), "
            "which held it, has ended",
            where=own.where,
            got=str(error).splitlines()[0][:200],
            do="see what that one printed last; start the job again",
            rank=seat.holder,
        ) from None
    interface = seat.interface or interface_towards(own, everyone)
    return Roster(values.within(f"{name}/{start}"), rank, everyone, interface)


def _silent(seat: Seat, timeout_s: float) -> MissingRank:
    place = f"{seat.meeting.address}:{seat.meeting.port}" if seat.meeting else "the store"
    return MissingRank(
        f"rank 0 (or the launcher) did not start within {timeout_s:g} s: {place} takes "
        "connections, but does not answer",
        where=f"rank {seat.meeting.rank}, host {seat.host}" if seat.meeting else seat.host,
        got="another program, or a launcher that is stopped",
        do="set MASTER_PORT to a port that no other program has; start all ranks again",
        rank=0,
    )


def _warn_of_strangers(everyone: Sequence[Arrival]) -> None:
    """Warn if other hosts may reach the store, and no secret tells ranks from strangers."""
    own = everyone[0]
    here_only = not own.address or is_loopback(own.address)
    if here_only and all(other.machine == own.machine for other in everyone):
        return
    logging.getLogger("shoal").warning(
        "shoal: there is no SHOAL_TOKEN, so whoever reaches the ranks' store can speak for a rank. "
        "Set it to the same secret on every host: docs/guide/security.md"
    )


def _warn_of_python(everyone: Sequence[Arrival]) -> None:
    """Warn if ranks run different releases of Python: they train, but probably by mistake."""
    releases = {here.versions.python.rpartition(".")[0] for here in everyone}
    if len(releases) > 1:
        who = ", ".join(f"rank {h.rank} (host {h.host}): {h.versions.python}" for h in everyone)
        warnings.warn(
            f"ranks run unlike releases of Python: {who}; libraries and data may differ with them",
            stacklevel=5,
        )


def check_workers(seat: Seat, size: int) -> None:
    """Raise UsageError if the servers and the tail leave too few workers."""
    servers, tail = seat.servers, seat.tail
    if servers >= size:
        got, do = f"{servers} servers among {size} ranks", "leave at least one rank to train"
        raise UsageError("not every rank can be a server", got=got, do=do)
    if tail and (servers or size - tail < max(2, tail)):
        raise UsageError(
            "a tail needs two workers, and as many as it has ranks itself; and no servers",
            got=f"{tail} ranks of the tail and {servers} servers among {size} ranks",
            do="set SHOAL_TAIL to half of the ranks at most, and no SHOAL_SERVERS",
        )


@dataclass(frozen=True)
class _StoreConnection:
    """Connection to the store, by numeric addresses."""

    own: str
    store: str

    @property
    def stays(self) -> bool:
        """Whether the store is on this host."""
        return is_loopback(self.own) or self.own == self.store


def connect(
    meeting: Meeting, hold: bool, timeout_s: float, host: str
) -> tuple[TCPStore, _StoreConnection]:
    """Connect to the ranks' store, or hold it. Return the store and the way that leads there."""
    address, port = meeting.address, meeting.port
    where = f"rank {meeting.rank} of {meeting.size}, host {host}"
    way = None if hold else _way_there(meeting, timeout_s, where)
    try:
        # a name may mean several addresses: use the one that has answered
        store = _store(way, port, timeout_s) if way else open_store(address, port, timeout_s)
    except (OSError, dist.DistError) as error:
        raise UsageError(
            f"the store of the ranks cannot {'listen' if hold else 'be used'} at {address}:{port}",
            where=where,
            got=str(error).splitlines()[0][:200],
            do="set MASTER_ADDR to an address of rank 0's host and MASTER_PORT to a port that is "
            "free there",
        ) from None
    return store, way or _way_there(meeting, timeout_s, where)


def _way_there(meeting: Meeting, timeout_s: float, where: str) -> _StoreConnection:
    """Knock until a store listens. If none does, PyTorch's own store would print its stack.

    That store also takes twice its time-out, and does not say by which addresses it came.
    """
    deadline = time.monotonic() + timeout_s
    while isinstance(way := _knock(meeting.address, meeting.port), str):
        if time.monotonic() > deadline:
            raise MissingRank(
                f"rank 0 (or the launcher) did not start within {timeout_s:g} s: no answer "
                f"from {meeting.address}:{meeting.port}",
                where=where,
                got=way,
                do="start every rank; check MASTER_ADDR and MASTER_PORT; or raise "
                "init(start_timeout_s=…)",
                rank=0,
            )
        time.sleep(_AGAIN_S)
    return way


def _store(way: _StoreConnection, port: int, timeout_s: float) -> TCPStore:
    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(way.store, port, is_master=False, timeout=timeout, wait_for_workers=False)


def _knock(address: str, port: int) -> _StoreConnection | str:
    """Connect, and hang up. Return the way there, or the reason why there is none."""
    try:
        with socket.create_connection((address, port), timeout=_KNOCK_S) as there:
            return _StoreConnection(there.getsockname()[0], there.getpeername()[0])
    except (OSError, UnicodeError) as error:  # includes names that are not valid
        return str(error)


def interface_problem(asked: str | None, host: str) -> UsageError | None:
    """Return an error if this host lacks an interface that the user has named."""
    there = own_addresses()
    names = {address.interface for address in there}
    absent = [name for name in (asked or "").split(",") if name and name not in names]
    if not absent or not there:
        return None
    return UsageError(
        f"{INTERFACE} names an interface that host {host} lacks, or that is down: {absent[0]}",
        where=f"host {host}",
        got=f"{INTERFACE}={asked}",
        expected="one of: " + ", ".join(f"{a.interface} ({a.text})" for a in there),
        do=f"unset {INTERFACE}: Shoal takes the interface that leads to MASTER_ADDR",
    )


def interface_towards(own: Arrival, everyone: Sequence[Arrival]) -> str | None:
    """Return the interface that leads to the other ranks; None if it cannot be found."""
    here = own.address
    if own.is_beside_store:
        elsewhere = [other for other in everyone if other.machine != own.machine]
        reached = [other.address for other in elsewhere if not other.is_beside_store]
        if elsewhere:  # if their addresses are unknown, as through a tunnel, it cannot be found
            here = next(filter(None, map(source_towards, filter(None, reached))), "")
    if is_loopback(here):
        return next(filter(None, map(interface_of, _LOOPBACK)), None)
    return interface_of(here) if here else None


def _machine() -> str:
    """Return a name for the owner of the interfaces: a machine, or a container or namespace on
    it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
