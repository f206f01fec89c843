"""A model whose end runs on hosts of its own: a worker's way to them.

    worker w                                                   tail host w mod T (tail/stage.py)
      forward of micro-batch i  Forward  the activation    ──▶ joins its workers' rows, runs the
      … of the next, meanwhile                                 tail
      loss_fn(output, target)   TailLoss the target        ──▶ the loss of all of this worker's
                                         the loss          ◀── rows
      backward                  Backward its weight        ──▶ gradients, last micro-batch first
      … of micro-batch i                 of the activation ◀── while that of the one before is
                                                               computed
      optimizer.step()          TailStep the settings      ──▶ an update as in one process

What the model returns is a placeholder: the loss that `parallelize` returned takes it; whoever
looks at it gets the output (`Output`), without a gradient. To all else the tail's parameters look
whole (tensors/cut.py), and whatever is done with them is done by all workers together. Guarded by
tests/equivalence/test_stage.py. The walk of one micro-batch: docs/ideas/walk-micro-batch.md.

Reference: Huang et al., "GPipe", 2019, section 2 (micro-batches); multi-node Caffe's net that is
cut over nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.comm.threads import DONE
from shoal.contracts.comm import Pending
from shoal.core.errors import UsageError
from shoal.core.names import pins
from shoal.core.pieces import cut_sizes
from shoal.core.trace import MAIN
from shoal.remote.far_tail import FarTail
from shoal.remote.tail_hosts import MicroBatch, backward_message, forward_message, loss_message
from shoal.remote.tail_messages import Output
from shoal.tensors.boundary import refuse_second_derivative


@final
class StagedRun:
    """One forward of the model, and what follows from it."""

    def __init__(self, tail: FarTail) -> None:
        self.tail = tail
        self.number, self._modes = tail.begin(self)
        self._of_gradients = torch.is_grad_enabled()
        self._index = 0
        self._forms: dict[int, Tensor] = {}  # of activations that take a gradient
        self._losses = 0
        self._slopes: dict[int, Tensor] = {}  # of the losses
        self._landing: dict[int, tuple[Pending, Tensor]] = {}
        self._gone = False
        self._output: Tensor | None = None
        self._since_s = perf_counter()  # the main thread computes

    def send(self, activation: Tensor) -> StageOutput:
        """The tail's first module is called with this."""
        # the parts, which are empty: what autograd looks for
        with torch._C.DisableTorchFunctionSubclass():
            parts = [
                parameter for parameter in self.tail.parameters.values() if parameter.requires_grad
            ]
            ticket: Tensor = _Sent.apply(self, activation, self.tail.anchor, *parts)  # type: ignore[no-untyped-call]
        return StageOutput.of(self, [ticket])

    def tell_forward(self, activation: Tensor | None, *, back: bool) -> int:
        """Send a micro-batch's activation, or that it has none: its number.

        The activation's gradient is to come back, or not.
        """
        index, self._index = self._index, self._index + 1
        self._note(f"forward of micro-batch {index}", self._since_s)
        if back and activation is not None:
            self._forms[index] = torch.empty_like(activation, device="meta")
        modes = None if index else self._modes
        code = None if activation is None else self.tail.feed.crossing.narrow(activation)
        message = forward_message(
            activation if code is None else code,
            modes,
            MicroBatch(self.number, index, self.tail.oldest),
            of_gradients=self._of_gradients,
            back=back,
            wide=None if activation is None or code is None else activation.dtype,
        )
        self.tail.hosts.tell(message)  # batch 1: the next micro-batch begins meanwhile
        self._since_s = perf_counter()
        return index

    def loss(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tickets: Sequence[Tensor]
    ) -> Tensor:
        """The loss, of what this is the first argument; the rest are given."""
        if torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in _leaves(args, kwargs)
        ):
            raise UsageError(
                "the loss is given something beside the output that takes a gradient, which would "
                "get none",
                do=f"detach it, or give parallelize {pins(self.tail.layers)}",
            )
        number, self._losses = self._losses, self._losses + 1
        message = loss_message(args, kwargs, run=self.number, index=number)
        begin_s = perf_counter()
        value = self.tail.hosts.ask(message, Tensor)  # batch 6: arguments go, the value comes
        self._note("wait for the loss", begin_s)
        if not torch.is_grad_enabled():
            return value
        loss: Tensor = _StagedLoss.apply(self, number, value, *tickets)  # type: ignore[no-untyped-call]
        return loss

    def slope(self, number: int, grad: Tensor) -> bool:
        """Note the gradient of a loss; whether it is the first in this backward."""
        if self._gone:
            raise twice()
        first = not self._slopes
        self._slopes[number] = grad
        return first

    def backward(self, index: int, weight: Tensor) -> Tensor | None:
        """The gradient of a micro-batch's activation. `weight` multiplies gradients."""
        hosts = self.tail.hosts
        if not self._gone:
            self._gone = True
            cleared, wanted = self.tail.cleared(), self.tail.wanted()
            hosts.tell(  # batch 8: once, with the last micro-batch
                backward_message(cleared, wanted, float(weight), self._slopes, run=self.number)
            )
            for number in sorted(self._forms, reverse=True):
                form = self._forms[number]
                if self.tail.feed.crossing.narrows(form):
                    gradient = self.tail.feed.crossing.landing(form)
                else:
                    gradient = torch.empty(form.shape, dtype=form.dtype, device="cpu")
                pending = hosts.channel.receive(gradient) if gradient.numel() else DONE
                self._landing[number] = pending, gradient
        else:
            self._note(f"backward of micro-batch {index + 1}", self._since_s)
        if index not in self._landing:
            return None
        begin_s = perf_counter()
        pending, gradient = self._landing.pop(index)
        pending.wait()  # batch 10: backward goes on through the body
        self._note(f"wait for the gradient of micro-batch {index}", begin_s)
        self._since_s = perf_counter()
        form = self._forms[index]
        if self.tail.feed.crossing.narrows(form):
            gradient = self.tail.feed.crossing.from_code(gradient, form.dtype)
        return gradient

    def output(self) -> Tensor:
        """What the tail has put out for this worker's rows; a collective, once."""
        if self._output is None:
            self._output = self.tail.hosts.ask(Output(self.number), Tensor)
        return self._output

    def _note(self, label: str, begin_s: float) -> None:
        recorder = self.tail.hosts.comm.recorder
        if recorder is not None:
            recorder.note(label, MAIN, begin_s)


@final
class StageOutput(Tensor):
    """What tail hosts have put out: the loss takes it as it is.

    Whoever looks at it gets it without a gradient.
    """

    _run: StagedRun
    _tickets: list[Tensor]

    @classmethod
    def of(cls, run: StagedRun, tickets: Sequence[Tensor]) -> StageOutput:
        """The output of these micro-batches."""
        output: StageOutput = torch.empty(0, device="cpu").as_subclass(cls)
        output._run, output._tickets = run, list(tickets)
        return output

    def over(self, after: Callable[[Tensor], Tensor]) -> StageOutput:
        """The same, whose gradients come back through `after`."""
        return StageOutput.of(self._run, [after(ticket) for ticket in self._tickets])

    @property
    def tickets(self) -> list[Tensor]:
        """What autograd finds of each micro-batch."""
        return self._tickets

    def is_of(self, run: StagedRun) -> bool:
        """Whether it is what that forward has put out."""
        return self._run is run

    def loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The loss at the tail, of this and these."""
        return self._run.loss(args, kwargs, self._tickets)

    def whole(self) -> Tensor:
        """The output itself, whose gradient is an error."""
        output = self._run.output()
        if not torch.is_grad_enabled() or not output.is_floating_point():
            return output
        seen: Tensor = _FetchedOutput.apply(self._run, output, *self._tickets)  # type: ignore[no-untyped-call]
        return seen

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _REQUIRES_GRAD:
            return bool(args[0]._tickets) and args[0]._tickets[0].requires_grad
        name = getattr(func, "__name__", "")
        changes = (name.endswith("_") and not name.endswith("__")) or name.startswith(
            ("register_", "retain", "__set")
        )
        if changes or (
            name.startswith("__i")
            and name not in ("__invert__", "__int__", "__index__", "__iter__")
        ):
            raise UsageError(
                f"{name} on an output of tail hosts would change a copy of it",
                do="do it in the loss, or in the model before, or give parallelize "
                + pins(args[0]._run.tail.layers),
            )

        def whole(leaf: Any) -> Any:
            return leaf.whole() if isinstance(leaf, StageOutput) else leaf

        args, kwargs = pytree.tree_map(whole, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Sent(torch.autograd.Function):
    """An activation on its way to the tail, and its gradient back.

    It gives a ticket, whose gradient is the weight.
    """

    @staticmethod
    def forward(
        ctx: Any, run: StagedRun, activation: Tensor, anchor: Tensor, *parts: Tensor
    ) -> Tensor:
        ctx.run, ctx.others = run, 1 + len(parts)
        ctx.index = run.tell_forward(activation, back=ctx.needs_input_grad[1])
        return torch.zeros((), dtype=torch.float64, device="cpu")

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative(ctx.run.tail.layers[-1] if ctx.run else "of the tail")
        run, ctx.run = ctx.run, None  # a loss that is kept keeps no more
        if run is None:
            raise twice()
        rows = run.tail.weighs()
        gradient = run.backward(ctx.index, weight if rows is None else weight * rows)
        if gradient is not None and rows:  # before the tail it is this rank's own
            gradient = gradient.div_(rows)
        return None, gradient, *[None] * ctx.others


class _StagedLoss(torch.autograd.Function):
    """A loss that the tail has computed; back go, beside its own gradient, tickets' of 1."""

    @staticmethod
    def forward(ctx: Any, run: StagedRun, number: int, value: Tensor, *tickets: Tensor) -> Tensor:
        ctx.run, ctx.number, ctx.tickets = run, number, len(tickets)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative(ctx.run.tail.layers[-1] if ctx.run else "of the tail")
        run, ctx.run = ctx.run, None
        if run is None:
            raise twice()
        weight = float(run.slope(ctx.number, grad))
        return (
            None,
            None,
            None,
            *[torch.tensor(weight, dtype=torch.float64, device="cpu")] * ctx.tickets,
        )


class _FetchedOutput(torch.autograd.Function):
    """An output that was brought from the tail."""

    @staticmethod
    def forward(ctx: Any, run: StagedRun, output: Tensor, *tickets: Tensor) -> Tensor:
        ctx.tickets, ctx.layers = len(tickets), run.tail.layers
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        raise UsageError(
            "the output of a tail on hosts of its own goes into something else than the loss",
            do="train by the loss_fn that parallelize returned, called with the model's output as "
            "it is, or give parallelize " + pins(ctx.layers),
        )


def twice() -> UsageError:
    """Why there is no second backward."""
    return UsageError(
        "a second backward through a forward whose end ran on tail hosts",
        do="call the model again, or add the losses before backward",
    )


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    return pytree.tree_leaves((args, kwargs))


def micro_batch_sizes(rows: int, count: int, *, alike: bool = False) -> list[int]:
    """Rows of each of at most so many micro-batches, or of exactly so many (`alike`)."""
    return [size for size in cut_sizes(rows, count) if size or alike] or [0]


def in_micro_batches(batch: Any, rows: int, count: int, *, alike: bool = False) -> list[Any]:
    """A batch cut into at most so many, or exactly so many (`alike`).

    Cut are the rows of every tensor that has as many.
    """
    sizes = micro_batch_sizes(rows, count, alike=alike)

    def split(leaf: Any) -> Any:
        whole = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows
        return leaf.split(sizes) if whole else [leaf] * len(sizes)

    leaves, form = pytree.tree_flatten(batch)
    return [
        pytree.tree_unflatten(list(parts), form) for parts in zip(*map(split, leaves), strict=True)
    ]


_REQUIRES_GRAD = getattr(Tensor, "requires_grad").__get__  # noqa: B009
