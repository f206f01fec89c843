"""Tables whose rows are all with servers: how a worker looks at them, and has them learn.

    worker                                       each server, for its rows (runtime/tables.py)
      PULL   ids                             ──▶
             their rows                      ◀── as soon as this worker's steps have been applied
      PUSH   ids, gradients of their rows    ──▶ kept until the step
      STEP   the optimizer's settings        ──▶ applied when every worker's gradients are there
      READ   values, or gradients            ──▶
             all rows                        ◀──
      WRITE  values, or gradients            ──▶ done when every worker has asked: what the first
                                                 of them gives
      CALL   anything else, pickled          ──▶

Each message begins with 40 bytes. Every worker asks for itself: one may evaluate or save alone.
What takes all of them (`_Table.together`) is to look at gradients, also whether there are any, to
clip or change them, and to change values or the optimizer's state; what rank 0 gives is taken.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
section 3 (ranges of keys, pulled and pushed).
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping
from enum import IntEnum
from itertools import accumulate
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.comm import Comm, Pending
from shoal.core.errors import UsageError
from shoal.core.pieces import cut_sizes, local_gradient, set_local_gradient
from shoal.core.trace import MAIN
from shoal.tensors.cut import Cut, CutParameter, cut_of, part_of

# numbers before each message: what, of which table, whether this worker has a gradient, rows, one
# more
HEADER = 5
HEADER_BYTES = 8 * HEADER
ID_BYTES = 8
VALUES, GRADIENTS = 0, 1  # what is read or written
_UNDER_WAY = 1024  # messages at most that a worker has sent and that have not gone yet
_OVERWRITING = frozenset(("copy_", "fill_", "zero_"))  # which need no values that are there


class Ask(IntEnum):
    """What a worker wants of a server."""

    END = 0  # nothing more
    PULL = 1
    PUSH = 2
    STEP = 3
    READ = 4
    WRITE = 5
    CALL = 6


@final
class Tables:
    """The way from a worker to a model's tables.

    Args:
        comm: all ranks, servers among them: a channel that the main thread has to itself.
        in_step: whether workers keep step.
    """

    def __init__(self, comm: Comm, in_step: bool) -> None:
        self.comm, self.in_step = comm, in_step
        self.workers, self.servers = comm.workers, range(comm.workers, comm.size)
        self.started = self._ended = False
        self.all: list[FarTable] = []
        # with what must not change until then
        self._under_way: deque[tuple[Pending, Tensor]] = deque()

    def ask(
        self,
        server: int,
        what: Ask,
        table: int = 0,
        used: bool = False,
        *payload: Tensor,
        rows: int = 0,
        more: int = 0,
    ) -> None:
        """Send a server a wish; `settle` waits until all have gone."""
        if self._ended:
            raise UsageError(
                "the session that the model was parallelised in has ended",
                do="look at tables within it",
            )
        while len(self._under_way) >= _UNDER_WAY:
            self._under_way.popleft()[0].wait()
        for tensor in (torch.tensor([what, table, used, rows, more]), *payload):
            self._under_way.append((self.comm.send(tensor, server), tensor))

    def settle(self) -> None:
        """Wait until all that was sent has gone."""
        for pending, _ in self._under_way:
            pending.wait()
        self._under_way.clear()

    def answer(self, server: int) -> Any:
        """What a server answers a call."""
        size = torch.empty(1, dtype=torch.int64)
        self.comm.receive(size, server).wait()
        words = torch.empty(int(size), dtype=torch.uint8)
        self.comm.receive(words, server).wait()
        return unpickled(words)

    def end(self) -> None:
        """Tell the servers that this worker asks no more."""
        if not self._ended:
            for server in self.servers:
                self.ask(server, Ask.END)
            self.settle()
            self._ended = True


@final
class FarTable(Cut):
    """How a parameter is cut of which servers have all rows, evenly, and this rank has none.

    Its local gradient has no rows either; that there is one says that this rank contributes to the
    gradient.
    """

    def __init__(self, name: str, parameter: nn.Parameter, tables: Tables) -> None:
        super().__init__(name, parameter, tables.comm)
        self._parameter, self._tables, self._number = parameter, tables, len(tables.all)
        tables.all.append(self)
        self._sizes = cut_sizes(len(parameter), len(tables.servers))
        self._ends = torch.tensor([*accumulate(self._sizes)])

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of these ids, which are different and ascending."""
        comm, rows = self.comm, torch.empty(len(ids), *self.like.shape[1:], dtype=self.like.dtype)
        begin_s = perf_counter()
        self._tables.settle()
        landing = []
        for server, its, found in self._by_server(ids, rows):
            if len(its):
                self._ask(server, Ask.PULL, its, rows=len(its))
                landing.append(comm.receive(found, server))
        for each in landing:
            each.wait()
        if comm.recorder is not None:
            comm.recorder.note(f"pull rows of {self.name}", MAIN, begin_s)
        return rows

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        """Add these rows' gradients, whose mean over the workers counts; ids are different and
        ascending.
        """
        self.begin()
        self._tables.started = True
        for server, its, slopes in self._by_server(
            ids, (gradients / self._tables.workers).contiguous()
        ):
            if len(its) or not self._has_gradient():  # a server must hear of the first
                payload = (its, slopes) if len(its) else ()
                self._ask(server, Ask.PUSH, *payload, rows=len(its))
        self._mark()

    def begin(self) -> None:
        """A backward begins, on every rank: what somebody saw of the gradient is not all of it any
        more.
        """
        self._tell()
        if self._seen is not None and self._has_gradient():
            self._mark()

    def step(self, number: int, group: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Have optimizer `number` make a step by these settings of the group and these attributes
        of its own.
        """
        self._tell()
        speaks = self.comm.rank == 0 or not self._tables.in_step
        payload = (pickled((number, group, now)),) if speaks else ()
        for server in self._tables.servers:
            self._ask(server, Ask.STEP, *payload, more=sum(words.numel() for words in payload))

    def part(self, whole: Tensor) -> Tensor:
        return whole[:0]

    def whole(self, part: Tensor) -> Tensor:
        whole = self._empty()
        self._ask_to_read(VALUES)
        for server, rows in self._parts(whole):
            self.comm.receive(rows, server).wait()
        return whole

    def write(self, whole: Tensor, what: int = VALUES) -> None:
        """Give the servers other values, or other gradients (a collective: those of rank 0 are
        taken).
        """
        self._require_in_step("a parameter, or a gradient, is changed")
        for server, rows in self._parts(whole):
            payload = (rows.contiguous(),) if self.comm.rank == 0 else ()
            self._ask(server, Ask.WRITE, *payload, rows=len(rows) if payload else 0, more=what)
        self._tables.settle()

    def mean(self, wholes: Tensor) -> Tensor:
        self.push(torch.arange(len(wholes)), wholes)
        return self.part(wholes)

    def change(
        self, function: Callable[..., Any], subject: Tensor, others: Any, kwargs: Mapping[str, Any]
    ) -> None:
        def whole(leaf: Any) -> Any:
            return cut_of(leaf).whole(part_of(leaf)) if isinstance(leaf, CutParameter) else leaf

        values = self._empty() if function.__name__ in _OVERWRITING else self.whole(subject)
        others, kwargs = pytree.tree_map(whole, (tuple(others), dict(kwargs)))
        # as torch does, which refuses it where gradients are on
        function(values.requires_grad_(), *others, **kwargs)
        self.write(values.detach())

    def gradient(self, parameter: Tensor, local: Tensor | None) -> Tensor | None:
        if self._seen is not None and local is self._its_part:
            return self._seen
        self._require_in_step("a gradient is read")
        whole, used = self._empty(), torch.zeros(1, dtype=torch.int64)
        self._ask_to_read(GRADIENTS)
        for server, rows in self._parts(whole):
            self.comm.receive(used, server).wait()
            if used:
                self.comm.receive(rows, server).wait()
        if not used:
            return None
        self._show(parameter, whole)
        return whole

    def assign(self, parameter: Tensor, whole: Tensor | None) -> None:
        super().assign(parameter, whole)
        self._version = -1  # the servers do not know it

    def norms(self, order: float) -> list[Tensor]:
        """The norm of every server's rows of the gradient, in float64 (a collective)."""
        self._require_in_step("optimizer.clip_grad_norm_")
        self._tell()
        return self._ask_all("norm", order)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradient (a collective)."""
        for server in self._tables.servers:
            self._call(server, "scale", factor)
        if self._has_gradient():
            self._mark()

    def state(self, number: int) -> dict[str, Any]:
        """What optimizer `number` has of it, in one-process form."""
        self._require_in_step("optimizer.state_dict")
        states = self._ask_all("state", number)
        forms = [(size, *self.like.shape[1:]) for size in self._sizes]

        def together(name: str) -> Any:
            values = [state[name] for state in states]
            return (
                torch.cat(values)
                if [getattr(value, "shape", None) for value in values] == forms
                else values[0]
            )

        return {name: together(name) for name in states[0]}

    def take_state(self, number: int, state: Mapping[str, Any]) -> None:
        """Give optimizer `number` this state, in one-process form (a collective: that of rank 0 is
        taken).
        """
        self._require_in_step("optimizer.load_state_dict")
        mine = state if self.comm.rank == 0 else {}
        shaped = {
            n
            for n, value in mine.items()
            if isinstance(value, Tensor) and value.shape == self.like.shape
        }
        for index, server in enumerate(self._tables.servers):
            its = {
                n: value.split(self._sizes)[index].clone() if n in shaped else value
                for n, value in mine.items()
            }
            self._call(server, "take_state", number, its)
        self._tables.settle()

    def _ask_to_read(self, what: int) -> None:
        for server in self._tables.servers:  # all at once
            self._ask(server, Ask.READ, more=what)

    def _ask_all(self, what: str, *args: Any) -> list[Any]:
        for server in self._tables.servers:
            self._call(server, what, *args)
        return [self._tables.answer(server) for server in self._tables.servers]

    def _call(self, server: int, what: str, *args: Any) -> None:
        words = pickled((what, args))
        self._ask(server, Ask.CALL, words, more=words.numel())

    def _ask(self, server: int, what: Ask, *payload: Tensor, rows: int = 0, more: int = 0) -> None:
        self._tables.ask(
            server, what, self._number, self._has_gradient(), *payload, rows=rows, more=more
        )

    def _has_gradient(self) -> bool:
        return local_gradient(self._parameter) is not None

    def _tell(self) -> None:
        """Give the servers a gradient that somebody has seen and changed."""
        seen = self._seen
        if (
            seen is not None
            and local_gradient(self._parameter) is self._its_part
            and seen._version != self._version
        ):
            self.write(seen, GRADIENTS)
            self._version = seen._version

    def _mark(self) -> None:
        """Note that there is a gradient, with the servers."""
        self._seen = self._its_part = None
        set_local_gradient(
            self._parameter, torch.empty(0, *self.like.shape[1:], dtype=self.like.dtype)
        )

    def _empty(self) -> Tensor:
        return torch.empty(self.like.shape, dtype=self.like.dtype)

    def _parts(self, whole: Tensor) -> list[tuple[int, Tensor]]:
        return list(zip(self._tables.servers, whole.split(self._sizes), strict=True))

    def _by_server(self, ids: Tensor, rows: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Each server, its ids as it counts them, and their rows of these."""
        counts = (
            torch.searchsorted(ids, self._ends)
            .diff(prepend=torch.zeros(1, dtype=torch.int64))
            .tolist()
        )
        starts = [0, *self._ends.tolist()]
        parts = zip(
            self._tables.servers, ids.split(counts), rows.split(counts), starts, strict=False
        )
        return [(server, its - start, found) for server, its, found, start in parts]

    def _require_in_step(self, what: str) -> None:
        if self._tables.started and not self._tables.in_step:
            raise UsageError(
                "there is no one gradient, optimizer state or parameter where workers run ahead of "
                "one another",
                got=what,
                do="train with staleness=0, or do without it",
            )


def pickled(content: Any) -> Tensor:
    """Anything as bytes."""
    return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)


def unpickled(words: Tensor) -> Any:
    """What `pickled` made bytes of; from a rank of the same job."""
    return pickle.loads(words.numpy().tobytes())
