"""The session: this process's place among the ranks, and what it measured of the links.

It is the process's; ranks that are threads each have their own, in a context variable. The
environment is read in launch/rendezvous.py.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.comm.process_group import has_joined, join
from shoal.comm.tail_hosts import TailHosts
from shoal.comm.threads import Hub, ThreadComm
from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError, WorldError
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.plan import Plan
from shoal.launch import rendezvous
from shoal.report import text
from shoal.runtime.engine import Engine
from shoal.runtime.lanes import Lane
from shoal.runtime.optim.part import Part
from shoal.runtime.running import Running
from shoal.runtime.servers import Servers, serve
from shoal.runtime.weights import Weigher


@dataclass(frozen=True)
class World:
    """This process's place: `rank` of `size` ranks, on `host`."""

    rank: int
    size: int
    host: str


@dataclass(frozen=True)
class Attached:
    """What runs a parallelised model, and the plan it follows."""

    running: Running
    plan: Plan
    profile: ModelProfile
    cluster: Cluster

    @property
    def engine(self) -> Engine:
        """What sends for it."""
        return self.running.engine

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is not whole here of its optimizers' parameters."""
        return self.running.parts


@dataclass(frozen=True)
class Threads:
    """A parallelised model's, which outlive it until the next one comes."""

    model: ref[nn.Module]
    lanes: Sequence[Lane]
    weigher: Weigher
    boundary: Comm | None  # of cut layers: weights are read over it as long as there is the model

    def drain(self) -> None:
        """Wait until they have done what they have to do."""
        for lane in self.lanes:
            lane.drain()
        self.weigher.drain()

    def abandon(self) -> None:
        """End them behind what they are doing, whatever they have still to do."""
        for lane in self.lanes:
            lane.abandon()
        self.weigher.abandon()

    def close(self) -> None:
        """End them, after what they have to do, and give back their channels."""
        for lane in self.lanes:
            lane.close()
        self.weigher.close()

    def close_boundary(self) -> None:
        """Give back the channel of cut layers."""
        if self.boundary is not None:
            self.boundary.close()


@dataclass
class Session:
    """The ranks, and what is kept between two `parallelize` calls."""

    comm: Comm
    cluster: Cluster | None = None
    attached: WeakKeyDictionary[nn.Module, Attached] = field(default_factory=WeakKeyDictionary)
    optimizers: WeakKeyDictionary[nn.Module, tuple[Optimizer, ...]] = field(
        default_factory=WeakKeyDictionary
    )
    threads: dict[int, Threads] = field(default_factory=dict)  # by the number of the model
    released: WeakSet[nn.Module] = field(default_factory=WeakSet)  # ordinary again
    # parameters, also of models gone
    served: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    models: int = 0  # that were parallelised, whether they are gone or not
    servers: Servers | None = None
    tail: TailHosts | None = None
    broken: bool = False  # this rank ends for an error
    process: int = field(default_factory=os.getpid)

    @property
    def world(self) -> World:
        """This process's place among the ranks."""
        comm, host = self.comm, self.comm.topology.hosts[self.comm.rank]
        if self.tail is not None and self.tail.is_one:
            return World(self.tail.comm.rank, self.tail.comm.workers, host)
        return World(comm.rank, comm.size, host)

    def end_gone(self) -> None:
        """End the threads of models that are gone on every rank (a collective); servers keep theirs
        of all.
        """
        if self.servers is not None:
            return
        gone = {number for number, each in self.threads.items() if each.model() is None}
        for number in set.intersection(*self.comm.gather_objects(gone)):
            ended = self.threads.pop(number)
            ended.drain()
            ended.close()
            ended.close_boundary()

    def drain(self) -> None:
        """Finish what other ranks wait for: parameters that this one has updated and is sending;
        servers' work.
        """
        for each in self.threads.values():
            for lane in each.lanes:
                lane.drain()
        if self.servers is not None:
            self.servers.end()
        if self.tail is not None:
            self.tail.end()

    def abandon(self) -> None:
        """Leave what lanes have still to do: this rank ends for an error."""
        for each in self.threads.values():
            each.abandon()
        if self.servers is not None:
            self.servers.abandon()

    def close(self) -> None:
        """End every parallelised model's threads; what cut layers send over stays, as weights are
        read later.
        """
        for each in self.threads.values():
            each.close()
        if self.servers is not None:
            self.servers.close()


# of a thread that is a rank
_session: ContextVar[Session | None] = ContextVar("shoal_session", default=None)
# at most one: the process's, which all its threads and a notebook's cells share
_joined: list[Session] = []


def init(*, timeout_s: float = 300.0, start_timeout_s: float = 60.0) -> World:
    """Join the other ranks, as torchrun's environment variables say; without them this process is
    alone.

    Where SHOAL_SERVERS=S is set on every rank, the last S of them are servers (strategy "server"):
    on those this call serves until the workers have ended, and then ends the process. Where
    SHOAL_TAIL=T is set, the last T run the end of the model (strategy "stage"): on those
    `parallelize` does so, and ends the process.

    Args:
        timeout_s: seconds after which an exchange that a rank does not take part in is an error.
            Whatever this says, a rank that dies is noticed within seconds, and one that is stopped
            within 20.
        start_timeout_s: seconds to wait for every rank to start.

    Returns:
        This process's place among the workers; `rank` is `size` or more on a tail host. A second
        call gives the same.

    Raises:
        MissingRank: a rank did not start in time; it is named.
        UsageError: torchrun's variables are incomplete, or differ between ranks.
        WorldError: on a server, a rank was lost.

    Example:
        >>> import shoal
        >>> shoal.init().size
        1
    """
    session = _found()
    if session is None:
        if min(timeout_s, start_timeout_s) <= 0:
            raise UsageError(
                "a time-out is more than 0 s",
                got=f"{timeout_s}, {start_timeout_s}",
                do="give seconds",
            )
        comm = _joined_ranks(timeout_s, start_timeout_s)
        if comm.rank >= comm.workers and not comm.topology.tail:
            for observed in filter(None, serve(comm)):
                text.console().print(text.staleness(comm.rank, observed))
            comm.leave(None)
            sys.exit(0)
        session = _among_workers(comm)
        _joined.append(session)
        # Before what tells the others that this rank has left; multiprocessing's children know no
        # atexit.
        atexit.register(_drain_at_exit, session)
        Finalize(None, _drain_at_exit, (session,), exitpriority=10)
    return session.world


def _found() -> Session | None:
    return _session.get() or next(iter(_joined), None)


def _joined_ranks(timeout_s: float, start_timeout_s: float) -> Comm:
    """All ranks, as the environment or the program's own process group say."""
    if rendezvous.is_alone() and not has_joined():
        return ThreadComm(hub=Hub(hosts=(rendezvous.host_name(),)))
    return join(rendezvous.seat(has_joined=has_joined()), timeout_s, start_timeout_s)


def _among_workers(comm: Comm, cluster: Cluster | None = None) -> Session:
    """The session of a worker, or of a tail host; where there are servers or a tail all of them
    call this at once.
    """
    if comm.workers == comm.size:
        return Session(comm, cluster)
    if comm.topology.tail:
        tail = TailHosts(comm)
        return Session(comm.group(tail.peers), cluster, tail=tail)
    return Session(comm.group(range(comm.workers)), cluster, servers=Servers(comm))


def world() -> World:
    """This process's rank, the number of ranks, and its host's name (UsageError before `init`).

    Example:
        >>> import shoal
        >>> _ = shoal.init()
        >>> shoal.world().rank
        0
    """
    return current().world


def leave(error: BaseException | None) -> None:
    """Tell the other ranks that this one ends, and why. An uncaught error and an ordinary end tell
    by themselves.
    """
    session = _found()
    if session is not None:
        session.broken = error is not None
        session.comm.leave(error)


def _drain_at_exit(session: Session) -> None:
    if session.process != os.getpid():  # forked from a rank, whose threads it has not
        return
    # an uncaught error leaves nothing to finish
    if session.broken or getattr(sys, "last_value", None) is not None:
        session.abandon()
        return
    with suppress(WorldError):  # a rank that is lost is told of by those who still need it
        session.drain()


def current() -> Session:
    """The session (UsageError before `init`)."""
    session = _found()
    if session is None:
        raise UsageError("there is no session yet", do="call shoal.init() first, on every rank")
    return session


def ranks() -> Comm:
    """The session's ranks; before `init`, this process alone."""
    session = _found()
    return ThreadComm() if session is None else session.comm


@contextmanager
def using(comm: Comm, cluster: Cluster | None = None) -> Iterator[Session]:
    """Be a rank of `comm` for a while: how threads are ranks. A `cluster` stands for measuring the
    links.
    """
    session = _among_workers(comm, cluster)
    token = _session.set(session)
    try:
        yield session
        session.drain()
        session.close()  # after an error a lane may wait for a message that will not come
    except BaseException:
        session.abandon()
        raise
    finally:
        _session.reset(token)
