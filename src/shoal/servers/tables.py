"""Tables: rows that servers keep whole, and give and change as workers ask (remote/verbs.py).

    each worker has a thread here, for all tables of a model:
      Pull         wait until the worker's steps have been applied, but for as many as it may be
                   ahead; its rows
      Push         keep ids and gradients, as they come
      MakeStep     when all workers have made it: add up all gradients, in the order of the
                   ranks; one dense update by a copy of the optimizer, as in one process, where
                   momentum moves rows nobody looked up
      Read         values and state as a pull; gradients when all workers have asked
      Write        when all workers have asked: the content that the first of them gives

Without a bound on the staleness each step is an update of its own, as it comes. Guarded by
tests/equivalence/test_tables.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never, final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer
from shoal.core.pieces import cut_sizes
from shoal.engine.lanes import Answering
from shoal.optim.owners import norm
from shoal.profiling.updates import made_of, make_step
from shoal.remote.channel import Channel
from shoal.remote.optimizers import OptimizerForm
from shoal.remote.orders import TableForm
from shoal.remote.verbs import (
    Aspect,
    End,
    MakeStep,
    Norm,
    PartOrder,
    Pull,
    Push,
    Read,
    ScaleBy,
    Sum,
    Verb,
    Write,
    unasked,
)
from shoal.remote.wire import Data
from shoal.servers.ahead_workers import POLL_S, Clocks
from shoal.strategies.embedding import is_written

_ALIKE = (
    "look at and change a table's gradients, and change its values and the optimizer's state, "
    "on every rank alike"
)


@final
class ServedTables:
    """A server's rows of a model's tables.

    Args:
        comm: all ranks; the workers' main threads are at its other end.
        forms: of the tables, in their order.
        optimizers: the optimizers that update them.
        staleness: by how many steps a worker may be ahead; None for any number.
    """

    def __init__(
        self,
        comm: Comm,
        forms: Sequence[TableForm],
        optimizers: Sequence[OptimizerForm],
        staleness: int | None,
    ) -> None:
        self._in_step = staleness == 0
        index, servers = comm.rank - comm.workers, comm.size - comm.workers
        self._tables = [
            _TableShard(
                form, cut_sizes(form.rows, servers)[index], comm.workers, optimizers, staleness
            )
            for form in forms
        ]
        answering = Answering()
        self.check, self.finish, self.close = answering.check, answering.finish, answering.close
        for worker in range(comm.workers):
            answering.begin(worker, partial(self._answer, worker), comm)

    def observed(self) -> Counter[int]:
        """Count, for each number of steps, how often a worker was so far ahead of the slowest."""
        if self._in_step:
            return Counter()
        return sum((table.clocks.observed for table in self._tables), Counter())

    def _answer(self, worker: int, comm: Comm) -> None:
        channel = Channel[PartOrder | End](comm, worker, PartOrder | End)
        desks = [_TableDesk(table, channel) for table in self._tables]
        while not isinstance(order := channel.next(), End):
            desk = desks[order.part]
            desk.table.mark(worker, used=any(order.held or ()))
            desk.obey(order.verb)
            channel.settle()
        for table in self._tables:
            table.leave(worker)


@final
class _TableDesk:
    """The desk of one table where one worker is served."""

    def __init__(self, table: _TableShard, channel: Channel[Any]) -> None:
        self.table, self._channel, self._worker = table, channel, channel.peer
        self._check = partial(channel.comm.check, "serving")

    def obey(self, verb: Verb) -> None:
        """Obey the worker; answers go over its channel."""
        table, worker = self.table, self._worker
        match verb:
            case Pull(ids):
                self._channel.post_rows(table.pull(worker, ids, self._check))
            case Push(ids, gradients) if ids is not None:
                table.push(worker, ids, gradients)
            case MakeStep():
                table.step(worker, verb)
            case Read():
                self._read(verb)
            case Write():
                self._write(verb)
            case Norm(_, order):
                self._channel.post(self._together("norm", order, table.norm))
            case ScaleBy(_, factor):
                self._together("scale", factor, table.scale)
            case Push() | Sum():
                raise unasked(verb)
            case _:
                assert_never(verb)

    def _read(self, read: Read) -> None:
        table, worker = self.table, self._worker
        match read.aspect:
            case Aspect.VALUES:
                self._channel.post_rows(table.values(worker, self._check))
            case Aspect.GRADIENT:
                rows = self._together("read gradients", None, lambda _: table.gradient())
                self._channel.post(Data(rows))
            case Aspect.STATE:
                self._channel.post(Data(table.state(worker, read.optimizer, self._check)))
            case Aspect.RESIDUALS | Aspect.ERROR_BOUND:
                raise unasked(read)
            case _:
                assert_never(read.aspect)

    def _write(self, write: Write) -> None:
        table = self.table
        match write.aspect:
            case Aspect.VALUES:
                self._together("write values", write, table.take_values)
            case Aspect.GRADIENT:
                self._together("write gradients", write, table.take_gradient)
            case Aspect.STATE:
                self._together("load the optimizer's state", write, table.take_state)
            case Aspect.RESIDUALS | Aspect.ERROR_BOUND:
                raise unasked(write)
            case _:
                assert_never(write.aspect)

    def _together(self, purpose: str, content: Any, do: Callable[[Any], Any]) -> Any:
        return self.table.together(self._worker, purpose, content, do, self._check)


_Pushed = list[tuple[Tensor, Tensor]]  # ids, which are different, and gradients of their rows
# A contribution to a step: rows are None where the worker has no gradient
_Brought = tuple[_Pushed | None, MakeStep]


@dataclass
class _JointRequest:
    """A request that is done once all workers have made it."""

    asked: dict[int, tuple[str, Any]] = field(default_factory=dict)
    number: int = 0
    waiting: int = 0  # number of workers that have not taken the result
    result: Any = None


@final
class _TableShard:
    """A server's rows of one table, with their gradients and the optimizer's state."""

    def __init__(
        self,
        form: TableForm,
        rows: int,
        workers: int,
        optimizers: Sequence[OptimizerForm],
        staleness: int | None,
    ) -> None:
        self.weight = nn.Parameter(torch.zeros(rows, form.width, dtype=form.dtype, device="cpu"))
        self.clocks: Clocks[_Brought] = Clocks(workers, staleness)
        self._name = form.name
        self._copies = [made_of(form) for form in optimizers]
        # None: it has no gradient
        self._pushed: dict[int, _Pushed | None] = dict.fromkeys(range(workers))
        self._dense: Tensor | None = None  # zeros, but within an update
        self._meeting = _JointRequest()

    def pull(self, worker: int, ids: Tensor, check: Callable[[], None]) -> Tensor:
        """The rows of these ids, as soon as this worker may have them."""
        with self.clocks.moved:
            self._wait(worker, check)
            self.clocks.count(worker)
            return self.weight.detach().index_select(0, ids)

    def push(self, worker: int, ids: Tensor, rows: Tensor) -> None:
        """Keep a worker's gradients, beside the ones that it has brought since it had none."""
        with self.clocks.moved:
            pushed = [*(self._pushed[worker] or ()), (ids, rows)]
            # never more than a table of them
            if sum(len(row_ids) for row_ids, _ in pushed) > len(self.weight):
                pushed = [_fold(pushed)]
            self._pushed[worker] = pushed

    def mark(self, worker: int, *, used: bool) -> None:
        """Drop a worker's gradients, unless it has a gradient still."""
        with self.clocks.moved:
            self._pushed[worker] = (self._pushed[worker] or []) if used else None

    def step(self, worker: int, step: MakeStep) -> None:
        """Count a worker's step, and apply the steps that are complete."""
        with self.clocks.moved:
            for contributions in self.clocks.step(worker, (self._pushed[worker], step)):
                self._apply(contributions)

    def leave(self, worker: int) -> None:
        """A worker has ended."""
        with self.clocks.moved:
            for contributions in self.clocks.leave(worker):
                self._apply(contributions)

    def values(self, worker: int, check: Callable[[], None]) -> Tensor:
        """All rows, as soon as this worker may have them."""
        with self.clocks.moved:
            self._wait(worker, check)
            return self.weight.detach().clone()

    def state(self, worker: int, optimizer: int, check: Callable[[], None]) -> dict[str, Any]:
        """An optimizer's state, as soon as this worker may have it."""
        with self.clocks.moved:
            self._wait(worker, check)
            return dict(self._copies[optimizer].state.get(self.weight, {}))

    def take_values(self, write: Write) -> None:
        """Have these values."""
        self.weight.detach().copy_(write.holds(Tensor))

    def take_gradient(self, write: Write) -> None:
        """Have this gradient in place of the workers' own."""
        rows = write.holds(Tensor)
        first, *other_workers = sorted(self.clocks.workers)
        self._pushed[first] = [(torch.arange(len(rows), device="cpu"), rows)]
        self._pushed |= {worker: [] for worker in other_workers}

    def gradient(self) -> Tensor | None:
        """The sum of the workers' gradients, if any has one."""
        gradients = [self._pushed[worker] for worker in sorted(self.clocks.workers)]
        if all(pushed is None for pushed in gradients):
            return None
        with self._sum(gradients) as gradient:
            return gradient.clone()

    def norm(self, order: float) -> Tensor:
        """The norm of the gradient."""
        gradient = self.gradient()
        return norm([] if gradient is None else [gradient], order)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradient."""
        for pushed in self._pushed.values():
            for _, rows in pushed or ():
                rows.mul_(factor.to(rows.dtype))

    def take_state(self, write: Write) -> None:
        """Have this state."""
        states = self._copies[write.optimizer].state
        states.pop(self.weight, None)
        if state := write.holds(dict[str, Any]):
            states[self.weight] = state

    def together(
        self,
        worker: int,
        purpose: str,
        content: Any,
        do: Callable[[Any], Any],
        check: Callable[[], None],
    ) -> Any:
        """Do something once, when every worker has asked for it: its result.

        It is given the first worker's content.
        """
        with self.clocks.moved:
            self._wait(worker, check)
            meeting = self._meeting
            number = meeting.number
            meeting.asked[worker] = purpose, content
            if len(meeting.asked) == len(self._pushed):
                self._require_same(meeting)
                meeting.result = do(meeting.asked[min(meeting.asked)][1])
                meeting.asked, meeting.number, meeting.waiting = {}, number + 1, len(self._pushed)
                self.clocks.moved.notify_all()
            while meeting.number == number:
                if ended := self._pushed.keys() - self.clocks.workers:
                    raise RanksDiffer(
                        f"rank {min(ended)} has ended, but rank {worker} asks for {purpose!r} of "
                        f"table {self._name}",
                        do=_ALIKE,
                        rank=min(ended),
                    )
                if not self.clocks.moved.wait(POLL_S):
                    check()
            result = meeting.result
            meeting.waiting -= 1
            if not meeting.waiting:
                meeting.result = None
            return result

    def _wait(self, worker: int, check: Callable[[], None]) -> None:
        """Wait until a worker may go on.

        Not for a worker that waits itself until all ask for the same.
        """

        def check_meeting() -> None:
            check()
            for other in self.clocks.slowest() & self._meeting.asked.keys():
                purpose, _ = self._meeting.asked[other]
                raise RanksDiffer(
                    f"rank {other} asks for {purpose!r} of table {self._name}, and rank {worker} "
                    f"went on without",
                    do=_ALIKE,
                    rank=other,
                )

        self.clocks.wait(worker, check_meeting)

    def _require_same(self, meeting: _JointRequest) -> None:
        for worker, (purpose, _) in meeting.asked.items():
            first = meeting.asked[min(meeting.asked)][0]
            if purpose != first:
                raise RanksDiffer(
                    f"rank {worker} wants another thing of table {self._name} than rank "
                    f"{min(meeting.asked)}",
                    got=f"{purpose}, {first}",
                    do=_ALIKE,
                    rank=worker,
                )

    def _apply(self, contributions: Sequence[_Brought]) -> None:
        """Make one update by the sum of the workers' gradients of a step."""
        if all(pushed is None for pushed, _ in contributions):
            return
        step = next((step for _, step in contributions if step.groups.value is not None), None)
        if step is None:
            raise RanksDiffer(
                f"rank 0 has ended without a step of table {self._name} that others have made",
                do="let every rank make the same steps",
                rank=0,
            )
        with self._sum([pushed for pushed, _ in contributions]) as gradient:
            self.weight.grad = gradient
            (settings,) = step.groups.value
            group = {**settings, "params": [self.weight]}
            make_step(self._copies[step.optimizer], [group], step.attributes.value)
            self.weight.grad = None

    @contextmanager
    def _sum(self, gradients: Iterable[_Pushed | None]) -> Iterator[Tensor]:
        """The dense sum of gradients, in memory that is kept: only the rows it has are cleared."""
        rows = [rows_pushed for pushed in gradients for rows_pushed in pushed or ()]
        if self._dense is None:
            self._dense = torch.zeros_like(self.weight.detach())
        for ids, slopes in rows:
            self._dense.index_add_(0, ids, slopes)
        version = self._dense._version
        yield self._dense
        changed = self._dense._version != version
        if not changed:
            for ids, _ in rows:
                self._dense.index_fill_(0, ids, 0.0)
        if changed or is_written(self._dense):  # written by the optimizer
            self._dense.zero_()


def _fold(pushed: _Pushed) -> tuple[Tensor, Tensor]:
    """Fold rows of equal ids: ids that are different, and the sums of their rows' gradients."""
    ids, place = torch.unique(torch.cat([row_ids for row_ids, _ in pushed]), return_inverse=True)
    rows = torch.cat([rows for _, rows in pushed])
    return ids, torch.zeros(len(ids), rows.shape[1], dtype=rows.dtype, device="cpu").index_add_(
        0, place, rows
    )
