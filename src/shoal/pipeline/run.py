"""A forward of all ranks: the rows of each are a micro-batch, which goes from station to station.

    model(x)           ranks tell the forms of their inputs; inputs go to the ranks that use them;
                       each rank computes its stations for all micro-batches
    loss_fn(out, y)    targets go to the rank that has the end, which computes the loss of each
                       rank's rows, and tells each rank its own
    loss.backward()    each rank tells the gradient of its loss; micro-batches go back, the last one
                       first

Sends never block. Station s waits for station s - 1 in forward, and for s + 1 in backward, always
for the same or an earlier micro-batch in the order of both: so no two ranks wait for one another.

Reference: Huang et al., "GPipe", 2019, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.core.random_state import draw_seed, drawing_from, mix_seeds
from shoal.pipeline.absent_tensors import Absent, present
from shoal.pipeline.calls import ModelCall, Shape
from shoal.pipeline.crossings import Arrived, SentOn
from shoal.pipeline.gate import CallGate
from shoal.pipeline.guide import ToldCall
from shoal.pipeline.model import FORWARD, PipelinedModel
from shoal.pipeline.moving_buffers import Counters, MovingBuffers, aside
from shoal.pipeline.parts import RowPart, joined, rows_of
from shoal.pipeline.replay import Departed, Replay
from shoal.pipeline.route import EACH, Coming
from shoal.pipeline.trees import mapped, tensors_in
from shoal.pipeline.walk import walking
from shoal.tensors.row_crossing import EXACT, RowCrossing


@final
class ForwardRun:
    """One call of the model on all ranks, and its backward.

    Args:
        pipeline: the model's.
        forward: the model's own forward.
        call: the call.
        told: the forms of all ranks, if this rank brings no rows and is told them.
    """

    def __init__(
        self,
        pipeline: PipelinedModel,
        forward: Callable[..., Any],
        call: ModelCall,
        told: ToldCall | None = None,
    ) -> None:
        self.pipeline, self.forward, self.call = pipeline, forward, call
        self.grad = torch.is_grad_enabled()
        self.told = told or self._tell()
        self.weight_of = pipeline.weighs.call()
        pipeline.forget_output()
        self.parts = pipeline.parts.of_ranks(self.call, self.told.shapes)
        self.route = pipeline.route(self.call, forward, self.told.numbers[self.own])
        self.device = next((t.device for t in self.call.tensors), torch.device("cpu"))
        self.tickets: list[Tensor] = []  # tickets of values that were sent to other stations
        self.tokens: dict[
            int, Tensor
        ] = {}  # tokens of values that have arrived at the end, by micro-batch
        self.outputs: dict[int, Any] = {}  # outputs of the end, by rank
        self._sent: dict[tuple[int, int], list[Tensor]] = {}  # forms of values that take a gradient
        self._returning: dict[tuple[int, int], Coming] = {}
        self.comm.journal.begins(FORWARD)
        self._compute()
        values = [*self.tickets, *self.tokens.values()]
        self.gate = CallGate(self, pipeline, values, grad=self.grad)

    @property
    def own(self) -> int:
        """This rank, or the first one if this rank brings no rows."""
        return self.comm.rank if self.comm.rank in self.pipeline.bringing else 0

    def _tell(self) -> ToldCall:
        """Tell the other ranks with rows of the call, and then hosts without (a collective)."""
        shapes, numbers = self.pipeline.tell(self.call, FORWARD)
        is_training = pipeline_mode(self.pipeline.modules.names) is not False
        told = ToldCall(shapes, numbers, draw_seed() if is_training else None)
        if self.pipeline.guide is not None:
            self.pipeline.guide.called(self, self.call, told)
        return told

    def go_back(self) -> None:
        """Tell hosts without rows that a backward goes through this call."""
        self.gate.go_back(self)

    @property
    def rows(self) -> list[int]:
        """The rows of each rank."""
        return [rows_of(shapes) for shapes in self.told.shapes]

    @property
    def comm(self) -> Comm:
        """The ranks."""
        return self.pipeline.comm

    @property
    def _crossing(self) -> RowCrossing:
        """The crossing of values between stations. Evaluation is exact."""
        return self.pipeline.outbox.crossing if self.grad else EXACT

    def _compute(self) -> None:
        """Compute this rank's stations for the rows of every rank."""
        inputs = self._deal_inputs()
        mine = self.route.of(self.comm.rank)
        if self.comm.rank in self.pipeline.bringing:
            mine = self.route.of(self.comm.rank, EACH)
        coming = self._begin_to_receive(mine)
        ended: dict[int, list[Any]] = {rank: [] for rank in self.pipeline.bringing}
        counters = Counters(self.route.record.countings)
        moving = MovingBuffers(self.pipeline.homes.buffers(here=True))
        with walking(), aside(self.pipeline.homes.buffers(here=False)):
            for station, (micro, part) in product(mine, enumerate(self.parts)):
                if self.route.holder(station, part.rank) != self.comm.rank:
                    continue
                counters.put_back()
                arriving = coming.get((station, micro))
                with moving.micro_batch(micro):
                    ended[part.rank] += self._station(station, micro, inputs[micro], arriving)
        moving.join([part.size for part in self.parts])
        counters.count()
        self._bring_buffers()
        self.outputs = {rank: joined(outputs) for rank, outputs in ended.items() if outputs}

    def _deal_inputs(self) -> list[list[Any]]:
        """Send inputs to the ranks that use them; return all that are here, by micro-batch."""
        comm, route = self.comm, self.route
        needed = [route.inputs_of(rank) for rank in range(comm.size)]
        bringing = self.pipeline.bringing
        of_others = needed[comm.rank]
        own = route.inputs_of(comm.rank, EACH)
        coming = {
            rank: Coming(
                comm,
                rank,
                [self.told.shapes[rank][number] for number in sorted(of_others)],
                self.device,
            )
            for rank in comm.others
            if rank in bringing
        }
        if comm.rank not in bringing:
            return self._arrived_inputs(of_others, coming)
        # the caller may change its batch while messages are under way
        going = set().union(*(needed[rank] for rank in comm.others))
        copies = {number: self.call.tensors[number].detach().clone() for number in going}
        for rank in comm.others:
            for number in sorted(needed[rank]):
                self.pipeline.outbox.send(copies[number], rank)
        here = {number: self.call.tensors[number] for number in own}
        return self._arrived_inputs(of_others, coming, {comm.rank: here})

    def _arrived_inputs(
        self,
        needed: set[int],
        coming: Mapping[int, Coming],
        own: Mapping[int, Mapping[int, Tensor]] = {},
    ) -> list[list[Any]]:
        """Return the inputs of each micro-batch, once all have come from other ranks."""
        here = {
            rank: dict(zip(sorted(needed), each.wait(), strict=True))
            for rank, each in sorted(coming.items())
        }
        here |= {rank: dict(inputs) for rank, inputs in own.items()}
        return [self._inputs(part, here[part.rank]) for part in self.parts]

    def _inputs(self, part: RowPart, here: Mapping[int, Tensor]) -> list[Any]:
        """Return the inputs of a micro-batch, of which some are here."""
        absent = self.pipeline.forms.absent
        return [
            part.of(number, here[number])
            if number in here
            else absent(part.shape(number, shape), dtype, self.device, grad=False)
            for number, (shape, dtype) in enumerate(self.told.shapes[part.rank])
        ]

    def _form(self, station: int, micro: int) -> tuple[int, int, int]:
        """Return a key for the forms of arriving values."""
        part = self.parts[micro]
        return station, self.told.numbers[part.rank], part.size

    def _begin_to_receive(self, mine: Sequence[int]) -> dict[tuple[int, int], Coming]:
        """Begin to receive values of these stations, up to one of unknown form.

        Messages come in order: a message behind one of unknown form is received in its turn.
        """
        coming: dict[tuple[int, int], Coming] = {}
        for station, micro in product(filter(None, mine), range(len(self.parts))):
            known = self.pipeline.shapes.get(self._form(station, micro))
            if known is None:
                break
            coming[station, micro] = self._coming(station, micro, known)
        return coming

    def _coming(self, station: int, micro: int, shapes: Sequence[Shape]) -> Coming:
        flags = (len(shapes),), torch.int64
        source = self.route.holder(station - 1, self.parts[micro].rank)
        return Coming(self.comm, source, [flags, *shapes], self.device, self._crossing)

    def _station(
        self, station: int, micro: int, inputs: Any, coming: Coming | None
    ) -> Sequence[Any]:
        """Compute a station for one micro-batch; the last one returns an output."""
        route, pipeline = self.route, self.pipeline
        token: list[Tensor] = []
        replay = Replay(
            route.record,
            route.spans[station],
            pipeline.forms,
            pipeline.modules,
            partial(self._wait_for_flight, station, micro, coming, token),
        )
        args, kwargs = self.call.with_tensors(inputs)
        if route.record.changes_inputs:  # each replay changes its own
            args, kwargs = mapped(_own, (args, kwargs))
        self.comm.reached(f"station {station} of the pipeline, micro-batch {micro}")
        try:
            with self._drawing(station, micro):
                output = replay.run(self.forward, args, kwargs)
        except Departed:
            self._depart(station, micro, replay.leaving(), token)
            return []
        replay.check_ended()
        if token:
            self.tokens[micro] = token[0]
        return [present(output)]

    def _drawing(self, station: int, micro: int) -> AbstractContextManager[None]:
        """Let a station draw numbers of its own. In evaluation it draws as any forward does.

        In training each call draws one number on every rank, and the station starts at a seed of
        that number, itself and the micro-batch. So ranks that begin with one seed keep equal
        generators, a checkpoint has all that the next numbers depend on, and
        torch.utils.checkpoint makes the same numbers again.
        """
        if self.told.seed is None:
            return nullcontext()
        return drawing_from(mix_seeds(self.told.seed, station, micro), self.device)

    def _wait_for_flight(
        self,
        station: int,
        micro: int,
        coming: Coming | None,
        token: list[Tensor],
        absent: Sequence[Absent],
    ) -> Sequence[Tensor]:
        """Return the values that have come to a station."""
        if coming is None:
            shapes = [(tuple(each.shape), each.dtype) for each in absent]
            self.pipeline.shapes[self._form(station, micro)] = shapes
            coming = self._coming(station, micro, shapes)
        flags, *values = coming.wait()
        if not self.grad:
            return values
        taking = [value for value, flag in zip(values, flags.tolist(), strict=True) if flag]
        with torch.enable_grad():  # a station may begin inside of a forward's torch.no_grad()
            arrived: tuple[Tensor, ...] = Arrived.apply(  # type: ignore[no-untyped-call]
                self, station, micro, self.pipeline.anchor, *taking
            )
        token.append(arrived[0])
        graded = iter(arrived[1:])
        return [
            next(graded) if flag else value
            for value, flag in zip(values, flags.tolist(), strict=True)
        ]

    def _depart(self, station: int, micro: int, values: Sequence[Tensor], token: list[Any]) -> None:
        """Send the values that cross to the next station."""
        # batch 13: values go on
        to = self.route.holders[station + 1]
        taking = [value for value in values if self.grad and value.requires_grad]
        flags = [int(self.grad and value.requires_grad) for value in values]
        self.pipeline.outbox.send(torch.tensor(flags, dtype=torch.int64, device=self.device), to)
        for value in values:
            self.pipeline.outbox.send(value, to, self._crossing)
        if not self.grad:
            return
        self._sent[station, micro] = [torch.empty_like(value, device="meta") for value in taking]
        if taking or token:
            ticket: Tensor = SentOn.apply(  # type: ignore[no-untyped-call]
                self, station, micro, token[0] if token else None, *taking
            )
            self.tickets.append(ticket)

    def _begin_backward(self) -> None:
        """Begin to receive all gradients of sent values, in the order in which they come."""
        for station, micro in sorted(self._sent, reverse=True):
            shapes = [(tuple(form.shape), form.dtype) for form in self._sent[station, micro]]
            source = self.route.holders[station + 1]
            self._returning[station, micro] = Coming(
                self.comm, source, shapes, self.device, self._crossing
            )

    def take_gradients(self, station: int, micro: int) -> Sequence[Tensor]:
        """Wait for the gradients of sent values."""
        self.comm.reached(f"backward of station {station} of the pipeline, micro-batch {micro}")
        if not self._returning:  # the slopes of all losses have come by now
            self._begin_backward()
        grads = self._returning.pop((station, micro)).wait()
        return grads if self.route.holders[station] != EACH else list(map(self._unweigh, grads))

    def _unweigh(self, grad: Tensor) -> Tensor:
        """Return a gradient as this rank's own: the engine takes the mean over ranks later."""
        # batch 17: undo the weighing
        weight = self.pipeline.weighs(self.weight_of)
        grad = grad.mul_(len(self.pipeline.bringing))
        return grad.div_(weight) if weight else grad

    def return_gradients(self, station: int, micro: int, grads: Sequence[Tensor]) -> None:
        """Send the gradients of arrived values."""
        to = self.route.holder(station - 1, self.parts[micro].rank)
        for grad in grads:
            self.pipeline.outbox.send(grad, to, self._crossing)

    def _bring_buffers(self) -> None:
        """Bring buffers that training changes from hosts without rows to all ranks with rows."""
        comm, homes, bringing = self.comm, self.pipeline.homes, self.pipeline.bringing
        if self.pipeline.guide is None and comm.rank in bringing:
            return
        apart = {n: b for n, b in homes.unlike.items() if homes.of(n) not in bringing}
        coming = []
        for name, buffer in sorted(apart.items()):
            if homes.of(name) == comm.rank:
                for rank in bringing:
                    self.pipeline.outbox.send(buffer.value.detach().clone(), rank)
            elif comm.rank in bringing:
                shape = tuple(buffer.value.shape), buffer.value.dtype
                coming.append((buffer, Coming(comm, homes.of(name), [shape], self.device)))
        with torch.no_grad():
            for buffer, each in coming:
                buffer.value.copy_(each.wait()[0])
        guide = self.pipeline.guide
        if guide is not None and guide.tell is not None:
            guide.changed.see()


def model_call(pipeline: PipelinedModel, args: Any, kwargs: Any) -> ModelCall:
    """Return a call of the model."""
    grad = torch.is_grad_enabled()
    takes_gradients = grad and any(t.requires_grad for t in tensors_in((args, kwargs)))
    modes = {
        "in training": pipeline_mode(pipeline.modules.names),
        "with gradients": grad,
        "inputs take a gradient": takes_gradients,
        "autocast": _autocast(),
    }
    return ModelCall(args, kwargs, modes, takes_gradients=takes_gradients)


def pipeline_mode(modules: Mapping[nn.Module, str]) -> bool | str:
    """Return whether all modules are in training; if they differ, the names of the others."""
    modes = {module.training for module in modules}
    if len(modes) == 1:
        return modes.pop()
    return "all but " + ", ".join(name for module, name in modules.items() if not module.training)


def _autocast() -> tuple[Any, ...]:
    return tuple(
        torch.is_autocast_enabled(kind) and str(torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


def _own(leaf: Any) -> Any:
    is_here = isinstance(leaf, Tensor) and not isinstance(leaf, Absent)
    return leaf.clone() if is_here else leaf
