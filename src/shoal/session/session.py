"""The session: this process's place among the ranks, and its records between two calls.

A process has one session. Ranks that are threads each have their own, in a context variable. A
session includes all that runs next to the main thread: every model's threads, and the ways to hosts
that do not train. How a session begins and ends: session_start.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.comm.threads import ThreadComm
from shoal.contracts.comm import Comm
from shoal.contracts.feature import Features
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.passes import Passes
from shoal.core.plan import Plan
from shoal.engine.attendance import LaneAttendance
from shoal.engine.border import accumulator
from shoal.engine.engine import Engine
from shoal.optim.part import Part
from shoal.session.running import Running
from shoal.session.watch import Watched


@dataclass(frozen=True)
class World:
    """This process's place: `rank` of `size` ranks, on `host`.

    Examples:
        >>> import shoal
        >>> shoal.init().size
        1
    """

    rank: int
    size: int
    host: str

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files.

        Examples:
            >>> World(rank=1, size=2, host="one").is_main
            False
        """
        return self.rank == 0


@dataclass(frozen=True)
class Attached:
    """A parallelised model: the plan that it follows, and its running parts.

    Args:
        running: the running model.
        plan: the plan that it follows.
        profile: the model as it was measured.
        cluster: the ranks and their links as they were measured.
        features: features of its training.
        parts: the parts of its optimizers with parameters that are not whole here.
        watched: the hooks on the model and its loss.
    """

    running: Running
    plan: Plan
    profile: ModelProfile
    cluster: Cluster
    features: Features = ()
    parts: tuple[Part, ...] = ()
    watched: Watched | None = None

    @property
    def engine(self) -> Engine:
        """The engine that sends for the model."""
        return self.running.engine


class SessionPart(Protocol):
    """A part of the session that runs next to the main thread."""

    def drain(self) -> None:
        """Finish the work that other ranks wait for."""

    def abandon(self) -> None:
        """Drop unfinished work, and end soon: this rank ends for an error."""

    def close(self) -> None:
        """End after all queued work, and give back everything that was opened."""


AnyPart = TypeVar("AnyPart", bound=SessionPart)


@dataclass(frozen=True)
class Threads:
    """Background threads of one model. They live until the next model is parallelised."""

    model: ref[nn.Module]
    lanes: Sequence[SessionPart]
    counts: SessionPart  # counts rows; the end of a program does not wait for it
    # channel of cut layers: weights are read over it as long as the model lives
    boundary: Comm | None
    engine: Callable[[], Engine | None]  # returns the engine, as long as the model lives
    attendance: LaneAttendance | None = None  # serves ranks that read alone
    lasting: bool = False  # whether hosts that do not train keep their ends until the session ends

    def release(self) -> None:
        """Release from the parameters of a model that is gone everything that they hold."""
        if (engine := self.engine()) is not None:
            engine.release()

    def drain(self) -> None:
        """Finish the work that other ranks wait for."""
        for lane in self.lanes:
            lane.drain()

    def abandon(self) -> None:
        """End after the present job, whatever is still queued."""
        for part in self._all():
            part.abandon()

    def close(self) -> None:
        """End after all queued work, and give back the channels except the boundary."""
        for part in self._all():
            part.close()

    def _all(self) -> Sequence[SessionPart]:
        attendance = () if self.attendance is None else (self.attendance,)
        return (*self.lanes, self.counts, *attendance)

    def close_boundary(self) -> None:
        """Give back the channel of cut layers."""
        if self.boundary is not None:
            self.boundary.close()


@dataclass
class Session:
    """The ranks, and everything kept between two `parallelize` calls."""

    comm: Comm
    world: World
    others: tuple[SessionPart, ...] = ()  # the ways to hosts that do not train
    cluster: Cluster | None = None
    attached: WeakKeyDictionary[nn.Module, Attached] = field(default_factory=WeakKeyDictionary)
    optimizers: WeakKeyDictionary[nn.Module, tuple[Optimizer, ...]] = field(
        default_factory=WeakKeyDictionary
    )
    threads: dict[int, Threads] = field(default_factory=dict)  # threads by the number of the model
    released: WeakSet[nn.Module] = field(default_factory=WeakSet)  # models that are ordinary again
    # parameters, also of models that are gone
    served: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    passes: Passes = field(init=False)  # passes over sharded loaders
    # usual rows of loaded models, by the number of ranks at the save
    usual_rows: WeakKeyDictionary[nn.Module, dict[int, float]] = field(
        default_factory=WeakKeyDictionary
    )
    # hooks by which a session knows that it trains, with the autograd nodes that have them
    signs: WeakKeyDictionary[Optimizer, list[tuple[RemovableHandle, Any]]] = field(
        default_factory=WeakKeyDictionary
    )
    models: int = 0  # number of models that were parallelised, including models that are gone
    broken: bool = False  # this rank ends for an error
    process: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        optimizers = self.optimizers
        self.passes = Passes(lambda: bool(optimizers))
        self.passes.hear = partial(self.comm.hear, again=False)

    def other(self, kind: type[AnyPart]) -> AnyPart | None:
        """Return the way to hosts of that kind, if there are any."""
        return next((part for part in self.others if isinstance(part, kind)), None)

    def notice_training(self, optimizer: Optimizer, *, alone: bool) -> None:
        """Take the optimizer's steps for a sign of training.

        If the process is `alone`, and so has no engine, its backwards count as well.
        """
        if optimizer in self.signs:
            return
        passes = self.passes
        step = optimizer.register_step_post_hook(lambda *_: passes.note_step())
        signs: list[tuple[RemovableHandle, Any]] = [(step, None)]
        if alone:
            groups = optimizer.param_groups
            trained = [p for group in groups for p in group["params"] if p.requires_grad]
            for parameter in [*trained[:1], *trained[1:][-1:]]:  # one of them tells, as a rule
                with torch.enable_grad():
                    node = accumulator(parameter)
                signs.append((node.register_hook(lambda *_: passes.backward()), node))
        self.signs[optimizer] = signs

    def ignore_training(self, optimizer: Optimizer) -> None:
        """Undo `notice_training`."""
        for hook, _ in self.signs.pop(optimizer, ()):
            hook.remove()

    def end_dropped_models(self) -> None:
        """End the threads of models that are gone on every rank (a collective)."""
        ending = {n: threads for n, threads in self.threads.items() if not threads.lasting}
        if not ending:  # every rank has the same condition here
            return
        gone = [number for number, threads in ending.items() if threads.model() is None]
        for number in set.intersection(
            *map(
                set,
                self.comm.gather_objects(
                    gone, "parallelize: ending threads of models that are gone"
                ),
            )
        ):
            ended = self.threads.pop(number)
            ended.drain()
            ended.close()
            ended.close_boundary()
            ended.release()

    def finish(self) -> None:
        """End training: each feature of each model reports the work that it leaves undone."""
        for attached in self.attached.values():
            for attachment in attached.running.attachments.values():
                attachment.finish()

    def drain(self) -> None:
        """Finish the work that other ranks wait for: models' lanes, then sends to other hosts."""
        for part in self._parts():
            part.drain()
        serves = any(threads.attendance is not None for threads in self.threads.values())
        if serves and self.comm.is_open:  # ranks may read alone until all are at the end
            self.comm.numbers([0] * self.comm.size, "the end of the program")

    def abandon(self) -> None:
        """Drop unfinished work: this rank ends for an error."""
        for part in self._parts():
            part.abandon()

    def close(self) -> None:
        """End all threads. Channels of cut layers stay, because weights may be read later."""
        for part in self._parts():
            part.close()

    def _parts(self) -> Sequence[SessionPart]:
        return [*self.threads.values(), *self.others]


# the session of a thread that is a rank
_session: ContextVar[Session | None] = ContextVar("shoal_session", default=None)
# the process's session, if any: all its threads and a notebook's cells share it
_joined: list[Session] = []


def begin(session: Session) -> None:
    """Make this the process's session."""
    _joined.append(session)


@contextmanager
def of_thread(session: Session) -> Iterator[None]:
    """Make this the session of a thread while the context lasts."""
    token = _session.set(session)
    try:
        yield
    finally:
        _session.reset(token)


def found() -> Session | None:
    """Return the session, if there is one."""
    return _session.get() or next(iter(_joined), None)


def world() -> World:
    """Return the process's rank, the number of ranks, and the host (UsageError before `init`).

    Examples:
        >>> import shoal
        >>> _ = shoal.init()
        >>> shoal.world().rank
        0
    """
    return current().world


def leave(error: BaseException | None) -> None:
    """Tell the other ranks that this one ends, and why.

    An uncaught error and an ordinary end tell by themselves.
    """
    session = found()
    if session is not None:
        session.broken = error is not None
        session.comm.leave(error)


def current() -> Session:
    """Return the session (UsageError before `init`)."""
    session = found()
    if session is None:
        raise UsageError("there is no session yet", do="call shoal.init() first, on every rank")
    return session


def ranks() -> Comm:
    """Return the session's ranks. Before `init`, this process is alone."""
    session = found()
    return ThreadComm() if session is None else session.comm
