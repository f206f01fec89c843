"""Factor: send what the gradient is made of, (x, dy), and build dW = Σ dyᵀx on every rank.

For a layer of M inputs and N outputs seen by K rows a rank, each rank sends K·(M+N)·s·(P−1) bytes instead of
2·M·N·s·(P−1)/P: fewer iff K < 2MN / (P(M+N)). The price is that every rank multiplies all P·K rows. An embedding is
the same with row ids in place of x: K·(D·s+8)·(P−1).

    1  forward      the layer keeps x                         (FactorLinear, FactorEmbedding: the layer's new class)
    2  backward     dx as always; (x, dy) is kept for the lane instead of multiplied
    3  on a lane    8 bytes tell each peer the number of rows; x and dy of all ranks are gathered, in rank order
    4  on a lane    one product over all rows gives the global mean gradient, the same bits wherever the libraries agree
    5  backward ends  `.grad` is that buffer, or has it added

Reference: Xie et al., "Distributed Machine Learning via Sufficient Factor Broadcasting", 2015, section 3; Zhang et al.,
"Poseidon", USENIX ATC 2017, section 3.2 (choosing it by layer).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.contracts import Comm, Exchange, Place, Strategy, Transfer
from shoal.core.cost import Cost, Traffic
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, LayerProfile
from shoal.strategies.copies import plain

_HEADER_BYTES = 8  # the number of rows, to every peer
_ID_BYTES = 8
_SLOT = "_factors"  # where a served layer keeps its transfer


@final
class Factor(Strategy):
    """Gathers the factors of a linear layer's or an embedding's weight gradient and multiplies them on every rank."""

    name = "factor"

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        if layer.kind not in ("Linear", "Embedding"):
            return f"it serves nn.Linear and nn.Embedding, and this is a {layer.kind}"
        if layer.outside_use:
            return layer.outside_use
        if not any(p.name.rpartition(".")[2] == "weight" for p in layer.parameters):
            return "its weight is frozen"
        return None

    def estimate(self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster) -> Cost:
        (layer,) = layers
        ranks, topology = cluster.size, cluster.topology
        message_bytes = layer.rows * self._row_bytes(layer) + _HEADER_BYTES
        sent = message_bytes * (ranks - 1)
        leaving = tuple(message_bytes * (ranks - len(topology.ranks_on[host])) for host in topology.hosts)
        itemsize = layer.parameters[0].itemsize
        return Cost(
            Traffic((sent,) * ranks, (sent,) * ranks, rounds=2, leaving=leaving),
            cluster.pace("direct"),  # its gathers are `direct`'s second half
            backward_s=-min(layer.own_product_s, layer.backward_s),
            lane_s=layer.product_s(layer.rows * ranks),
            memory_bytes=layer.nbytes + ranks * layer.rows * (layer.inputs + layer.outputs) * itemsize,
        )

    def flips_at(self, layer: LayerProfile, ranks: int) -> float | None:
        return 2 * layer.nbytes / (ranks * self._row_bytes(layer))

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        ((_, module),) = place.layers.items()
        if type(module) is nn.Linear:
            module.__class__ = FactorLinear
            product: _Product = _LinearProduct(module)
        elif type(module) is nn.Embedding:
            module.__class__ = FactorEmbedding
            product = _EmbeddingProduct(module)
        else:
            raise TypeError(f"{label}: not a plain nn.Linear or nn.Embedding, but {type(module)}")
        transfer = FactorTransfer(product, place, label)
        module.__dict__[_SLOT] = transfer
        return [transfer]

    @staticmethod
    def _row_bytes(layer: LayerProfile) -> int:
        itemsize = layer.parameters[0].itemsize
        if layer.kind == "Embedding":
            return layer.outputs * itemsize + _ID_BYTES
        return (layer.inputs + layer.outputs) * itemsize


class _Product(ABC):
    """How a layer's gradients follow from its factors: `left` rows (x, or ids) and `right` rows (dy)."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    left_width: int
    left_dtype: torch.dtype
    right_width: int

    @abstractmethod
    def into(self, out: Tensor, left: Tensor, right: Tensor, accumulate: bool) -> None:
        """Write, or add, the weight's gradient."""


@final
class _LinearProduct(_Product):
    def __init__(self, module: nn.Linear) -> None:
        assert isinstance(module.weight, nn.Parameter)
        self.weight, self.bias = module.weight, module.bias
        self.left_width, self.right_width = module.in_features, module.out_features
        self.left_dtype = module.weight.dtype

    def into(self, out: Tensor, left: Tensor, right: Tensor, accumulate: bool) -> None:
        torch.addmm(out, right.t(), left, beta=1 if accumulate else 0, out=out)


@final
class _EmbeddingProduct(_Product):
    def __init__(self, module: nn.Embedding) -> None:
        assert isinstance(module.weight, nn.Parameter)
        self.weight, self.bias = module.weight, None
        self.left_width, self.right_width = 1, module.embedding_dim
        self.left_dtype = torch.int64
        self._padding = module.padding_idx

    def into(self, out: Tensor, left: Tensor, right: Tensor, accumulate: bool) -> None:
        ids = left.view(-1)
        if self._padding is not None:
            right = right.masked_fill((ids == self._padding).unsqueeze(1), 0.0)
        if not accumulate:
            out.zero_()
        out.index_add_(0, ids, right)


@final
class FactorTransfer(Transfer):
    """The factors of one layer in one backward, kept as they come; a layer used twice has two pairs."""

    def __init__(self, product: _Product, place: Place, label: str) -> None:
        self.label = label
        self._product = product
        self._ranks = place.ranks
        self._targets = [p for p in (product.weight, product.bias) if p is not None and p.requires_grad]
        self._training = self._targets  # those that were not frozen since
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self._calls: WeakSet[Any] = WeakSet()  # autograd's nodes of the layer's calls, as long as there is a graph
        self._expected: int | None = None  # pairs that the running backward will bring
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._marks: dict[nn.Parameter, Tensor | None] = {}  # gradients put there to be seen
        self._packed: tuple[Tensor, Tensor] | None = None
        self._accumulate: dict[nn.Parameter, bool] = {}
        self._rows = 0  # of all ranks together
        for target in self._targets:
            target.register_hook(self._refuse_gradient_from_elsewhere)
        self._accumulators = [_accumulator(target) for target in self._targets]

    def serves(self, module: nn.Linear | nn.Embedding) -> bool:
        """Whether this call of the layer is one of its own weight, and in training (not under functional_call …)."""
        trains = any(target.requires_grad for target in self._targets)
        return trains and torch.is_grad_enabled() and module.weight is self._product.weight

    def called(self, output: Tensor) -> Tensor:
        """Note a call of the layer."""
        self._calls.add(output.grad_fn)
        return output

    def add(self, call: Any, left: Tensor, right: Tensor) -> None:
        """Keep one pair of factors, of the call whose node runs; with the last of this backward, be ready."""
        runs = torch._C._will_engine_execute_node
        if not any(runs(node) for node in self._accumulators):  # a gradient with respect to inputs only
            return
        if self._packed is not None:
            raise UsageError(
                "the layer's backward ran again after its factors were sent",
                where=self.label,
                do='use torch.utils.checkpoint with use_reentrant=False, or pin the layer to "replicate"',
            )
        if self._expected is None or self.accumulating:
            self._forget_if_cleared()
            self._expected = len(self._pairs) + sum(node is call or runs(node) for node in self._calls)
        left, right = left.detach(), right.detach()
        self._pairs.append((left.reshape(-1, self._product.left_width), right.reshape(-1, self._product.right_width)))
        if self.accumulating:
            self._expected = None
            self._mark()
        if self.accumulating or len(self._pairs) == self._expected:
            self.ready(self)

    def _mark(self) -> None:
        """Let `.grad` show that something was kept: clearing it must drop that. What is put there takes no memory."""
        for target in self._targets:
            if target.grad is None:
                target.grad = torch.zeros((), dtype=target.dtype, device=target.device).expand_as(target)
                self._marks[target] = target.grad
            else:
                self._marks.setdefault(target, None)

    def _forget_if_cleared(self) -> None:
        """Drop the pairs that were kept, where `.grad` was cleared since; and what marked them."""
        if any(target.grad is None for target in self._marks):
            self._pairs.clear()
        for target, mark in self._marks.items():
            if mark is not None and target.grad is mark:
                target.grad = None
        self._marks.clear()

    def _refuse_gradient_from_elsewhere(self, grad: Tensor | None) -> None:
        if grad is None:  # the layer's own function gives none
            return
        raise UsageError(
            "the layer's weight got a gradient from outside the layer, which its factors do not hold",
            where=self.label,
            do='pin the layer to "replicate", or use the weight only by calling its layer',
        )

    def pack(self) -> None:
        self._forget_if_cleared()  # where this backward did not come here
        product = self._product
        if self._pairs:
            left = torch.cat([pair[0] for pair in self._pairs]) if len(self._pairs) > 1 else self._pairs[0][0]
            right = torch.cat([pair[1] for pair in self._pairs]) if len(self._pairs) > 1 else self._pairs[0][1]
        else:
            left = torch.empty(0, product.left_width, device=product.weight.device)
            right = torch.empty(0, product.right_width, device=product.weight.device)
        mean = right.to(product.weight.dtype) / self._ranks
        self._packed = left.to(product.left_dtype).contiguous(), mean
        self._pairs.clear()
        self._training = [target for target in self._targets if target.requires_grad]
        for target in self._training:
            if len(target._backward_hooks or ()) > 1 or target._post_accumulate_grad_hooks:
                raise UsageError(
                    "a gradient hook was put on the layer after parallelize: factor makes its gradient elsewhere",
                    where=self.label,
                    do='pin the layer to "replicate", or look at .grad after backward',
                )
        for target in self._training:
            self._accumulate[target] = target.grad is not None and target.grad is self._buffers.get(target)

    def run(self, comm: Comm) -> None:
        assert self._packed is not None
        left, right = self._packed
        all_left, all_right = _gathered(comm, left, right)
        self._rows = len(all_left)
        if not self._rows:
            return
        for target in self._training:
            buffer, add = self._buffer(target), self._accumulate[target]
            if target is self._product.weight:
                self._product.into(buffer, all_left, all_right, add)
            else:
                torch.add(buffer if add else torch.zeros_like(buffer), all_right.sum(0), out=buffer)

    def _buffer(self, target: nn.Parameter) -> Tensor:
        if target not in self._buffers:
            self._buffers[target] = torch.empty_like(target, memory_format=torch.contiguous_format)
        return self._buffers[target]

    def publish(self) -> None:
        if self._rows:
            for target in self._training:
                if target.grad is None or self._accumulate[target]:
                    target.grad = self._buffers[target]
                else:
                    target.grad.add_(self._buffers[target])
        self._packed = None
        self._expected, self._rows = None, 0

    def kept(self) -> Sequence[Tensor]:
        return list(self._buffers.values())


def _gathered(comm: Comm, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """All ranks' rows, in rank order. Everything is sent at once; a peer receives when it knows how much there is."""
    peers = [r for r in range(comm.size) if r != comm.rank]
    count = torch.tensor([len(left)], device=left.device)
    counts = [count if r == comm.rank else torch.empty_like(count) for r in range(comm.size)]
    pending = [comm.receive(counts[r], r) for r in peers]
    sends = [comm.send(each, r) for each in (count, left, right)[: 3 if len(left) else 1] for r in peers]
    for each in pending:
        each.wait()
    rows = [int(each) for each in counts]
    all_left, all_right = left.new_empty(sum(rows), left.shape[1]), right.new_empty(sum(rows), right.shape[1])
    lefts, rights = all_left.split(rows), all_right.split(rows)
    pending = [comm.receive(parts[r], r) for parts in (lefts, rights) for r in peers if rows[r]]
    lefts[comm.rank].copy_(left)
    rights[comm.rank].copy_(right)
    for each in (*pending, *sends):
        each.wait()
    return all_left, all_right


def _accumulator(parameter: Tensor) -> Any:
    function = parameter.view_as(parameter).grad_fn
    assert function is not None
    return function.next_functions[0][0]


class _LinearFunction(torch.autograd.Function):
    """F.linear whose weight gradient is left to a transfer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transfer: FactorTransfer) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transfer = transfer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.transfer.add(ctx, x, grad)
        dx = (grad @ weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


class _EmbeddingFunction(torch.autograd.Function):
    """F.embedding whose weight gradient is left to a transfer."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, transfer: FactorTransfer) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.transfer = transfer
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.transfer.add(ctx, ids, grad)
        return None, None, None


class FactorLinear(nn.Linear):
    """An nn.Linear served by `factor`. Same parameters, names and repr; a copy of it is an ordinary linear layer."""

    _factors: FactorTransfer | None = None

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        transfer = self._factors
        if transfer is None or not transfer.serves(self):
            return super().forward(input)
        return transfer.called(_LinearFunction.apply(input, self.weight, self.bias, transfer))  # type: ignore[no-untyped-call]

    def _get_name(self) -> str:
        return "Linear"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, nn.Linear, _SLOT)


class FactorEmbedding(nn.Embedding):
    """An nn.Embedding served by `factor`. Same parameters, names and repr; a copy of it is an ordinary embedding."""

    _factors: FactorTransfer | None = None

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        transfer = self._factors
        if transfer is None or not transfer.serves(self):
            return super().forward(input)
        return transfer.called(_EmbeddingFunction.apply(input, self.weight, transfer))  # type: ignore[no-untyped-call]

    def _get_name(self) -> str:
        return "Embedding"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, nn.Embedding, _SLOT)
