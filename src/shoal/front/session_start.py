"""How a session begins and ends: joining the other ranks, and serving them.

    init     joins. On a host that does not train it serves in place of training, and then raises
             `Served`, which ends the script
    serve    for hosts that do not train, with a program of their own: returns when all is done
    using    a rank that is a thread

The environment says which rank this is, and is read in comm/rendezvous.py.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any, NoReturn, final

from torch import nn
from torch.optim import Optimizer

from shoal.comm import rendezvous
from shoal.comm.heartbeat import LEAST_LOST_S
from shoal.comm.other_launchers import adopt
from shoal.comm.process_group import has_joined, join
from shoal.comm.threads import Hub, ThreadComm
from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, ShoalError, UsageError, WorldError
from shoal.core.facts import Cluster
from shoal.core.numbers import MOST_SECONDS, is_positive
from shoal.front import text
from shoal.front.errors import show_messages_only
from shoal.front.request import listed
from shoal.remote.holding_hosts import HoldingHosts
from shoal.servers.servers import Servers
from shoal.servers.servers import serve as serve_workers
from shoal.servers.stations import serve_stations
from shoal.session.session import Session, World, begin, found, leave, of_thread


@final
class Served(SystemExit):
    """This process is a server or a tail host, and has served until the workers ended.

    `init` or `parallelize` raise it there, because the rest of a training script is not for such a
    host. It is a SystemExit: a script that does not catch it ends, with exit code 0. A program that
    is to go on calls `serve` instead.
    """

    def __init__(self) -> None:
        super().__init__(0)


def init(
    *,
    timeout_s: float | None = None,
    start_timeout_s: float = 60.0,
    lost_after_s: float | None = None,
) -> World:
    """Join the other ranks, by the variables of torchrun, srun or mpirun in the environment.

    If they are missing, this process is alone.

    If SHOAL_SERVERS=S is set on every rank, the last S ranks are servers (strategy "server"). On a
    server this call serves until the workers have ended, and then raises `Served`. If SHOAL_TAIL=T
    is set, the last T ranks bring no rows, and hold layers of a pipeline ("pipeline:2" if two ranks
    train). They serve in `parallelize`.

    Args:
        timeout_s: seconds after which an unfinished exchange is an error. By default the others
            wait 30 minutes for a rank that computes, evaluates or saves alone, and 90 s for a rank
            that waits in another call. If all take part, the limit is ten times the predicted step,
            and at least 60 s. A rank that dies is noticed within seconds.
        start_timeout_s: seconds to wait for every rank to start.
        lost_after_s: seconds after which a stopped rank, or a rank on a host without a sign of
            life, counts as lost. By default 20, at least 3. The others wait for a rank that
            computes, or keeps Python's lock.

    Returns:
        This process's place among the workers. `rank` is `size` or more on a tail host. A second
        call gives the same.

    Raises:
        MissingRank: a rank did not start in time. It is named.
        UsageError: torchrun's variables are incomplete, or differ between ranks.
        WorldError: on a server, a rank was lost.
        Served: on a server, after its work. If you do not catch it, it ends the script with exit
            code 0.

    Examples:
        >>> import shoal
        >>> shoal.init().size
        1
    """
    if not rendezvous.wants_frames():
        show_messages_only()
    session = found()
    if session is None:
        comm = _joined_ranks(timeout_s, start_timeout_s, lost_after_s)
        if _is_server(comm):
            _serve_workers(comm)
            raise Served
        session = _begin(comm)
    return session.world


def serve(
    model: nn.Module | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = (),
    *,
    timeout_s: float | None = None,
    start_timeout_s: float = 60.0,
    lost_after_s: float | None = None,
) -> None:
    """Run a server or a tail host until the workers have ended, in a program that only serves.

    It needs no training script: `python -c "import shoal; shoal.serve()"` is a server if its
    environment makes it one of the last SHOAL_SERVERS ranks.

    Args:
        model: on a tail host, the model that workers give `parallelize`.
        loss_fn: likewise.
        optimizer: likewise, or a list of them.
        timeout_s: as for `init`.
        start_timeout_s: as for `init`.
        lost_after_s: as for `init`.

    Raises:
        MissingRank: a rank did not start in time. It is named.
        UsageError: this rank is a worker, or torchrun's variables are incomplete.
        WorldError: a rank was lost, or workers ask for different things.

    Examples:
        >>> import shoal
        >>> shoal.serve()
        Traceback (most recent call last):
        shoal.core.errors.UsageError: this rank is a worker, and nobody asks it to serve
          where: rank 0 of 1
          do this: call shoal.init() and train; or set SHOAL_SERVERS or SHOAL_TAIL on every rank
    """
    session = found()
    if session is None:
        comm = _joined_ranks(timeout_s, start_timeout_s, lost_after_s)
        if _is_server(comm):
            _serve_workers(comm)
            return
        session = _begin(comm)
    if not is_tail_host(session):
        raise UsageError(
            "this rank is a worker, and nobody asks it to serve",
            where=f"rank {session.world.rank} of {session.world.size}",
            do="call shoal.init() and train; or set SHOAL_SERVERS or SHOAL_TAIL on every rank",
        )
    hold(session, model, loss_fn, listed(optimizer))
    leave(None)


def is_tail_host(session: Session) -> bool:
    """Return whether this process runs the end of models, and does not train."""
    hosts = session.other(HoldingHosts)
    return hosts is not None and hosts.is_one


def serve_and_end(
    session: Session,
    model: nn.Module | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizers: Sequence[Optimizer] = (),
) -> NoReturn:
    """Run a tail host until the workers have ended, and then raise `Served`."""
    hold(session, model, loss_fn, optimizers)
    leave(None)
    raise Served


def hold(
    session: Session,
    model: nn.Module | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizers: Sequence[Optimizer] = (),
) -> None:
    """Hold layers of a model, as a host without rows, until the ranks that train have ended."""
    hosts = session.other(HoldingHosts)
    assert hosts is not None
    serve_stations(hosts, model, loss_fn, optimizers)
    session.drain()
    session.close()


def _is_server(comm: Comm) -> bool:
    return comm.rank >= comm.workers and not comm.topology.tail


def _serve_workers(comm: Comm) -> None:
    """Run a server until the workers have ended. Report how far they ran ahead of one another."""
    for observed in filter(None, serve_workers(comm)):
        text.console().print(text.lags(comm.rank, observed))
    comm.leave(None)


def _begin(comm: Comm) -> Session:
    """Begin the process's session, which ends with the process."""
    session = _among_workers(comm)
    begin(session)
    # Register this before the call that tells other ranks of this rank's end. Children of
    # multiprocessing do not run atexit.
    atexit.register(_drain_at_exit, session)
    Finalize(None, _drain_at_exit, (session,), exitpriority=10)
    return session


def _joined_ranks(
    timeout_s: float | None, start_timeout_s: float, lost_after_s: float | None = None
) -> Comm:
    """Join all ranks, by the environment or by the program's own process group."""
    options = {"timeout_s": timeout_s, "lost_after_s": lost_after_s}
    given = {name: seconds for name, seconds in options.items() if seconds is not None}
    given["start_timeout_s"] = start_timeout_s
    if not all(is_positive(seconds, MOST_SECONDS) for seconds in given.values()):
        raise UsageError(
            "a time-out is more than 0 s, and a number",
            got=", ".join(f"{name}={seconds!r}" for name, seconds in given.items()),
            do="give seconds, such as 300.0",
        )
    if lost_after_s is not None and lost_after_s < LEAST_LOST_S:
        raise UsageError(
            f"lost_after_s is at least {LEAST_LOST_S:g} s: ranks give a sign of life twice a "
            "second, and several in a row may be late on a busy host",
            got=f"lost_after_s={lost_after_s!r}",
            do=f"give {LEAST_LOST_S:g} or more, or leave it out: a process that has ended is "
            "noticed within seconds all the same",
        )
    if not has_joined():
        adopt()
    if rendezvous.is_alone() and not has_joined():
        return ThreadComm(hub=Hub(hosts=(rendezvous.host_name(),)))
    seat = rendezvous.seat(has_joined=has_joined())
    try:
        return join(seat, timeout_s, start_timeout_s, lost_after_s)
    except ShoalError as error:  # any error of the start
        raise error.with_advice("run: shoal doctor") from error.__cause__


def _among_workers(comm: Comm, cluster: Cluster | None = None) -> Session:
    """Return the session of a worker or tail host. All of them call this at once."""
    world = World(comm.rank, comm.workers, comm.topology.hosts[comm.rank])
    if comm.workers == comm.size:
        return Session(comm, world, cluster=cluster)
    if comm.topology.tail:
        tail = HoldingHosts(comm)
        return Session(comm.group(tail.peers), world, (tail,), cluster)
    return Session(comm.group(range(comm.workers)), world, (Servers(comm),), cluster)


def _drain_at_exit(session: Session) -> None:
    if session.process != os.getpid():  # this process was forked from a rank, without its threads
        return
    # an uncaught error leaves nothing to finish
    if session.broken or getattr(sys, "last_value", None) is not None:
        session.abandon()
        return
    session.finish()
    try:
        session.drain()
    except (WorldError, RanksDiffer):  # the ranks that still need the lost data report this error
        session.abandon()


@contextmanager
def using(comm: Comm, cluster: Cluster | None = None) -> Iterator[Session]:
    """Run a rank of `comm` in this thread. A `cluster` replaces measured links."""
    session = _among_workers(comm, cluster)
    with of_thread(session):
        try:
            yield session
            session.finish()
            session.drain()
            session.close()  # after an error a lane may wait for a message that will not come
        except BaseException:
            session.abandon()
            raise
