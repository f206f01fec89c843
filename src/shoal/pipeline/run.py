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
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.comm import Comm, Pending
from shoal.contracts.weighing import Weighing
from shoal.core.errors import UsageError
from shoal.pipeline.absent import Absent, Forms, present
from shoal.pipeline.calls import Call, Shape, Told
from shoal.pipeline.crossings import Arrived, EndLoss, Sent
from shoal.pipeline.moving import Counters, MovingBuffer, MovingBuffers
from shoal.pipeline.output import EndOutput
from shoal.pipeline.record import Record, recorded
from shoal.pipeline.replay import Departed, Modules, Replay, Span, check_hooks, spans
from shoal.pipeline.stations import Stations, stations
from shoal.pipeline.walk import tensors_in, walking

_FORWARD, _LOSS, _BACKWARD = "pipeline: forward", "pipeline: loss", "pipeline: backward"


@dataclass(frozen=True)
class Route:
    """The way of a micro-batch through the ranks, for calls of one kind.

    Args:
        record: the forward.
        spans: the events of each station.
        holders: the rank of each station.
        output: what the forward returns, by the number of the call's forms.
    """

    record: Record
    spans: Sequence[Span]
    holders: Sequence[int]
    output: dict[int, Any] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The rank of the last station."""
        return self.holders[-1]

    def of(self, rank: int) -> list[int]:
        """Return the stations of a rank."""
        return [number for number, holder in enumerate(self.holders) if holder == rank]

    def inputs_of(self, rank: int) -> set[int]:
        """Return the numbers of the inputs that a rank uses."""
        needed = [
            self.record.inputs_between(self.spans[station].begin, self.spans[station].end)
            for station in self.of(rank)
        ]
        return set[int]().union(*needed)


@final
class Pipeline:
    """A model whose layers are on several ranks.

    Args:
        model: the module.
        holders: the rank of each layer.
        layers: the layer of each trainable parameter.
        comm: the ranks.
        weighs: tells what this rank's rows weigh in the running backward.
    """

    def __init__(
        self,
        model: nn.Module,
        holders: Mapping[str, int],
        layers: Mapping[str, str],
        comm: Comm,
        weighs: Weighing,
    ) -> None:
        self.comm, self.weighs, self.forms = comm, weighs, Forms()
        self.names = {module: name for name, module in model.named_modules()}
        self._model, self.holders, self._layers = model, holders, layers
        self._told, self._told_losses = Told(comm), Told(comm)
        self._routes: dict[str, Route] = {}
        self._pending: list[tuple[Pending, Tensor]] = []
        self.anchor = torch.zeros((), requires_grad=True)
        self.elsewhere: list[nn.Parameter] = [
            parameter
            for name, parameter in model.named_parameters()
            if name in layers and holders[layers[name]] != comm.rank
        ]
        self.shapes: dict[tuple[int, int], list[Shape]] = {}  # of what arrives at a station
        self.buffers: list[MovingBuffer] = []  # of the layers that are here
        self.parameters: dict[nn.Module, list[nn.Parameter]] = {}  # of each module, with its own
        self.runs = False

    def held_by(self, module: nn.Module) -> list[nn.Parameter]:
        """Return all parameters of a module."""
        if module not in self.parameters:
            self.parameters[module] = list(module.parameters())
        return self.parameters[module]

    def called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model, together with all ranks."""
        if self.runs:
            return forward(*args, **kwargs)
        self.finish()
        check_hooks(self._model, "")
        self.runs = True
        try:
            return Run(self, forward, args, kwargs).output()
        finally:
            self.runs = False

    def tell(self, call: Call) -> tuple[list[list[Shape]], list[int]]:
        """Tell the forms of a call's inputs, and return those of all ranks (a collective)."""
        return self._told.tell(call, _FORWARD)

    def tell_loss(self, call: Call) -> list[list[Shape]]:
        """Tell the forms of what a loss is given, and return those of all ranks (a collective)."""
        return self._told_losses.tell(call, _LOSS)[0]

    def route(self, call: Call, forward: Callable[..., Any], number: int) -> Route:
        """Return the way of a call's micro-batches. The first time it is a collective."""
        known = self._routes.get(call.common)
        if known is not None:
            return known
        args, kwargs = call.with_tensors(call.tensors)
        record, output = recorded(self._model, self.forms, forward, args, kwargs)
        found = stations(record, self.holders, self._layers)
        holders, cuts = self.comm.gather_objects(
            ([*found.holders], [list(cut) for cut in found.cuts]), "pipeline: stations"
        )[0]
        found = Stations(tuple(holders), tuple(tuple(cut) for cut in cuts))
        route = Route(record, spans(record, found.cuts), found.holders)
        route.output[number] = output
        self._routes[call.common] = route
        return route

    def send(self, tensor: Tensor, to: int) -> None:
        """Begin to send a tensor, which must not change."""
        tensor = tensor.detach().contiguous()
        if tensor.numel():
            self._pending.append((self.comm.send(tensor, to), tensor))

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        self.comm.finish([pending for pending, _ in self._pending])
        self._pending.clear()


@final
class Coming:
    """Tensors that come from another rank, whose receives have begun."""

    def __init__(self, comm: Comm, source: int, like: Sequence[Shape], device: Any) -> None:
        self._comm = comm
        self.tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in like]
        self._pending = [comm.receive(t, source) for t in self.tensors if t.numel()]

    def wait(self) -> list[Tensor]:
        """Wait for all of them."""
        self._comm.finish(self._pending)
        return self.tensors


@final
class Run:
    """One call of the model on all ranks, and what follows from it.

    Args:
        pipeline: the model's.
        forward: the model's own forward.
        args: the positional arguments.
        kwargs: the arguments by name.
    """

    def __init__(
        self, pipeline: Pipeline, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        self._pipeline, self._comm, self._forward = pipeline, pipeline.comm, forward
        self._grad = torch.is_grad_enabled()
        self._call_of = pipeline.weighs.call()
        if self._grad and any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
            raise UsageError(
                "an input of the model takes a gradient, which a pipeline does not give it",
                do="detach it, or make what computes it a part of the model; or leave out the "
                "pipeline",
            )
        self._call = Call(
            args,
            kwargs,
            {
                "in training": pipeline_mode(pipeline.names),
                "with gradients": self._grad,
                "autocast": _autocast(),
            },
        )
        self._shapes, self._numbers = pipeline.tell(self._call)
        self._route = pipeline.route(self._call, forward, self._numbers[self._comm.rank])
        self._device = next((t.device for t in self._call.tensors), torch.device("cpu"))
        self._tickets: list[Tensor] = []  # of what was sent to other stations
        self._tokens: dict[int, Tensor] = {}  # of what has arrived at the end, by micro-batch
        self._outputs: dict[int, Any] = {}  # of the end, by micro-batch
        self._sent: dict[tuple[int, int], list[Tensor]] = {}  # forms of what takes a gradient
        self._returning: dict[tuple[int, int], Coming] = {}
        self._looked: dict[int, Tensor] = {}
        self._losses = 0
        self._scalars: dict[int, int] = {}  # numbers of losses that are tensors of the output
        self._comm.begins(_FORWARD)
        inputs = self._dealt()
        mine = self._route.of(self._comm.rank)
        coming = self._expected(mine)
        rows = [shapes[0][0][0] if shapes and shapes[0][0] else 1 for shapes in self._shapes]
        counters = Counters(self._route.record.countings)
        with walking():
            for station in mine:
                with MovingBuffers(pipeline.buffers) as moving:
                    for micro in range(self._comm.size):
                        counters.put_back()
                        moving.begin()
                        self._station(station, micro, inputs[micro], coming.get((station, micro)))
                        moving.passed()
                moving.join(rows)
        counters.count()

    def _dealt(self) -> list[list[Any]]:
        """Send inputs to the ranks that use them; return all that are here, by micro-batch."""
        comm, route = self._comm, self._route
        needed = [route.inputs_of(rank) for rank in range(comm.size)]
        own = needed[comm.rank]
        coming = {
            rank: Coming(
                comm, rank, [self._shapes[rank][number] for number in sorted(own)], self._device
            )
            for rank in comm.others
        }
        # the caller may change its batch while messages are under way
        going = set().union(*(needed[rank] for rank in comm.others))
        copies = {number: self._call.tensors[number].detach().clone() for number in going}
        for rank in comm.others:
            for number in sorted(needed[rank]):
                self._pipeline.send(copies[number], rank)
        absent = self._pipeline.forms.absent
        found: list[list[Any]] = []
        for rank, shapes in enumerate(self._shapes):
            here = (
                {number: self._call.tensors[number] for number in own}
                if rank == comm.rank
                else dict(zip(sorted(own), coming[rank].wait(), strict=True))
            )
            found.append(
                [
                    here.get(number, absent(shape, dtype, self._device, grad=False))
                    for number, (shape, dtype) in enumerate(shapes)
                ]
            )
        return found

    def _expected(self, mine: Sequence[int]) -> dict[tuple[int, int], Coming]:
        """Begin to receive what arrives at these stations, up to where a form is not known.

        Messages come in order: what is behind one of unknown form is received in its turn.
        """
        coming: dict[tuple[int, int], Coming] = {}
        for station, micro in product(filter(None, mine), range(self._comm.size)):
            known = self._pipeline.shapes.get((station, self._numbers[micro]))
            if known is None:
                break
            coming[station, micro] = self._coming(station, known)
        return coming

    def _coming(self, station: int, shapes: Sequence[Shape]) -> Coming:
        flags = (len(shapes),), torch.int64
        source = self._route.holders[station - 1]
        return Coming(self._comm, source, [flags, *shapes], self._device)

    def _station(self, station: int, micro: int, inputs: Any, coming: Coming | None) -> None:
        """Compute a station for one micro-batch."""
        route, pipeline = self._route, self._pipeline
        token: list[Tensor] = []
        replay = Replay(
            route.record,
            route.spans[station],
            pipeline.forms,
            Modules(pipeline.names, pipeline.held_by),
            partial(self._arrived, station, micro, coming, token),
        )
        args, kwargs = self._call.with_tensors(inputs)
        if route.record.changes_inputs:  # each replay changes its own
            args, kwargs = pytree.tree_map(_own, (args, kwargs))
        self._comm.reached(f"station {station} of the pipeline, micro-batch {micro}")
        try:
            output = replay.run(self._forward, args, kwargs)
        except Departed:
            self._depart(station, micro, replay.leaving(), token)
            return
        self._outputs[micro] = present(output)
        if token:
            self._tokens[micro] = token[0]

    def _arrived(
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
            self._pipeline.shapes[station, self._numbers[micro]] = shapes
            coming = self._coming(station, shapes)
        flags, *values = coming.wait()
        if not self._grad:
            return values
        taking = [value for value, flag in zip(values, flags.tolist(), strict=True) if flag]
        with torch.enable_grad():  # a station may begin inside of a forward's torch.no_grad()
            arrived: tuple[Tensor, ...] = Arrived.apply(  # type: ignore[no-untyped-call]
                self, station, micro, self._pipeline.anchor, *taking
            )
        token.append(arrived[0])
        graded = iter(arrived[1:])
        return [
            next(graded) if flag else value
            for value, flag in zip(values, flags.tolist(), strict=True)
        ]

    def _depart(self, station: int, micro: int, values: Sequence[Tensor], token: list[Any]) -> None:
        """Send what crosses to the next station."""
        to = self._route.holders[station + 1]
        taking = [value for value in values if self._grad and value.requires_grad]
        flags = [int(self._grad and value.requires_grad) for value in values]
        self._pipeline.send(torch.tensor(flags, dtype=torch.int64, device=self._device), to)
        for value in values:
            self._pipeline.send(value, to)
        if not self._grad:
            return
        self._sent[station, micro] = [torch.empty_like(value, device="meta") for value in taking]
        if taking or token:
            ticket: Tensor = Sent.apply(  # type: ignore[no-untyped-call]
                self, station, micro, token[0] if token else None, *taking
            )
            self._tickets.append(ticket)

    # what the loop does with it

    def output(self) -> Any:
        """Return the output of this rank's rows: the end has its values."""
        rank, route = self._comm.rank, self._route
        number = self._numbers[rank]
        if number not in route.output:
            route.output[number] = self._form_of_output()
        count, scalars = 0, list[int]()

        def placed(leaf: Any) -> Any:
            nonlocal count
            if not isinstance(leaf, Tensor):
                return leaf
            index, count = count, count + 1
            grad = self._grad and leaf.requires_grad
            if not leaf.dim() and leaf.is_floating_point():
                scalars.append(index)
                return self._loss_of_model(index, grad)
            return EndOutput.of(self, index, _form(leaf), takes_grad=grad)

        return pytree.tree_map(placed, route.output[number])

    def _form_of_output(self) -> Any:
        pipeline = self._pipeline
        modules = Modules(pipeline.names, pipeline.held_by)
        replay = Replay(self._route.record, None, pipeline.forms, modules, lambda _: ())
        absent = [pipeline.forms.like(tensor) for tensor in self._call.tensors]
        tensors = [
            tensor if number in self._route.record.looked_at else absent[number]
            for number, tensor in enumerate(self._call.tensors)
        ]
        args, kwargs = self._call.with_tensors(tensors)
        counters = Counters(self._route.record.countings)
        with walking():
            output = replay.run(self._forward, args, kwargs)
        counters.put_back()
        return output

    def _loss_of_model(self, index: int, grad: bool) -> Tensor:
        """Return a number that the model itself has put out for this rank's rows."""
        self._scalars[self._losses] = index
        losses = {
            micro: tensors_in(output)[index] for micro, output in sorted(self._outputs.items())
        }
        return self._told_loss(losses, grad)

    def loss(self, loss_fn: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """Return the loss of this rank's rows, which the end computes (a collective)."""
        own = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, EndOutput)]
        named = pytree.tree_map(self._named, (args, kwargs))
        call = Call(named[0], named[1], {"with gradients": self._grad})
        if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors):
            raise UsageError(
                "the loss is given something beside the output that takes a gradient, which would "
                "get none",
                do="detach it, or leave out the pipeline",
            )
        shapes = self._pipeline.tell_loss(call)
        self._comm.begins(_LOSS)
        losses = {}
        if self._comm.rank == self._route.end:
            losses = self._computed(loss_fn, call, shapes)
        else:
            for tensor in call.tensors:
                self._pipeline.send(tensor, self._route.end)
        loss = self._told_loss(losses, torch.is_grad_enabled())
        return own[0].crossed(loss) if loss.requires_grad else loss

    def _named(self, leaf: Any) -> Any:
        """Return the name of a tensor of the output, or else what it is."""
        if isinstance(leaf, EndOutput):
            return _Named(leaf.number)
        node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
        for _ in range(_BORDERS):
            if getattr(node, "run", None) is self and node.number in self._scalars:
                return _Named(self._scalars[node.number])
            node = node.next_functions[0][0] if node and node.next_functions else None
        return leaf

    def _computed(
        self, loss_fn: Callable[..., Any], call: Call, shapes: Sequence[Sequence[Shape]]
    ) -> dict[int, Tensor]:
        """Return the loss of each rank's rows, where the end is."""
        comm = self._comm
        coming = {rank: Coming(comm, rank, shapes[rank], self._device) for rank in comm.others}
        losses: dict[int, Tensor] = {}
        for micro in range(comm.size):
            tensors = call.tensors if micro == comm.rank else coming[micro].wait()
            outputs = tensors_in(self._outputs[micro])
            args, kwargs = pytree.tree_map(
                lambda leaf, outputs=outputs: (
                    outputs[leaf.number] if isinstance(leaf, _Named) else leaf
                ),
                call.with_tensors(tensors),
            )
            loss = loss_fn(*args, **kwargs)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise UsageError(
                    "a loss of a pipeline's output is one number",
                    got=f"{type(loss).__name__} of shape {tuple(getattr(loss, 'shape', ()))}",
                    do='take its mean: reduction="mean"',
                )
            losses[micro] = loss
        return losses

    def _told_loss(self, losses: Mapping[int, Tensor], grad: bool) -> Tensor:
        """Bring each rank the number of its own rows (a collective)."""
        comm, end = self._comm, self._route.end
        kind = torch.zeros(2, dtype=torch.float64, device=self._device)
        if comm.rank == end:
            for rank in comm.others:
                told = losses[rank].detach().to(torch.float64).reshape(1)
                code = torch.tensor([_DTYPES.index(losses[rank].dtype)], dtype=torch.float64)
                self._pipeline.send(torch.cat([told, code.to(told.device)]), rank)
            value = losses[comm.rank].detach()
        else:
            comm.finish([comm.receive(kind, end)])
            value = kind[0].to(_DTYPES[int(kind[1])])
        number, self._losses = self._losses, self._losses + 1
        if not grad:
            return value.clone()
        graded = [losses[micro] for micro in sorted(losses)]
        parts = [p for p in self._pipeline.elsewhere if p.requires_grad]
        with torch._C.DisableTorchFunctionSubclass():
            loss: Tensor = EndLoss.apply(  # type: ignore[no-untyped-call]
                self,
                number,
                value,
                len(graded),
                len(parts),
                *graded,
                *parts,
                *self._tickets,
                *self._tokens.values(),
                self._pipeline.anchor,
            )
        return loss

    def look(self, number: int) -> Tensor:
        """Return a tensor of the output of this rank's rows (a collective, once)."""
        if number not in self._looked:
            comm, end = self._comm, self._route.end
            form = tensors_in(self._route.output[self._numbers[comm.rank]])[number]
            comm.numbers([number] * comm.size, "pipeline: reading of the model's output")
            if comm.rank == end:
                for rank in comm.others:
                    self._pipeline.send(tensors_in(self._outputs[rank])[number], rank)
                self._looked[number] = tensors_in(self._outputs[comm.rank])[number].detach()
            else:
                shape = tuple(form.shape), form.dtype
                (self._looked[number],) = Coming(comm, end, [shape], self._device).wait()
        return self._looked[number]

    # what autograd does with it

    def slopes(self, number: int, grad: Tensor) -> Sequence[Tensor]:
        """Tell the end the gradient of this rank's loss, weighed; the end returns all."""
        comm, end = self._comm, self._route.end
        comm.begins(_BACKWARD)
        weight = self._pipeline.weighs(self._call_of)
        own = grad.detach().to(torch.float64).reshape(1) / comm.size
        own = own if weight is None else own * weight
        if comm.rank != end:
            self._pipeline.send(own, end)
            return ()
        slopes = {rank: torch.empty_like(own) for rank in comm.others}
        comm.finish([comm.receive(slope, rank) for rank, slope in slopes.items()])
        slopes[comm.rank] = own
        return [slopes[rank].to(grad.dtype).reshape(()) for rank in range(comm.size)]

    def _begin_backward(self) -> None:
        """Begin to receive all gradients of what was sent, in the order in which they come."""
        for station, micro in sorted(self._sent, reverse=True):
            shapes = [(tuple(form.shape), form.dtype) for form in self._sent[station, micro]]
            source = self._route.holders[station + 1]
            self._returning[station, micro] = Coming(self._comm, source, shapes, self._device)

    def take_gradients(self, station: int, micro: int) -> Sequence[Tensor]:
        """Wait for the gradients of what was sent."""
        self._comm.reached(f"backward of station {station} of the pipeline, micro-batch {micro}")
        if not self._returning:  # the slopes of all losses have come by now
            self._begin_backward()
        return self._returning.pop((station, micro)).wait()

    def return_gradients(self, station: int, micro: int, grads: Sequence[Tensor]) -> None:
        """Send the gradients of what has arrived."""
        for grad in grads:
            self._pipeline.send(grad, self._route.holders[station - 1])


@final
class _Named:
    """A tensor of the output, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


def pipeline_mode(modules: Mapping[nn.Module, str]) -> bool | str:
    """Return whether all modules are in training; where they differ, those that are not."""
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


def _form(leaf: Tensor) -> Tensor:
    return leaf.slot.form if isinstance(leaf, Absent) else leaf


_BORDERS = 4  # nodes between a number of the output and what the loss is given, at most
_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
