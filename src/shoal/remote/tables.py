"""Tables with all rows at servers, as a worker reads them and has them learn.

    worker                         each server, for its rows (servers/tables.py)
      Pull                   ──▶
        their rows           ◀──   as soon as this worker's steps have been applied
      Push                   ──▶   kept until the step
      MakeStep               ──▶   applied when every worker's gradients are there
      Read                   ──▶
        all rows             ◀──
      Write                  ──▶   done when every worker has asked, as the first of them says

Every worker asks for itself: one may evaluate or save alone. All of them are needed
(`_TableShard.together`) to look at gradients, also whether there are any, to clip or change them,
and to change values or the optimizer's state; rank 0's content is taken.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
section 3 (ranges of keys, pulled and pushed).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import Weighing
from shoal.core.errors import UsageError
from shoal.core.pieces import cut_sizes
from shoal.core.trace import MAIN
from shoal.remote.channel import Channel
from shoal.remote.far_cut import FarCut
from shoal.remote.verbs import (
    Aspect,
    End,
    MakeStep,
    Norm,
    Numbers,
    PartOrder,
    Pull,
    Push,
    Read,
    ScaleBy,
    Verb,
    Write,
)
from shoal.remote.wire import Data
from shoal.tensors.cut import cut

ID_BYTES = 8
_ALL: Numbers = ((0, 0),)  # a table is the one parameter of its transfer
_HELD, _NOT_HELD = ((0,),), ((),)  # whether the servers have a gradient of it


@final
class Tables:
    """The way from a worker to a model's tables.

    Args:
        comm: all ranks, servers among them: a channel that the main thread has to itself.
        in_step: whether workers keep step.
    """

    def __init__(self, comm: Comm, in_step: bool) -> None:
        self.comm, self.in_step = comm, in_step
        self.workers = comm.workers
        self.servers = [Channel[Any](comm, server) for server in range(comm.workers, comm.size)]
        self.started = self._ended = False
        self.stands = False  # whether no worker makes a step
        self.all: list[FarTable] = []

    def give(self, name: str, weight: nn.Parameter, weighs: Weighing) -> FarTable:
        """Give servers a table and its gradient, and leave this rank none of it, in place.

        A collective: values of rank 0 are taken.

        Args:
            name: the table's dotted name.
            weight: the table.
            weighs: tells the weight of this rank's rows in the running backward.
        """
        table = FarTable(name, weight, self, weighs)
        table.write_values(weight.detach())
        if weight.grad is not None:
            table.write_gradient(weight.grad)
        cut(weight, table)
        return table

    def post(self, server: Channel[Any], order: PartOrder) -> None:
        """Send a server an order; `settle` waits until all have gone."""
        if self._ended:
            raise UsageError(
                "the session that the model was parallelised in has ended",
                do="look at tables within it",
            )
        server.post(order)

    def settle(self) -> None:
        """Wait until all that was sent has gone."""
        for server in self.servers:
            server.settle()

    def reach(self) -> None:
        """Wait until the servers have done all that this worker has asked for."""
        for table in self.all:
            table.reach()

    def end(self) -> None:
        """Tell the servers that this worker asks no more."""
        if not self._ended:
            for server in self.servers:
                server.post(End())
            self.settle()
            self._ended = True


@final
class FarTable(FarCut):
    """A parameter of which servers have all rows, evenly, and this rank has none.

    Its local gradient has no rows either; that there is one says that this rank contributes to the
    gradient.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, tables: Tables, weighs: Weighing
    ) -> None:
        super().__init__(name, parameter, tables.comm, weighs)
        self._tables, self._number = tables, len(tables.all)
        tables.all.append(self)
        self._sizes = cut_sizes(len(parameter), len(tables.servers))
        self._ends = torch.tensor([*accumulate(self._sizes)], device="cpu")

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of these ids, which are different and ascending."""
        rows = torch.empty(len(ids), *self.like.shape[1:], dtype=self.like.dtype, device="cpu")
        begin_s = perf_counter()
        self._tables.settle()
        landing = []
        for server, its_ids, its_rows in self._by_server(ids, rows):
            if len(its_ids):
                self._post(server, Pull(its_ids))
                landing.append(server.receive(its_rows))
        self.comm.finish(landing)
        if self.comm.recorder is not None:
            self.comm.recorder.note(f"pull rows of {self.name}", MAIN, begin_s)
        return rows

    def reach(self) -> None:
        """Wait until every server has come to this worker's last message."""
        firsts = [stop - size for stop, size in zip(self._ends, self._sizes, strict=True) if size]
        self.pull(torch.tensor(firsts, device="cpu"))

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        """Add these rows' gradients. The mean over the workers counts.

        Ids are different and ascending.
        """
        self.begin()
        self._tables.started = True
        share = (gradients / self._tables.workers).contiguous()
        for server, its_ids, its_share in self._by_server(ids, share):
            if len(its_ids) or not self._has_gradient():  # a server must hear of the first
                self._post(server, Push(its_ids, its_share))
        self._mark()

    def step(self, number: int, group: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        """Have optimizer `number` make a step by these settings and these attributes of its own."""
        self.tell()
        speaks = self.comm.rank == 0 or not self._tables.in_step
        settings, own = ([dict(group)], dict(attributes)) if speaks else (None, None)
        self._post_all(MakeStep(number, Data(settings), Data(own), {}))

    def part(self, whole: Tensor) -> Tensor:
        return whole[:0]

    def whole(self, part: Tensor) -> Tensor:
        whole = torch.empty_like(self.like, device="cpu")
        self._post_all(Read(Aspect.VALUES))
        for server, rows in self._parts(whole):
            server.receive(rows).wait()
        return whole

    def write_values(self, whole: Tensor) -> None:
        self._write(Aspect.VALUES, whole)

    def write_gradient(self, whole: Tensor) -> None:
        self._write(Aspect.GRADIENT, whole)

    def _write(self, aspect: Aspect, whole: Tensor) -> None:
        self._require_in_step("a parameter, or a gradient, is changed")
        for server, rows in self._parts(whole):
            self._post(server, Write(aspect, Data(rows if self.comm.rank == 0 else None)))
        self._tables.settle()

    def mean(self, wholes: Tensor) -> Tensor:
        self.push(torch.arange(len(wholes), device="cpu"), wholes)
        return self.part(wholes)

    def gradient(self, parameter: Tensor, local: Tensor | None) -> Tensor | None:
        if self._seen is not None and local is self._its_part:
            return self._seen
        self._require_in_step("a gradient is read")
        self._post_all(Read(Aspect.GRADIENT))
        parts = [server.answer(Data).value for server in self._tables.servers]
        rows = [part for part in parts if part is not None]
        if not rows:
            return None
        whole = torch.cat(rows)
        self._show(parameter, whole)
        return whole

    def norms(self, order: float) -> list[Tensor]:
        """The norm of every server's rows of the gradient, in float64 (a collective)."""
        self._require_in_step("optimizer.clip_grad_norm_")
        self.tell()
        self._post_all(Norm(_ALL, order))
        return [server.answer(Tensor) for server in self._tables.servers]

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradient (a collective)."""
        self._post_all(ScaleBy(_ALL, factor))
        if self._has_gradient():
            self._mark()

    def state(self, number: int) -> dict[str, Any]:
        """Read the state that optimizer `number` has of it, in one-process form."""
        if not self._tables.stands:
            self._require_in_step("optimizer.state_dict, outside a checkpoint")
        self._post_all(Read(Aspect.STATE, number))
        states = [server.answer(Data).value for server in self._tables.servers]
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
        """Give optimizer `number` rank 0's state, in one-process form (a collective)."""
        self._require_in_step("optimizer.load_state_dict")
        known = state if self.comm.rank == 0 else {}
        shaped = {
            name
            for name, value in known.items()
            if isinstance(value, Tensor) and value.shape == self.like.shape
        }
        for index, server in enumerate(self._tables.servers):
            part = {
                name: value.split(self._sizes)[index].clone() if name in shaped else value
                for name, value in known.items()
            }
            self._post(server, Write(Aspect.STATE, Data(part), number))
        self._tables.settle()

    def _post(self, server: Channel[Any], verb: Verb) -> None:
        held = _HELD if self._has_gradient() else _NOT_HELD
        self._tables.post(server, PartOrder(self._number, held, verb))

    def _post_all(self, verb: Verb) -> None:
        """Ask all servers at once."""
        for server in self._tables.servers:
            self._post(server, verb)

    def _parts(self, whole: Tensor) -> list[tuple[Channel[Any], Tensor]]:
        return list(zip(self._tables.servers, whole.split(self._sizes), strict=True))

    def _by_server(self, ids: Tensor, rows: Tensor) -> list[tuple[Channel[Any], Tensor, Tensor]]:
        """Each server, its ids as it counts them, and their rows of these."""
        first = torch.zeros(1, dtype=torch.int64, device="cpu")
        counts = torch.searchsorted(ids, self._ends).diff(prepend=first).tolist()
        starts = [0, *self._ends.tolist()]
        parts = zip(
            self._tables.servers, ids.split(counts), rows.split(counts), starts, strict=False
        )
        return [(server, part - start, found) for server, part, found, start in parts]

    def _require_in_step(self, request: str) -> None:
        if self._tables.started and not self._tables.in_step:
            raise UsageError(
                "there is no one gradient, optimizer state or parameter where workers run ahead of "
                "one another",
                got=request,
                do="train with staleness=0, or do without it",
            )
