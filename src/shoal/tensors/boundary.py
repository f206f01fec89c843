"""Moves of rows between ranks, in forward and back again: autograd operators with a transpose.

A layer that is cut over P ranks sees the rows of all of them. Rank r brings K_r rows of width W:

    gathered    (K_r, W) on r      ->  (ΣK, W) on every rank          back: the rows' owners add up
    summed      (ΣK, W) on all     ->  (K_r, W), added up, on r       back: gathered
    to_columns  (K_r, W) on r      ->  (ΣK, W_r): its columns         back: to_rows
    to_rows     (ΣK, W_r) on r     ->  (K_r, W)                       back: to_columns
    dealt       some rows to each  ->  some rows from each            back: dealt back

`scale` multiplies the gradients that go back. A parameter's gradient is a mean over ranks. So a cut
layer divides gradients by P as they enter it, and multiplies by P as they leave, which spares a
pass over its weights. If ranks have unlike numbers of rows, each rank weighs its own gradients as
they come in, and divides by the weight as they leave (contracts/row_weights.py). A move costs at
most one message to and from every peer for each chunk, and telling the counts of rows
(`rows_of_all`) 80 bytes each.

A move into a linear layer is one operator with its product (`linear`), so that each hides under the
other:

    forward    |▒ chunk 1 ▒|▒ chunk 2 ▒|                 all chunks are sent at once, and come
               ┄┄┄┄┄┄┄┄┄┄┄┄|─ x₁·Wᵀ ─|─ x₂·Wᵀ ─|         one after the other
    backward   |─ dy₁·W ─|─ dy₂·W ─|──── dyᵀ·x ────|     the weight's gradient is last:
                         |▒ chunk 1 ▒|▒ chunk 2 ▒|       no other rank waits for it

Reference: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models", ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import UNWEIGHED, Weighing
from shoal.core.errors import UsageError
from shoal.core.names import pins
from shoal.core.pieces import cut_sizes
from shoal.tensors.row_crossing import EXACT, RowCrossing

_Coming = Callable[[], Tensor]  # waits until the move has come
_Way = Callable[[Tensor], _Coming]


@dataclass(frozen=True)
class Move:
    """A move and its transpose; both are started by one call, and waited for by another.

    `leaves` says that the result is this rank's own rows. Otherwise its input is.
    """

    there: _Way
    way_back: _Way
    scale: float
    comm: Comm
    purpose: str  # the larger operation, for messages
    leaves: bool = False
    weighs: Weighing = UNWEIGHED
    layer: str = ""
    factor: float = 1.0  # multiplies the values that are moved there

    def back(self, grad: Tensor) -> _Coming:
        """Start moving a gradient back, multiplied by its weight if it belongs to own rows."""
        weight = self.weighs() if self.leaves else None
        self.comm.journal.begins(f"backward, {self.purpose}")
        return self.way_back(grad if weight is None else grad * weight)

    def come_back(self, back: Tensor) -> Tensor:
        """Scale a gradient that has come back, in place, and divide own rows by their weight."""
        weight = None if self.leaves else self.weighs()
        scale = self.factor * self.scale
        scale = scale / weight if weight else scale  # the gradient is 0 at weight 0
        return back if scale == 1.0 else back.mul_(scale)

    def turned(self) -> Move:
        """Return the running backward of this move, as a move.

        It is linear, so it has a backward of its own, which second derivatives need.
        """
        weight, purpose = self.weighs(), f"backward, {self.purpose}"
        if weight is None or (weight == 0 and not self.leaves):
            weight = 1.0
        self.comm.journal.begins(purpose)
        return replace(
            self,
            there=self.way_back,
            way_back=self.there,
            scale=1 / self.scale,
            purpose=purpose,
            leaves=not self.leaves,
            factor=self.factor * self.scale * (weight if self.leaves else 1 / weight),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the tensor after the move."""
        moved: Tensor = _Boundary.apply(x, self)  # type: ignore[no-untyped-call]
        return moved


@dataclass(frozen=True)
class CallRows:
    """The rows of every rank in one call of a layer."""

    comm: Comm
    counts: tuple[int, ...]
    purpose: str = "rows of a layer"  # the call, for messages
    weighs: Weighing = UNWEIGHED
    layer: str = ""
    crossing: RowCrossing = EXACT

    def gathered(self, scale: float) -> Move:
        """Return the move that brings every rank's rows, in rank order, to every rank."""
        return self._move(self._gather, self._sum, scale, leaves=False)

    def summed(self, x: Tensor, scale: float) -> Tensor:
        """Return this rank's rows of the sum over ranks, added up in rank order."""
        return self._move(self._sum, self._gather, scale, leaves=True)(x)

    def to_columns(self, widths: Sequence[int], scale: float) -> Move:
        """Return the move that brings this rank's columns of all ranks' rows to it."""
        return self._move(
            lambda t: self._to_columns(t, widths),
            lambda t: self._to_rows(t, widths),
            scale,
            leaves=False,
        )

    def to_rows(self, x: Tensor, widths: Sequence[int], scale: float) -> Tensor:
        """Return this rank's rows with all columns."""
        return self._move(
            lambda t: self._to_rows(t, widths),
            lambda t: self._to_columns(t, widths),
            scale,
            leaves=True,
        )(x)

    def _move(self, there: _Way, way_back: _Way, scale: float, *, leaves: bool) -> Move:
        return Move(
            there, way_back, scale, self.comm, self.purpose, leaves, self.weighs, self.layer
        )

    def chunks(self, number: int) -> list[CallRows]:
        """Divide the rows into so many parts with rows of every rank; fewer if a rank has fewer."""
        cuts = [cut_sizes(count, max(1, min(number, *self.counts))) for count in self.counts]
        return [replace(self, counts=part) for part in zip(*cuts, strict=True)]

    @property
    def mine(self) -> int:
        """Number of this rank's rows."""
        return self.counts[self.comm.rank]

    def _start(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor]) -> Callable[[], None]:
        return self.crossing.start_all_to_all(self.comm, incoming, outgoing)

    def _gather(self, x: Tensor) -> _Coming:
        everyone = x.new_empty(sum(self.counts), x.shape[1])
        finish = self._start(everyone.split(self.counts), [x.contiguous()] * self.comm.size)
        return lambda: _come(finish, everyone)

    def _sum(self, x: Tensor) -> _Coming:
        parts = x.new_empty(self.comm.size, self.mine, x.shape[1])
        finish = self._start(parts.unbind(), x.contiguous().split(self.counts))
        return lambda: _come(finish, parts).sum(0)

    def _to_columns(self, x: Tensor, widths: Sequence[int]) -> _Coming:
        everyone = x.new_empty(sum(self.counts), widths[self.comm.rank])
        columns = [part.contiguous() for part in x.split(list(widths), 1)]
        finish = self._start(everyone.split(self.counts), columns)
        return lambda: _come(finish, everyone)

    def _to_rows(self, x: Tensor, widths: Sequence[int]) -> _Coming:
        parts = [x.new_empty(self.mine, width) for width in widths]
        finish = self._start(parts, x.contiguous().split(self.counts))
        return lambda: torch.cat(_come(finish, parts), 1)


T = TypeVar("T")


def _come(finish: Callable[[], None], received: T) -> T:
    finish()
    return received


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Sequence[CallRows],
    enter: Callable[[CallRows], Move],
) -> Tensor:
    """Return `F.linear` of x after a move, chunk by chunk.

    Args:
        x: (K, W) rows of this rank.
        weight: (N, M), where M is the length of a moved row.
        bias: (N,), or None.
        rows: the chunks.
        enter: makes the move of a chunk.

    Returns:
        (ΣK, N), in rank order.
    """
    product: Tensor = _Linear.apply(x, weight, bias, rows, enter)  # type: ignore[no-untyped-call]
    return product


def rows_of_all(
    comm: Comm,
    rows: int,
    purpose: str,
    layer: str = "",
    weighs: Weighing = UNWEIGHED,
    crossing: RowCrossing = EXACT,
) -> CallRows:
    """Tell every rank the number of this rank's rows and their purpose.

    Raises:
        RanksDiffer: another rank has another purpose.
    """
    counts = tuple(comm.numbers([rows] * comm.size, purpose))
    return CallRows(comm, counts, purpose, weighs, layer, crossing)


def call_of(layer: str) -> str:
    """Return the name of a layer's call in messages.

    It tells evaluation from training, because a rank that evaluates alone must not meet others
    that train.
    """
    mode = "training" if torch.is_grad_enabled() else "evaluation (no_grad)"
    return f"{mode}, call of layer {layer}"


def refuse_second_derivative(layer: str) -> None:
    """Raise UsageError in a backward that keeps a graph to be differentiated again."""
    if torch.is_grad_enabled():
        raise UsageError(
            f"layer {layer} is not whole on this rank, and cannot be differentiated twice "
            "(create_graph=True)",
            where=f"layer {layer}",
            do=f"give parallelize {pins([layer])}",
        )


def shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor in another shape, not as a view. No other code may hold the tensor.

    A view would lose its hooks if it was changed in place.
    """
    return x if x.shape == torch.Size(shape) else torch.ops.aten._unsafe_view(x, list(shape))


def dealt(
    x: Tensor,
    comm: Comm,
    sent: Sequence[int],
    received: Sequence[int],
    scale: float = 1.0,
    weighs: Weighing = UNWEIGHED,
    layer: str = "",
) -> Tensor:
    """Send `sent[r]` rows to each rank r, one after the other, and join the rows that come.

    Backward sends gradients back. The result is this rank's own rows.
    """

    def deal(rows: Tensor, out: Sequence[int], come: Sequence[int]) -> _Coming:
        incoming = rows.new_empty(sum(come), *rows.shape[1:])
        parts = rows.contiguous().split(list(out))
        finish = comm.start_all_to_all(incoming.split(list(come)), parts)
        return lambda: _come(finish, incoming)

    return Move(
        lambda rows: deal(rows, sent, received),
        lambda rows: deal(rows, received, sent),
        scale,
        comm,
        "rows of an embedding",
        leaves=True,
        weighs=weighs,
        layer=layer,
    )(x)


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move) -> Tensor:
        ctx.move = move
        moved = move.there(x)()
        return moved if move.factor == 1.0 else moved * move.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            return ctx.move.turned()(grad), None
        return ctx.move.come_back(ctx.move.back(grad)()), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Sequence[CallRows],
        enter: Callable[[CallRows], Move],
    ) -> Tensor:
        ctx.moves, ctx.sizes = (
            [enter(chunk) for chunk in rows],
            [sum(chunk.counts) for chunk in rows],
        )
        ctx.order = _in_rank_order(rows).to(x.device) if len(rows) > 1 else None
        parts = x.split([chunk.mine for chunk in rows])
        coming = [move.there(part) for move, part in zip(ctx.moves, parts, strict=True)]
        inside, products = [], []
        try:
            whole, added = _cast(weight), None if bias is None else _cast(bias)
            while coming:
                inside.append(_cast(coming.pop(0)()))
                products.append(F.linear(inside[-1], whole, added))
        finally:
            for come in coming:  # also after an error: other operations still use the channel
                come()
        x_needed, weight_needed = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            _join(inside) if weight_needed else None, weight if x_needed else None
        )
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        product = _join(products)
        return (
            product
            if ctx.order is None
            else torch.empty_like(product).index_copy_(0, ctx.order, product)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inside, weight = ctx.saved_tensors  # a checkpointed forward runs again here
        grad = grad if ctx.order is None else grad[ctx.order]
        with torch._C.DisableTorchFunctionSubclass():  # use this rank's part of the weight
            if torch.is_grad_enabled():
                return _gradient_of_rows(ctx, grad, weight), None, None, None, None
            return *_gradients(ctx, grad, inside, weight), None, None


def _gradient_of_rows(ctx: Any, grad: Tensor, weight: Tensor | None) -> Tensor | None:
    """Return x's gradient with a graph. Parameters' gradients have no history."""
    if weight is None:
        return None
    whole = weight.to(grad.dtype).conj()
    parts = [
        move.turned()((part @ whole).to(ctx.x_dtype))
        for move, part in zip(ctx.moves, grad.split(ctx.sizes), strict=True)
    ]
    return _join(parts)


def _gradients(
    ctx: Any, grad: Tensor, inside: Tensor | None, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias; x's travels while the others are computed."""
    dx = dweight = dbias = None
    coming = []
    if weight is not None:
        whole = weight.to(grad.dtype).conj()
        for move, part in zip(ctx.moves, grad.split(ctx.sizes), strict=True):
            coming.append(move.back((part @ whole).to(ctx.x_dtype)))
    try:
        if inside is not None:
            dweight = _weight_gradient(grad, inside, ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            dbias = grad.sum(0, dtype=ctx.weight_dtype)
    finally:
        back = [come() for come in coming]
    if back:
        dx = ctx.moves[0].come_back(_join(back))
    return dx, dweight, dbias


def _weight_gradient(grad: Tensor, inside: Tensor, dtype: torch.dtype) -> Tensor:
    return (grad.t() @ inside.to(grad.dtype).conj()).to(dtype)


def _cast(x: Tensor) -> Tensor:
    """Cast a tensor as autocast does, but without its cache.

    The tensor has no history here. A cached cast without history would be used later, where one
    with a history is needed.
    """
    kind = x.device.type
    if x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _in_rank_order(chunks: Sequence[CallRows]) -> Tensor:
    """Return the places of the chunks' rows, one chunk after the other, among all ranks' rows."""
    # row counts of each rank's chunks
    counts = list(zip(*(chunk.counts for chunk in chunks), strict=True))
    every = torch.arange(sum(map(sum, counts)), device="cpu").split(list(map(sum, counts)))
    parts = zip(
        *(rows.split(list(own)) for rows, own in zip(every, counts, strict=True)), strict=True
    )
    return torch.cat([part for chunk in parts for part in chunk])


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
