"""Workers that run ahead of one another: servers answer each alone, within a bound.

    worker r, lanes there and back              server, a thread for each worker and lane
      backward   each bucket's slice        ──▶   kept
      step c     its order, with settings   ──▶   Shelf.step: a step's gradients are applied when
                                                  all workers' are there; the answer waits until
                 parameters                 ◀──   gradients of step c − bound were

A worker's clock is the number of its steps. Parameters that it is given are stale by its clock less
the slowest worker's. Each step's gradients are summed in the order of the ranks and applied as one
update, so that a bound of 0 gives the bits of the synchronous step. Without a bound each gradient
is an update of its own as it comes, and no answer waits. Guarded by
tests/equivalence/test_servers.py.

For a checkpoint workers stand still (features/staleness.py): each has its answers, and all meet, so
that every gradient has been applied. Then servers have one state. It goes over its own channel.

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NeurIPS 2013, section 3 (there a worker reads its own updates at once); Dean et al., "Large
Scale Distributed Deep Networks", NeurIPS 2012, section 4.1, for updates as they come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Any, Generic, TypeVar, assert_never, final

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer, Slice, Turn
from shoal.core.errors import UsageError
from shoal.engine.engine import Engine
from shoal.engine.lanes import Answering, Errand
from shoal.optim.owners import gather_values, put_values
from shoal.optim.update import PieceUpdate, put_states
from shoal.remote.orders import (
    AheadOrder,
    PerServer,
    Tell,
    receive_order,
    send_orders,
    verb_for,
    written_order,
)
from shoal.remote.verbs import (
    Aspect,
    End,
    MakeStep,
    Norm,
    Pull,
    Push,
    Read,
    ScaleBy,
    States,
    Sum,
    Values,
    Verb,
    Write,
    unasked,
)
from shoal.remote.wire import MessageReader

POLL_S = 0.5  # a waiting thread looks so often whether a rank was lost
T = TypeVar("T")


@dataclass(frozen=True)
class _Brought:
    """A worker's contribution to a step."""

    gradients: Slice
    optimizer: int  # number of it
    work: Sequence[Any]  # the update's arguments, beside gradients


# a worker's gradients that it has given no order for yet
_Landed = Mapping[OwnedTransfer, SimpleQueue[Slice]]
_ONE_EACH = (
    "where workers run ahead of one another, every backward is followed by one step, and a "
    "bucket's layers have one optimizer"
)


@final
class RunningAhead:
    """The word to the servers of a worker that may run ahead: each worker speaks for itself.

    Args:
        engine: runs the transfers.
        transfers: the model's served ones.
        servers: their ranks.
        lanes: how many channels there are to them, and how many back.
        tell: worker 0's word to all servers, before training starts and where workers stand still.
        beside: a channel for all that is gathered then.
    """

    def __init__(
        self,
        engine: Engine,
        transfers: Sequence[OwnedTransfer],
        servers: range,
        lanes: int,
        tell: Tell,
        beside: Comm,
    ) -> None:
        self._engine, self._transfers, self._servers = engine, transfers, servers
        self._tell, self.beside = tell, beside
        self._stands = False
        # numbers of the transfers
        self._lanes = [range(lane, len(transfers), lanes) for lane in range(lanes)]
        self._backwards = 0
        self._steps = [0] * len(transfers)

    def __call__(self, verb: Verb | PerServer, /) -> None:
        of_server = {server: verb_for(server, verb) for server in self._servers}
        match first := of_server[self._servers[0]]:
            case Sum():
                self._begin_backward()
            case MakeStep():
                self._step({s: own for s, own in of_server.items() if isinstance(own, MakeStep)})
            case Read(Aspect.STATE | Aspect.VALUES) if self._stands:
                self._tell(first)
            case Write(Aspect.STATE | Aspect.VALUES) if not self._backwards:
                self._tell(of_server.__getitem__)
            case _:
                raise UsageError(
                    "there is no one gradient, optimizer state or parameter where workers run "
                    "ahead of one another",
                    got=_request(first),
                    do="train with staleness=0, or do without it",
                )

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Within it no worker makes a step. All have got their answers, and leave together."""
        if any(steps != self._backwards for steps in self._steps):
            raise UsageError(
                "there is a gradient that no step was made with, where workers run ahead",
                where=f"backward {self._backwards}",
                do="save behind optimizer.step()",
            )
        self._stands = True
        try:
            yield
        finally:
            self._stands = False

    def end(self) -> None:
        """Tell the servers that this worker has ended."""
        self._start()
        for on_lane in self._lanes:
            transfers = [self._transfers[number] for number in on_lane]
            # the first
            owning = {
                server: transfer
                for transfer in reversed(transfers)
                for server in self._servers
                if transfer.owned[server]
            }
            there = self._engine.routes.beside(
                transfers[0], partial(_farewell, owning), "farewell to servers", back=False
            )
            for farewell in (there, self._order(on_lane, dict.fromkeys(owning, End()))):
                farewell.wait("the end of the program")
        self.beside.close()

    def _start(self) -> None:
        if not self._backwards:
            self._tell(Sum())

    def _begin_backward(self) -> None:
        if any(steps != self._backwards for steps in self._steps):
            raise UsageError(
                _ONE_EACH,
                do="call optimizer.step() after each backward, or train without staleness",
            )
        self._start()
        self._backwards += 1

    def _step(self, of_server: Mapping[int, MakeStep]) -> None:
        for number in of_server[self._servers[0]].pieces:
            label = self._transfers[number].label
            self._steps[number] += 1
            if self._steps[number] > self._backwards:
                raise UsageError(_ONE_EACH, where=label, do="train without staleness")
            pieces = (how for order in of_server.values() for how in order.pieces[number].values())
            if not all(how.at_owner for how in pieces):
                raise UsageError(
                    "a gradient that was assigned or cleared is this worker's own, where each runs "
                    "ahead by itself",
                    where=label,
                    do="leave .grad alone between backward and optimizer.step(), or train with "
                    "staleness=0",
                )
        for on_lane in self._lanes:
            owned = {
                server: [number for number in on_lane if self._transfers[number].owned[server]]
                for server in self._servers
            }
            orders = {server: order.only(owned[server]) for server, order in of_server.items()}
            self._order(
                on_lane, {server: order for server, order in orders.items() if order.pieces}
            )

    def _order(self, on_lane: Sequence[int], orders: Mapping[int, AheadOrder]) -> Errand:
        """Send servers their orders on a lane's way back, where the answers come."""
        written = {server: written_order(order) for server, order in orders.items()}
        first = self._transfers[on_lane[0]]
        return self._engine.routes.beside(
            first, partial(send_orders, written), "order to servers", back=True
        )


def _farewell(transfers: Mapping[int, OwnedTransfer], comm: Comm) -> None:
    """Tell servers, in place of the gradients of these transfers, that none will come any more."""
    for server, transfer in transfers.items():
        nothing = transfer.slice_of(server)
        nothing.turn.fill_(Turn.END)
        comm.send(nothing.whole, server).wait()


def _request(verb: Verb) -> str:
    """Name the request of the script that leads to this verb."""
    match verb:
        case Read(Aspect.GRADIENT):
            return "a gradient is read"
        case Read(Aspect.STATE):
            return "optimizer.state_dict, outside a checkpoint"
        case Read(Aspect.VALUES):
            return "the parameters, outside a checkpoint"
        case Write(Aspect.STATE):
            return "optimizer.load_state_dict"
        case Write(Aspect.VALUES):
            return "a parameter was changed since the last step"
        case Norm() | ScaleBy():
            return "optimizer.clip_grad_norm_"
    return type(verb).__name__


@final
class AheadModel:
    """A server's part of a model with workers that run ahead of one another.

    Args:
        transfers: of this model.
        updates: each optimizer's, by transfer.
        there: channels from the workers, one a lane.
        back: channels to them, as many.
        beside: a channel for all that is gathered where they stand still.
        staleness: the bound; None for none.
    """

    def __init__(
        self,
        transfers: Sequence[OwnedTransfer],
        updates: Sequence[Mapping[OwnedTransfer, PieceUpdate]],
        there: Sequence[Comm],
        back: Sequence[Comm],
        beside: Comm,
        staleness: int | None,
    ) -> None:
        self.transfers, self._updates, self._there, self._back = transfers, updates, there, back
        self._beside = beside
        workers = there[0].workers
        self._shelves = {
            t: Shelf([of_transfer[t] for of_transfer in updates], workers, staleness)
            for t in transfers
        }
        self._answering = answering = Answering()
        self.check, self.finish = answering.check, answering.finish

    def close(self) -> None:
        """End the threads, and give back the channels."""
        self._answering.close()
        self._beside.close()

    def obey(self, verb: Verb) -> None:
        """Obey worker 0, before training starts or where workers stand still."""
        match verb:
            case Sum():
                self._start()
            case Read(Aspect.STATE, optimizer):
                for update in self._updates[optimizer].values():
                    update.gather_state(None, self._beside)
            case Read(Aspect.VALUES):
                for transfer in self.transfers:
                    gather_values(transfer, self._beside)
            case Write(Aspect.STATE, _, optimizer):
                put_states(self._updates[optimizer], verb.holds(States))
            case Write(Aspect.VALUES):
                put_values(self.transfers, verb.holds(Values))
            case Read() | Write() | Norm() | ScaleBy() | Pull() | Push() | MakeStep():
                raise unasked(verb)
            case _:
                assert_never(verb)

    def _start(self) -> None:
        """Answer each worker by itself from here on."""
        for index, (there, back) in enumerate(zip(self._there, self._back, strict=True)):
            on_lane = [t for t in self.transfers[index :: len(self._there)] if t.owned[there.rank]]
            for worker in range(there.workers if on_lane else 0):
                received: _Landed = {transfer: SimpleQueue() for transfer in on_lane}
                self._answering.begin(worker, partial(_receive, worker, received), there)
                self._answering.begin(worker, partial(self._answer, worker, received), back)

    def observed(self) -> Counter[int]:
        """Count, for each number of steps, how often a worker was so far ahead of the slowest."""
        return sum((shelf.observed for shelf in self._shelves.values()), Counter())

    def _answer(self, worker: int, received: _Landed, comm: Comm) -> None:
        reader, check = MessageReader[AheadOrder](AheadOrder), partial(comm.check, "serving")
        while not isinstance(order := receive_order(reader, worker, comm), End):
            answers = []
            for number, pieces in order.pieces.items():
                transfer = self.transfers[number]
                gradients, answer = (
                    _take_next(received[transfer], check),
                    transfer.slice_of(comm.rank),
                )
                work = pieces, order.groups.value, order.attributes.value
                self._shelves[transfer].step(
                    worker, gradients, order.optimizer, work, answer, check
                )
                answers.append(comm.send(answer.whole, worker))
            for sent in answers:
                sent.wait()
        for transfer in received:
            self._shelves[transfer].leave(worker)


def _receive(worker: int, received: _Landed, comm: Comm) -> None:
    """Receive a worker's gradients, step after step, until it has ended."""
    while True:
        for transfer, waiting in received.items():
            gradients = transfer.slice_of(comm.rank)
            comm.receive(gradients.whole, worker).wait()
            if gradients.turn == Turn.END:
                return
            waiting.put(gradients)


def _take_next(waiting: SimpleQueue[Slice], check: Callable[[], None]) -> Slice:
    """The next gradients, which are under way; `check` is called while they are waited for."""
    while True:
        try:
            return waiting.get(timeout=POLL_S)
        except Empty:
            check()


@final
class Clocks(Generic[T]):
    """The progress of each worker, and the steps that may be applied. To be used holding `moved`.

    Args:
        workers: how many there are.
        bound: by how many steps a worker may be ahead of the slowest; None for any number.
    """

    def __init__(self, workers: int, bound: int | None) -> None:
        self.moved = Condition()
        # steps that a worker was ahead when it was given parameters
        self.observed: Counter[int] = Counter()
        self._bound = bound
        self._clocks = dict.fromkeys(range(workers), 0)
        self._applied = 0  # steps of all workers
        self._waiting: dict[int, dict[int, T]] = {}  # contributions, by step and worker

    @property
    def workers(self) -> Set[int]:
        """Workers that have not ended."""
        return self._clocks.keys()

    def step(self, worker: int, contribution: T) -> list[list[T]]:
        """Count a worker's step, and return the updates to be applied now.

        One update after the other, each in the order of ranks.
        """
        clock = self._clocks[worker]
        self._clocks[worker] += 1
        self.moved.notify_all()
        if self._bound is None:
            return [[contribution]]
        self._waiting.setdefault(clock, {})[worker] = contribution
        return self._complete()

    def leave(self, worker: int) -> list[list[T]]:
        """Forget a worker that has ended, and return the updates to be applied now."""
        del self._clocks[worker]
        self.moved.notify_all()
        return self._complete()

    def wait(self, worker: int, check: Callable[[], None]) -> None:
        """Wait until a worker may go on, that is not too far ahead; `check` is called meanwhile."""
        while self._bound is not None and self._ahead(worker) > self._bound:
            if not self.moved.wait(POLL_S):
                check()

    def count(self, worker: int) -> None:
        """Note by how many steps a worker is ahead that is given parameters."""
        self.observed[self._ahead(worker)] += 1

    def slowest(self) -> Set[int]:
        """The workers that nobody is behind."""
        return {worker for worker in self._clocks if not self._ahead(worker)}

    def _ahead(self, worker: int) -> int:
        return self._clocks[worker] - min(self._clocks.values())

    def _complete(self) -> list[list[T]]:
        """Every step that all workers that have not ended have made."""
        complete = []
        while self._waiting and self._clocks.keys() <= self._waiting.get(self._applied, {}).keys():
            contributions = self._waiting.pop(self._applied)
            complete.append([contributions[worker] for worker in sorted(contributions)])
            self._applied += 1
        return complete


@final
class Shelf:
    """A server's slice of one transfer.

    Args:
        updates: each optimizer's.
        workers: how many there are.
        bound: by how many steps a worker may be ahead of the slowest; None for any number.
    """

    def __init__(self, updates: Sequence[PieceUpdate], workers: int, bound: int | None) -> None:
        self._updates = updates
        self._clocks: Clocks[_Brought] = Clocks(workers, bound)

    @property
    def observed(self) -> Counter[int]:
        """Numbers of steps that a worker was ahead when it was given parameters."""
        return self._clocks.observed

    def step(
        self,
        worker: int,
        gradients: Slice,
        optimizer: int,
        work: Sequence[Any],
        answer: Slice,
        check: Callable[[], None],
    ) -> None:
        """Take a worker's gradients, and fill its answer as soon as it may go on.

        `check` is called while it waits.
        """
        with self._clocks.moved:
            for contributions in self._clocks.step(worker, _Brought(gradients, optimizer, work)):
                self._apply(contributions)
            self._clocks.wait(worker, check)
            self._clocks.count(worker)
            for value, new in zip(answer.values, self._updates[optimizer].values(), strict=True):
                value.copy_(new)
            answer.flags.fill_(1)
            answer.turn.fill_(Turn.VALUES)

    def leave(self, worker: int) -> None:
        """A worker has ended."""
        with self._clocks.moved:
            for contributions in self._clocks.leave(worker):
                self._apply(contributions)

    def _apply(self, contributions: Sequence[_Brought]) -> None:
        """Make one update of the sum of these gradients."""
        first, *rest = contributions
        total = first.gradients
        for other in rest:
            total.whole.add_(other.gradients.whole)
        used = total.flags.tolist()
        values = [value if flag else None for value, flag in zip(total.values, used, strict=True)]
        self._updates[first.optimizer].step(values, *first.work)
