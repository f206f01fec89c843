"""Embedding: each rank has V/P rows of a table, and sends the other ranks the rows they ask for.

    forward     1  80 bytes tell each peer how many of its rows are wanted; each id once: 8 bytes to
                   the row's rank
                2  the rows come back, D·s bytes each, and are spread over the ids
    backward    3  each row's gradients are added up and go to its rank, D·s bytes; they become the
                   dense gradient of its part

An nn.EmbeddingBag makes its bags of the rows that have come. For a table with `sparse=True` the
gradient of the part is a sparse tensor.

With U different ids a rank sends about U·(8 + 2·D·s)·(P−1)/P, a function of the ids, instead of
2·V·D·s·(P−1)/P. Table, gradient, update and optimizer state are divided by P. The gradient is
dense, as in one process, because momentum also moves rows that no rank looked up. It lies in a
buffer of its own, and a step writes only the rows that it touches. Main threads wait for these
messages: they hide under nothing.

Reference: Naumov et al., "Deep Learning Recommendation Model", 2019, section 4 (tables over ranks,
all-to-all).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Exchange
from shoal.contracts.probe import Layer, Probe, Trial
from shoal.contracts.row_weights import Weighing
from shoal.contracts.sample import tensors_in
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Transfer
from shoal.core.cost import Cost, Phase, Update, Wait, total
from shoal.core.eager_methods import eager
from shoal.core.facts import Cluster, Facts, LayerProfile
from shoal.core.pieces import cut_sizes, local_gradient, set_local_gradient
from shoal.core.role import Role
from shoal.core.rows import in_rows
from shoal.profiling.products import ProductFacts, ProductProbe
from shoal.profiling.sparse import SparseFacts, SparseProbe
from shoal.profiling.updates import UpdateProbe
from shoal.strategies.copies import plain
from shoal.strategies.cut_layers import counts, move, uncut
from shoal.tensors.boundary import call_of, dealt, refuse_second_derivative
from shoal.tensors.cut import cut, cut_of, part_of, restore
from shoal.tensors.sharded_parameter import OverRanks
from shoal.tensors.whole_module_calls import holding_wholes, tell_numbers

_LOOKED_AT = 64  # number of a gradient's rows that `is_written` looks at
_ID_BYTES = 8
_SLOT = "_cut_embedding"  # attribute of a served layer: the table that runs it


@dataclass(frozen=True)
class IdFacts(Facts):
    """Number of ids that an embedding looks up."""

    distinct: int = 0  # different ids, counted for each call


@final
class IdProbe(Probe):
    """Counts the different ids that embeddings look up."""

    def __init__(self) -> None:
        self._distinct: Counter[str] = Counter()

    def called(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        if type(layer.module) in _CUT_CLASSES:
            ids = next(tensors_in((args, kwargs.get("input"))))
            self._distinct[layer.name] += len(ids.unique())

    def measure(self, layer: Layer, trial: Trial) -> IdFacts:
        return IdFacts(self._distinct[layer.name])


@final
class EmbeddingRows(Strategy):
    """Cuts an nn.Embedding or nn.EmbeddingBag by its rows."""

    name = "embedding"
    kinds = ("Embedding", "EmbeddingBag")
    role = Role.CUT
    takes_sparse = True
    probes = (ProductProbe, IdProbe, UpdateProbe, SparseProbe)

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        return uncut(layer, layer.inputs, "rows", cluster)

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        (layer,) = layers
        product = layer.measured(ProductFacts)
        sizes, topology = cut_sizes(layer.inputs, cluster.size), cluster.topology
        row_bytes = layer.outputs * layer.parameters[0].itemsize
        # ids are assumed to be spread evenly over the table
        of_rank = [layer.measured(IdFacts).distinct * size / layer.inputs for size in sizes]
        ids = move(topology, lambda source, to: of_rank[to] * _ID_BYTES)
        rows = move(topology, lambda source, to: of_rank[source] * row_bytes)
        slopes = move(topology, lambda source, to: of_rank[to] * row_bytes)
        forward = total([counts(layer, topology), ids, rows])
        part, pace = sizes[0] / layer.inputs, cluster.move_pace
        sparse = layer.measured(SparseFacts)  # rows to add up: as many as a rank has
        return Cost(
            in_forward=Phase(forward, pace, Wait.AT_ONCE),
            in_backward=Phase(slopes, pace, Wait.AT_ONCE),
            backward_s=product.s_per_row * layer.rows
            - min(product.own_s, layer.backward_s)
            + sparse.row_s * sparse.rows,
            memory_bytes=part * layer.nbytes,
            held=part,
            update=Update(main=part),
        )

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        ((name, module),) = place.layers.items()
        if not (type(module) is nn.Embedding or type(module) is nn.EmbeddingBag):
            kinds = "nn.Embedding or nn.EmbeddingBag"
            raise TypeError(f"{label}: not a plain {kinds}, but {type(module)}")
        assert place.comm is not None and isinstance(module.weight, nn.Parameter)
        sizes = cut_sizes(module.num_embeddings, place.ranks)
        over = OverRanks(f"{name}.weight", module.weight, 0, sizes, place.comm, place.weighs)
        over.takes_hooks = False  # the table brings gradients of rows, past autograd
        cut(module.weight, over)
        look_up_parts(name, module, place)
        return []

    def release(self, place: Place, transfers: Sequence[Transfer]) -> None:
        (module,) = place.layers.values()
        restore(run_by_itself(module))


def look_up_parts(
    name: str,
    module: nn.Embedding | nn.EmbeddingBag,
    place: Place,
    *,
    by_autograd: bool = False,
) -> None:
    """Look up a module's rows at the ranks that have them. The weight must be cut already.

    Args:
        name: the module's name.
        module: the table.
        place: the ranks.
        by_autograd: whether autograd brings the gradient, dense, because the weight has other uses.
    """
    assert place.comm is not None
    sizes = cut_sizes(module.num_embeddings, place.ranks)
    run_by(module, _CutTable(name, module, sizes, place.comm, place.weighs, by_autograd))


@final
class _CutTable:
    """A table cut over the ranks, for the embedding that looks up its rows."""

    def __init__(
        self,
        name: str,
        module: nn.Embedding | nn.EmbeddingBag,
        sizes: Sequence[int],
        comm: Comm,
        weighs: Weighing,
        by_autograd: bool,
    ) -> None:
        self.name, self._weighs, self._sparse = name, weighs, module.sparse
        self._by_autograd = by_autograd
        assert isinstance(module.weight, nn.Parameter)
        self.weight, self._comm, self._rows = module.weight, comm, sum(sizes)
        self._starts = list(accumulate(sizes, initial=0))
        padding, own_rows = module.padding_idx, range(*self._starts[comm.rank : comm.rank + 2])
        self._padding: int | None = None
        if padding is not None and padding in own_rows:
            self._padding = own_rows.index(padding)
        self._cut = cut_of(module.weight)  # has the buffer of the dense gradient
        self._touched: list[Tensor] = []  # rows of that buffer that are not zero
        self._version = 0  # the buffer's version after the last write here

    def look_up(self, ids: Tensor) -> Tensor | None:
        found = self.found(ids)
        return None if found is None else F.embedding(found[1], found[2])

    def alone(self, module: nn.Module) -> AbstractContextManager[None]:
        """Let the module hold the whole table in this context, on a rank that calls it alone."""
        return holding_wholes([module], self._comm)

    def found(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the different ids, the place of each id among them, and their rows.

        Return None if this rank is alone.
        """
        comm, starts = self._comm, self._starts
        # ascending, so ids of one rank stand together
        distinct, place = torch.unique(ids.long(), return_inverse=True)
        if len(distinct) and not 0 <= int(distinct[0]) <= int(distinct[-1]) < self._rows:
            raise IndexError(f"an id is not one of the table's {self._rows} rows")
        ends = torch.searchsorted(distinct, torch.tensor(starts, device=ids.device))
        wanted = ends.diff().tolist()
        theirs = tell_numbers(comm, wanted, call_of(self.name))
        if theirs is None:
            return None
        local = dealt(distinct, comm, wanted, theirs) - starts[comm.rank]
        with torch._C.DisableTorchFunctionSubclass():  # the part itself, not the whole table
            if self._by_autograd:
                found = F.embedding(local, self.weight, self._padding)
            else:
                found = _PartLookUp.apply(local, self.weight, self)  # type: ignore[no-untyped-call]
        rows = dealt(found, comm, theirs, wanted, 1 / comm.size, self._weighs, self.name)
        return distinct, place, rows

    def add(self, ids: Tensor, grad: Tensor) -> None:
        """Add gradients of some of this rank's rows to its gradient."""
        if self._sparse:
            self._add_rows(ids, grad)
        else:
            self._add_to_dense(ids, grad)

    def _add_rows(self, ids: Tensor, grad: Tensor) -> None:
        if self._padding is not None:
            others = ids != self._padding
            ids, grad = ids[others], grad[others]
        part = part_of(self.weight)
        rows = in_rows(ids, grad.to(part.dtype), part.shape)
        before = self._cut.settle(self.weight)
        # it is dense if an operation reads the whole table
        added = rows if before is None else before + rows
        set_local_gradient(
            self.weight, added if added.layout is torch.strided else added.coalesce()
        )

    def _add_to_dense(self, ids: Tensor, grad: Tensor) -> None:
        if self._padding is not None:
            grad = grad.masked_fill((ids == self._padding).unsqueeze(1), 0.0)
        target = local_gradient(self.weight)
        if target is None:
            target = self._empty_gradient()
            set_local_gradient(self.weight, target)
        as_left = target is self._cut.buffer and target._version == self._version
        target.index_add_(0, ids, grad.to(target.dtype))
        if as_left:
            self._touched.append(ids)
            self._version = target._version

    def _empty_gradient(self) -> Tensor:
        """Return a dense gradient of zeros: the last one, if free, with only its rows cleared."""
        buffer = self._cut.buffer
        if buffer is None:
            buffer = self._cut.buffer = torch.zeros_like(part_of(self.weight))
        elif buffer._version == self._version:
            for ids in self._touched:
                buffer.index_fill_(0, ids, 0.0)
            if is_written(buffer):
                buffer.zero_()
        else:  # user code has changed it
            buffer.zero_()
        self._touched.clear()
        self._version = buffer._version
        return buffer


def is_written(dense: Tensor) -> bool:
    """Return whether a gradient that should be zeros was written, as optimizers do through `.data`.

    A write through `.data` leaves no version, so this looks at some rows: such an optimizer writes
    over all of them.
    """
    return bool(dense[:: max(1, len(dense) // _LOOKED_AT)].any())


class _PartLookUp(torch.autograd.Function):
    """Looks up rows of this rank's part, and adds to one gradient that is kept: most of it is 0."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, part: Tensor, table: _CutTable) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table
        return F.embedding(ids, part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        refuse_second_derivative(ctx.table.name)
        ctx.table.add(*ctx.saved_tensors, grad)
        return None, None, None


class LookUpTable(Protocol):
    """A table with its rows on other ranks or on servers."""

    weight: nn.Parameter

    def look_up(self, ids: Tensor) -> Tensor | None:
        """Return the rows of ids of any shape, or None if this rank is alone."""


def run_by(module: nn.Embedding | nn.EmbeddingBag, table: LookUpTable) -> None:
    """Make the table look up all ids in later calls of the module."""
    module.__class__ = _CUT_CLASSES[type(module)]
    module.__dict__[_SLOT] = table


def run_by_itself(module: nn.Module) -> nn.Parameter:
    """Make the module torch's own again, and return its weight, which is still cut."""
    table: LookUpTable = module.__dict__.pop(_SLOT)
    module.__class__ = next(kind for kind, cut in _CUT_CLASSES.items() if type(module) is cut)
    return table.weight


class CutEmbedding(nn.Embedding):
    """An nn.Embedding with its rows elsewhere. Its parameters, names and repr are the same.

    A copy of it is an ordinary nn.Embedding.
    """

    _cut_embedding: LookUpTable | None = None

    @eager
    def forward(self, input: Tensor) -> Tensor:
        table = self._cut_embedding
        if table is None or self.weight is not table.weight:  # functional_call gives it others
            return super().forward(input)
        rows = table.look_up(input)
        if rows is None:
            assert isinstance(table, _CutTable)
            with table.alone(self):
                return super().forward(input)
        return rows

    def _get_name(self) -> str:
        return "Embedding"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, nn.Embedding, _SLOT)


class CutEmbeddingBag(nn.EmbeddingBag):
    """An nn.EmbeddingBag with its rows elsewhere. Its parameters, names and repr are the same.

    A copy of it is an ordinary nn.EmbeddingBag.
    """

    _cut_embedding: _CutTable | None = None

    @eager
    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        table = self._cut_embedding
        if table is None or self.weight is not table.weight:  # functional_call gives it others
            return super().forward(input, offsets, per_sample_weights)
        found_rows = table.found(input)
        if found_rows is None:
            with table.alone(self):
                return super().forward(input, offsets, per_sample_weights)
        ids, place, rows = found_rows
        if not len(rows):  # if there are any bags, they are empty
            rows = F.pad(rows, (0, 0, 0, 1))
        padding = None
        if self.padding_idx is not None:
            found = (ids == self.padding_idx).nonzero()
            padding = int(found[0]) if len(found) else None
        return F.embedding_bag(
            place,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def _get_name(self) -> str:
        return "EmbeddingBag"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, nn.EmbeddingBag, _SLOT)


_CUT_CLASSES: dict[type[nn.Module], Any] = {
    nn.Embedding: CutEmbedding,
    nn.EmbeddingBag: CutEmbeddingBag,
}
