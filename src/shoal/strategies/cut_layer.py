"""Calls of a layer that is cut over the ranks: this rank's part of the weight, for all ranks' rows.

    an nn.Linear                    one operator moves rows and multiplies     (tensors/boundary.py)
    outputs of one weight row each  the layer's own forward runs on the part, between the moves
    any other layer                 its own forward runs on this rank's rows, and its products are
                                    made over all ranks                 (tensors/weight_products.py)

Guarded by tests/equivalence/test_cut.py, test_rowwise.py and test_multiplied.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.contracts.strategy import Place
from shoal.core.eager_methods import eager
from shoal.core.pieces import cut_sizes
from shoal.profiling.row_layers import row_dims
from shoal.profiling.weight_use import UNUSED, WeightUse
from shoal.strategies.copies import class_served_by, kind_before, plain
from shoal.tensors.boundary import CallRows, Move, call_of, linear
from shoal.tensors.cut_output import CutOutput
from shoal.tensors.row_crossing import RowCrossing
from shoal.tensors.weight_products import Product, Products
from shoal.tensors.whole_module_calls import holding_wholes, tell_numbers

SLOT = "_cut_layer"  # attribute of a served layer: the part that runs it


class CutMoves(ABC):
    """The moves of rows to the parts of a weight, and of products back."""

    dim: ClassVar[int]  # dimension of the weight: 0 holds the outputs, 1 the inputs
    takes_parts: ClassVar[bool] = False  # True if the input is cut already, as the weight is

    @abstractmethod
    def enter(self, rows: CallRows, widths: Sequence[int]) -> Move:
        """Return the move that brings rows to the weight's parts."""

    @abstractmethod
    def leave(
        self, product: Tensor, rows: CallRows, widths: Sequence[int], shape: Sequence[int]
    ) -> Tensor:
        """Return the parts' products in this shape, each on the rank that has the row."""


@dataclass(frozen=True)
class OwnParameters:
    """A layer's own parameters, and how its forward uses them.

    Args:
        weight: the layer's matrix.
        bias: its vector, or None.
        use: how it multiplies with these; None if its forward runs on parts as it stands.
        is_exact: whether it is an nn.Linear itself, not a subclass.
        places: every parameter with the table that holds it, and its name there.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    use: WeightUse | None
    is_exact: bool
    places: tuple[tuple[dict[str, Any], str, nn.Parameter], ...]

    @classmethod
    def of(cls, module: nn.Module, use: WeightUse | None) -> OwnParameters:
        table = module._parameters
        names = use or UNUSED
        weight = table[names.weight]
        assert weight is not None
        places = tuple((table, leaf, p) for leaf, p in table.items() if p is not None)
        return cls(weight, table.get(names.bias), use, type(module) is nn.Linear, places)

    @property
    def is_turned(self) -> bool:
        """Whether the weight has the shape (inputs, outputs)."""
        return self.use is not None and self.use.turned

    def dim(self, dim: int) -> int:
        """Return the dimension of the weight that is number `dim` of (outputs, inputs)."""
        return 1 - dim if self.is_turned else dim

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight, or a part of it, as F.linear takes it: (outputs, inputs)."""
        return weight.t() if self.is_turned else weight

    def are_held(self) -> bool:
        """Return whether the layer holds these parameters, and not others for a while."""
        return all(table.get(leaf) is parameter for table, leaf, parameter in self.places)


@final
class LayerPart:
    """This rank's part of a layer: it runs the layer for the rows of all ranks."""

    def __init__(
        self,
        name: str,
        strategy: CutMoves,
        module: nn.Module,
        own: OwnParameters,
        widths: Sequence[int],
        place: Place,
    ) -> None:
        assert place.comm is not None
        self._name, self._comm, self._chunks = name, place.comm, place.rows.chunks
        self._weighs, self.crossing = place.weighs, RowCrossing(place.rows.codec)
        self._backward_hooks = place.ways.backward_hooks
        self.own, self._strategy, self._widths = own, strategy, widths
        self._row_dims = row_dims(module)
        self._outputs = own.weight.shape[1 if own.is_turned else 0]
        at = accumulate(cut_sizes(self._outputs, place.ranks), initial=0)
        self._mine = list(pairwise(at))[place.rank]  # this rank's outputs, where it adds the bias

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run one call of the layer; `forward` is the layer's own."""
        if self.own.use is None or self.own.is_exact:
            (x,) = (*args, *kwargs.values())  # a layer with other arguments is never cut
            return self.called(module, forward, x)
        return _CutProducts(self, module).run(forward, args, kwargs)

    def called(self, module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return the layer's output for this rank's rows; `forward` is the layer's own."""
        ahead, row = x.shape[: -self._row_dims], x.shape[-self._row_dims :]
        cut_rows = None
        if isinstance(x, CutOutput):
            cut_rows = x.taken_by(self._name, self._widths) if self._strategy.takes_parts else None
            x = x if cut_rows else x.whole()
        if cut_rows is not None:
            rows, inside = replace(cut_rows[0], crossing=self.crossing), cut_rows[1]
        else:
            flat = x.reshape(-1, row.numel())
            form = "" if len(row) == 1 else f", rows of {tuple(row)}"
            purpose = call_of(self._name) + form
            told = tell_numbers(self._comm, [len(flat)] * self._comm.size, purpose)
            if told is None:
                with holding_wholes([module], self._comm):
                    return forward(x)
            if self._comm.attendance is not None and torch._C._current_graph_task_id() == -1:
                self._comm.attendance.drop(self._name)  # no rank reads it alone any more
            crossing = self.crossing
            rows = CallRows(self._comm, tuple(told), purpose, self._weighs, self._name, crossing)
            inside = None
        with torch._C.DisableTorchFunctionSubclass():  # the parts themselves, not whole tensors
            if self.own.use is None:
                product = forward(self._enter(rows)(flat).view(-1, *row))
            else:
                product = self._product(rows, flat if inside is None else inside, inside is None)
        place = product.shape[2:]  # height and width of the output of a convolution
        widths = [width * place.numel() for width in self._widths]
        output = self._strategy.leave(
            product.flatten(1), rows, widths, (*ahead, self._outputs, *place)
        )
        # torch hangs backward hooks of modules on ordinary tensors only
        if isinstance(output, CutOutput) and any(self._backward_hooks):
            return output.whole()
        return output

    def _product(self, rows: CallRows, x: Tensor, enters: bool) -> Tensor:
        """Return the product of all ranks' rows with this rank's part of the weight."""
        weight = self.own.matrix(self.own.weight)
        if not enters:
            return F.linear(x, weight, self._added_bias())
        return linear(x, weight, self._added_bias(), rows.chunks(self._chunks), self._enter)

    def _enter(self, rows: CallRows) -> Move:
        return self._strategy.enter(rows, self._widths)

    def _added_bias(self) -> Tensor | None:
        """Return the bias that this rank adds to its product.

        If all outputs are summed, it has zeros at the other ranks' places.
        """
        bias = self.own.bias
        if bias is None or not self._strategy.dim:
            return bias
        start, stop = self._mine
        return F.pad(bias, (start, self._outputs - stop))


@final
class _CutProducts(Products):
    """Makes the products of one call of a layer over all ranks, inside the layer's own forward."""

    def __init__(self, part: LayerPart, module: nn.Module) -> None:
        own = part.own
        assert own.use is not None
        super().__init__(own.weight, own.bias, own.use.turned, own.use.adds_late)
        self._part, self._module, self._own = part, module, own

    def multiply(self, product: Product, plain: Callable[[], Any]) -> Any:
        return self._part.called(self._module, self._alone, product.x)

    def _alone(self, x: Tensor) -> Tensor:
        """Return the product of a rank that is alone: the layer holds whole parameters now."""
        held, use = self._module._parameters, self._own.use
        assert use is not None
        weight = held[use.weight]
        assert weight is not None
        return F.linear(x, self._own.matrix(weight), held.get(use.bias))


class _CutLayer(nn.Module):
    """A layer that is cut over the ranks, with the same parameters, names and repr.

    A copy of it is an ordinary layer.
    """

    _cut_layer: LayerPart | None = None

    @eager
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part = self._cut_layer
        if part is None or not part.own.are_held():  # functional_call puts others in place
            return super().forward(*args, **kwargs)
        return part.run(self, super().forward, args, kwargs)

    def _get_name(self) -> str:
        return kind_before(self).__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, kind_before(self), SLOT)


def cut_class(kind: type[nn.Module]) -> Any:
    """Return the class of layers of a kind that are cut."""
    return class_served_by(_CutLayer, kind, f"Cut{kind.__name__}")


def error_of_rows(layer: nn.Module) -> float | None:
    """Return the relative error of a cut layer's rows as they crossed; None if all were exact."""
    part: LayerPart | None = layer.__dict__.get(SLOT)
    return None if part is None else part.crossing.error
