"""The output of a model in a pipeline: the rank that holds the end has it.

`loss_fn` takes it as it is, and so do shapes. Whoever looks at its values gets them, without a
gradient: all ranks look together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import UsageError


class Ended(Protocol):
    """One forward of all ranks up to its end."""

    def look(self, number: int) -> Tensor:
        """Return a tensor of the output of this rank's rows (a collective)."""


@final
class EndOutput(Tensor):
    """A tensor of the output, which is at the end of the pipeline.

    Args:
        run: the forward.
        number: its number among the output's tensors.
        form: its form.
        takes_grad: whether it takes a gradient.
    """

    _run: Any
    number: int
    _form: Tensor
    _takes_grad: bool
    _after: Callable[[Tensor], Tensor] | None

    @classmethod
    def of(cls, run: Ended, number: int, form: Tensor, *, takes_grad: bool) -> EndOutput:
        """Return a tensor of an output."""
        output = torch.empty(0, device="cpu").as_subclass(cls)
        output._run, output.number, output._form = run, number, form
        output._takes_grad, output._after = takes_grad, None
        return output

    @property
    def run(self) -> Any:
        """The forward of which this is the output."""
        return self._run

    def over(self, after: Callable[[Tensor], Tensor]) -> EndOutput:
        """Return the same output, with gradients that come back through `after`."""
        output = EndOutput.of(self._run, self.number, self._form, takes_grad=self._takes_grad)
        before = self._after
        output._after = after if before is None else lambda tensor: after(before(tensor))
        return output

    def crossed(self, loss: Tensor) -> Tensor:
        """Return a loss of the output, with a gradient that comes back the way the output came."""
        return loss if self._after is None else self._after(loss)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, EndOutput) and func == _REQUIRES_GRAD:
            return first._takes_grad
        if isinstance(first, EndOutput) and func in _OF_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(first._form, *args[1:], **kwargs)

        def looked(leaf: Any) -> Any:
            return leaf.looked() if isinstance(leaf, EndOutput) else leaf

        args, kwargs = pytree.tree_map(looked, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def looked(self) -> Tensor:
        """Return the values (a collective); a backward through them is an error."""
        seen: Tensor = self._run.look(self.number)
        if not torch.is_grad_enabled() or not self._takes_grad:
            return seen
        looked: Tensor = _LookedOutput.apply(
            seen, torch.zeros((), requires_grad=True, device="cpu")
        )  # type: ignore[no-untyped-call]
        return looked

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EndOutput({tuple(self._form.shape)}, {self._form.dtype})"


class _LookedOutput(torch.autograd.Function):
    """Values of an output that were looked at."""

    @staticmethod
    def forward(ctx: Any, seen: Tensor, anchor: Tensor) -> Tensor:
        return seen.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        raise UsageError(
            "the output of a pipeline goes into something else than the loss",
            do="train by the loss_fn that parallelize returned, called with the model's output as "
            "it is; or let the model return its loss",
        )


_REQUIRES_GRAD = getattr(Tensor, "requires_grad").__get__  # noqa: B009
_OF_FORM = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.is_floating_point,
        Tensor.__len__,
    ]
)
