"""Tensors that a model's forward leaves in attributes and hooks, if it runs in micro-batches.

    attributes   keep the last micro-batch's values. Rows without a history are joined to the rows
                 of the whole batch
    a history    a tensor that has one is the last micro-batch's; a loss through it would use
                 only some rows, so its backward is an error
    hooks        a forward hook on a module gets an output with such a history, unless the hook
                 returns something else in its place

Guarded by tests/equivalence/test_stage_refused.py and test_terms.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.loss_attributes import keep, kept_values_of
from shoal.core.errors import UsageError
from shoal.core.names import pins
from shoal.remote.stage_output import StageOutput

Place = tuple[nn.Module, str]  # an attribute of a module


@final
class Pieces:
    """One forward in micro-batches.

    Args:
        model: the model that runs.
        layers: the layers at the tail, for messages.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self._modules = dict(model.named_modules())
        self._layers = layers
        self._before = {id(value) for value in self._keep().values()}
        self._rows: list[int] = []
        self._of_each: list[dict[Place, Any]] = []

    def _keep(self) -> dict[Place, Any]:
        return {
            (module, name): value
            for module in self._modules.values()
            for name, value in kept_values_of(module).items()
        }

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Give forward hooks on modules tensors that tell if a loss goes through them."""
        with ExitStack() as stack:
            for name, module in self._modules.items():
                if name and module._forward_hooks:
                    given = _HookedOutput(self, OnePiece(f"a forward hook on {name}", self._layers))
                    stack.callback(module.register_forward_hook(given.before, prepend=True).remove)
                    stack.callback(module.register_forward_hook(given.after).remove)
            yield

    def ended(self, rows: int) -> None:
        """Note that a micro-batch of so many rows has been through the model."""
        self._rows.append(rows)
        self._of_each.append(self._keep())

    def join(self) -> None:
        """Leave joined rows in attributes, or tensors that refuse a backward."""
        names = {module: name for name, module in self._modules.items()}
        for place, value in self._of_each[-1].items():
            if id(value) in self._before and isinstance(value, Tensor | tuple):
                continue  # kept from before, not by a micro-batch
            module, name = place
            where = ".".join(part for part in (names[module], name) if part)
            of_each = [kept.get(place) for kept in self._of_each]
            new = self._whole(of_each)
            if new is None:
                new = self.of_one(value, OnePiece(f"attribute {where}", self._layers))
            keep(module, name, new)

    def _whole(self, of_each: list[Any]) -> Tensor | None:
        """Return the rows of all micro-batches as one tensor; None if the attribute lacks any."""
        tensors = [value for value in of_each if isinstance(value, Tensor) and value.dim()]
        if [len(tensor) for tensor in tensors] != self._rows:
            return None
        first = tensors[0]
        if any(t.requires_grad or t.shape[1:] != first.shape[1:] for t in tensors):
            return None
        return torch.cat(tensors)

    def of_one(self, value: Any, piece: OnePiece) -> Any:
        """Return the value with tensors that raise an error if their gradient is asked for."""

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, StageOutput):
                return leaf
            if leaf.grad_fn is None or type(leaf.grad_fn).__name__ == _MARKED:
                return leaf
            return _OfOne.apply(leaf, piece)  # type: ignore[no-untyped-call]

        return pytree.tree_map(change, value)


@final
class _HookedOutput:
    """A module's output, as hooks see it and as it goes on."""

    def __init__(self, pieces: Pieces, piece: OnePiece) -> None:
        self._pieces, self._piece = pieces, piece
        self._put_out: Any = None
        self._shown: Any = None

    def before(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Show later hooks the output with tensors that refuse a backward."""
        self._put_out, self._shown = output, self._pieces.of_one(output, self._piece)
        return self._shown

    def after(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Let the model go on with its own output, unless a hook has returned another."""
        put_out, shown = self._put_out, self._shown
        self._put_out = self._shown = None
        if output is shown:
            return put_out
        self._piece.is_used = True
        return output


@final
@dataclass
class OnePiece:
    """The place where a tensor of one micro-batch is found."""

    where: str
    layers: Sequence[str]
    is_used: bool = False  # whether it replaces the module's output

    def back(self, grad: Tensor) -> Tensor:
        """Return the gradient, if the tensor went on as a module's output.

        Raises:
            UsageError: it would be of one micro-batch's rows only.
        """
        if not self.is_used:
            raise UsageError(
                "a loss goes through what the model keeps of one micro-batch, as its end runs on "
                "tail hosts",
                where=self.where,
                do=f"let the loss be of the model's output alone, or give parallelize "
                f"{pins(self.layers)}",
            )
        return grad


class _OfOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, piece: OnePiece) -> Tensor:
        ctx.piece = piece
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.piece.back(grad), None


_MARKED = "_OfOneBackward"  # class of the function that makes a marked tensor
