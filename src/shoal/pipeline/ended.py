"""A forward of all ranks that has been computed: its output, its losses, and their gradients.

The rank that holds the end of the model has the outputs. It computes the loss of each rank's rows,
and tells each rank its own. In backward each rank tells it the gradient of that loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import UsageError
from shoal.pipeline.absent import Absent
from shoal.pipeline.calls import ModelCall, Shape
from shoal.pipeline.crossings import EndLoss
from shoal.pipeline.model import BACKWARD, LOSS, PipelinedModel
from shoal.pipeline.moving import Counters, aside
from shoal.pipeline.output import EndOutput
from shoal.pipeline.replay import Replay, check_hooks
from shoal.pipeline.route import Coming
from shoal.pipeline.run import ForwardRun
from shoal.pipeline.walk import tensors_in, walking


@final
class PipelineCalls:
    """Runs the calls of a model in a pipeline.

    Args:
        pipeline: the model.
    """

    def __init__(self, pipeline: PipelinedModel) -> None:
        self.pipeline = pipeline
        self.runs = False

    def called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model, together with all ranks."""
        if self.runs:
            return forward(*args, **kwargs)
        self.pipeline.outbox.finish()
        check_hooks(self.pipeline.model, "")
        self.runs = True
        try:
            return EndedForward(ForwardRun(self.pipeline, forward, args, kwargs)).output()
        finally:
            self.runs = False


@final
class EndedForward:
    """One forward of all ranks, with its outputs.

    Args:
        run: the forward.
    """

    def __init__(self, run: ForwardRun) -> None:
        self._run = run
        self._call_of = run.pipeline.weighs.call()
        self._looked: dict[int, Tensor] = {}
        self._losses = 0
        self._scalars: dict[int, int] = {}  # numbers of losses that are tensors of the output

    def output(self) -> Any:
        """Return the output of this rank's rows: the end has its values."""
        rank, route = self._run.comm.rank, self._run.route
        number = self._run.numbers[rank]
        if number not in route.output:
            route.output[number] = self._form_of_output()
        count, scalars = 0, list[int]()

        def placed(leaf: Any) -> Any:
            nonlocal count
            if not isinstance(leaf, Tensor):
                return leaf
            index, count = count, count + 1
            grad = self._run.grad and leaf.requires_grad
            if not leaf.dim() and leaf.is_floating_point():
                scalars.append(index)
                return self._loss_of_model(index, grad)
            return EndOutput.of(self, index, _form(leaf), takes_grad=grad)

        return pytree.tree_map(placed, route.output[number])

    def _form_of_output(self) -> Any:
        pipeline = self._run.pipeline
        replay = Replay(
            self._run.route.record, None, pipeline.forms, pipeline.modules, lambda _: ()
        )
        absent = [pipeline.forms.like(tensor) for tensor in self._run.call.tensors]
        tensors = [
            tensor if number in self._run.route.record.looked_at else absent[number]
            for number, tensor in enumerate(self._run.call.tensors)
        ]
        args, kwargs = self._run.call.with_tensors(tensors)
        counters = Counters(self._run.route.record.countings)
        with walking(), aside([*pipeline.homes.moving.values()]):
            output = replay.run(self._run.forward, args, kwargs)
        counters.put_back()
        return output

    def _loss_of_model(self, index: int, grad: bool) -> Tensor:
        """Return a number that the model itself has put out for this rank's rows."""
        self._scalars[self._losses] = index
        losses = {
            micro: tensors_in(output)[index] for micro, output in sorted(self._run.outputs.items())
        }
        return self._told_loss(losses, grad)

    def loss(self, loss_fn: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """Return the loss of this rank's rows, which the end computes (a collective)."""
        own = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, EndOutput)]
        named = pytree.tree_map(self._named, (args, kwargs))
        call = ModelCall(named[0], named[1], {"with gradients": self._run.grad})
        if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors):
            raise UsageError(
                "the loss is given something beside the output that takes a gradient, which would "
                "get none",
                do="detach it, or leave out the pipeline",
            )
        shapes = self._run.pipeline.tell(call, LOSS)[0]
        self._run.comm.begins(LOSS)
        losses = {}
        if self._run.comm.rank == self._run.route.end:
            losses = self._computed(loss_fn, call, shapes)
        else:
            for tensor in call.tensors:
                self._run.pipeline.outbox.send(tensor, self._run.route.end)
        loss = self._told_loss(losses, torch.is_grad_enabled())
        return own[0].crossed(loss) if loss.requires_grad else loss

    def _named(self, leaf: Any) -> Any:
        """Return the name of a tensor of the output, or else the value itself."""
        if isinstance(leaf, EndOutput):
            return _OutputNumber(leaf.number)
        node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
        for _ in range(_BORDERS):
            if getattr(node, "run", None) is self and node.number in self._scalars:
                return _OutputNumber(self._scalars[node.number])
            node = node.next_functions[0][0] if node and node.next_functions else None
        return leaf

    def _computed(
        self, loss_fn: Callable[..., Any], call: ModelCall, shapes: Sequence[Sequence[Shape]]
    ) -> dict[int, Tensor]:
        """Return the loss of each rank's rows, where the end is."""
        comm = self._run.comm
        coming = {rank: Coming(comm, rank, shapes[rank], self._run.device) for rank in comm.others}
        losses: dict[int, Tensor] = {}
        for micro in range(comm.size):
            tensors = call.tensors if micro == comm.rank else coming[micro].wait()
            outputs = tensors_in(self._run.outputs[micro])
            args, kwargs = pytree.tree_map(
                lambda leaf, outputs=outputs: (
                    outputs[leaf.number] if isinstance(leaf, _OutputNumber) else leaf
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
        comm, end = self._run.comm, self._run.route.end
        kind = torch.zeros(2, dtype=torch.float64, device=self._run.device)
        if comm.rank == end:
            for rank in comm.others:
                told = losses[rank].detach().to(torch.float64).reshape(1)
                code = torch.tensor(
                    [_DTYPES.index(losses[rank].dtype)], dtype=torch.float64, device="cpu"
                )
                self._run.pipeline.outbox.send(torch.cat([told, code.to(told.device)]), rank)
            value = losses[comm.rank].detach()
        else:
            comm.finish([comm.receive(kind, end)])
            value = kind[0].to(_DTYPES[int(kind[1])])
        number, self._losses = self._losses, self._losses + 1
        if not grad:
            return value.clone()
        graded = [losses[micro] for micro in sorted(losses)]
        parts = [p for p in self._run.pipeline.elsewhere if p.requires_grad]
        with torch._C.DisableTorchFunctionSubclass():
            loss: Tensor = EndLoss.apply(  # type: ignore[no-untyped-call]
                self,
                number,
                value,
                len(graded),
                len(parts),
                *graded,
                *parts,
                *self._run.tickets,
                *self._run.tokens.values(),
                self._run.pipeline.anchor,
            )
        return loss

    def look(self, number: int) -> Tensor:
        """Return a tensor of the output of this rank's rows (a collective, once)."""
        if number not in self._looked:
            comm, end = self._run.comm, self._run.route.end
            form = tensors_in(self._run.route.output[self._run.numbers[comm.rank]])[number]
            comm.numbers([number] * comm.size, "pipeline: reading of the model's output")
            if comm.rank == end:
                for rank in comm.others:
                    self._run.pipeline.outbox.send(
                        tensors_in(self._run.outputs[rank])[number], rank
                    )
                self._looked[number] = tensors_in(self._run.outputs[comm.rank])[number].detach()
            else:
                shape = tuple(form.shape), form.dtype
                (self._looked[number],) = Coming(comm, end, [shape], self._run.device).wait()
        return self._looked[number]

    def slopes(self, number: int, grad: Tensor) -> Sequence[Tensor]:
        """Tell the end the gradient of this rank's loss, weighed; the end returns all."""
        comm, end = self._run.comm, self._run.route.end
        comm.begins(BACKWARD)
        weight = self._run.pipeline.weighs(self._call_of)
        own = grad.detach().to(torch.float64).reshape(1) / comm.size
        own = own if weight is None else own * weight
        if comm.rank != end:
            self._run.pipeline.outbox.send(own, end)
            return ()
        slopes = {rank: torch.empty_like(own) for rank in comm.others}
        comm.finish([comm.receive(slope, rank) for rank, slope in slopes.items()])
        slopes[comm.rank] = own
        return [slopes[rank].to(grad.dtype).reshape(()) for rank in range(comm.size)]


@final
class _OutputNumber:
    """A tensor of the output, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


def _form(leaf: Tensor) -> Tensor:
    return leaf.slot.form if isinstance(leaf, Absent) else leaf


_BORDERS = 4  # nodes at most between a number of the output and an argument of the loss
_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
