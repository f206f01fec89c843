"""Factor: send the two factors of a gradient, (x, dy), and build dW = Σ dyᵀx on every rank.

For a layer of M inputs and N outputs seen by K rows a rank, each rank sends K·(M+N)·s·(P−1) bytes
instead of 2·M·N·s·(P−1)/P: fewer iff K < 2MN / (P(M+N)). The price is that every rank multiplies
all P·K rows. An embedding is the same with row ids in place of x: K·(D·s+8)·(P−1).

    1  forward      the layer keeps x                         (FactorLinear, FactorEmbedding: the
                                                              layer's new class)
    2  backward     dx as always; (x, dy) is kept for the lane instead of multiplied
    3  on a lane    24 bytes tell each peer how many rows follow; x and dy of all ranks are
                    gathered, in rank order
    4  on a lane    one product over all rows gives the global mean gradient, the same bits if the
                    ranks' libraries agree
    5  backward ends  `.grad` becomes that buffer, or the buffer is added to it

Gradients from other uses of the weight, as in a penalty, are summed like a bucket
(outside_gradients.py), in the steps in which any rank has one. So are gradients that an
autograd.Function asks for by torch.autograd.grad in its own backward, as an adjoint does.

Reference: Xie et al., "Distributed Machine Learning via Sufficient Factor Broadcasting", 2015,
section 3; Zhang et al., "Poseidon", USENIX ATC 2017, section 3.2 (choosing it by layer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Transfer
from shoal.core.cost import Cost, Phase, Traffic
from shoal.core.eager_methods import eager
from shoal.core.facts import Cluster, LayerProfile
from shoal.core.role import Role
from shoal.exchange.direct import Direct
from shoal.profiling.products import ProductFacts, ProductProbe
from shoal.profiling.weight_use import UNUSED, WeightProbe, WeightUse, why_no_product
from shoal.strategies.copies import class_served_by, kind_before, plain
from shoal.strategies.factors import EmbeddingProduct, FactorProduct, FactorTransfer, LinearProduct
from shoal.tensors.weight_products import Product, Products

_HEADER_BYTES = 24  # a message to each peer: rows, share, mark with a flag
_ID_BYTES = 8
_SLOT = "_factors"  # attribute of a served layer: its transfer


@final
class Factor(Strategy):
    """Gathers the factors of a weight gradient and multiplies them on every rank.

    It serves embeddings, linear layers, and others that multiply their input with their weight.
    """

    name = "factor"
    kinds = ("Linear", "Embedding")
    takes_alike = True
    role = Role.LAYER
    probes = (ProductProbe, WeightProbe)

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        if layer.outside_use:
            return layer.outside_use
        if layer.kind not in self.kinds and (reason := why_no_product(layer)):
            return reason
        weight = layer.measured(WeightUse).weight
        if not any(p.name.rpartition(".")[2] == weight for p in layer.parameters):
            return "its weight is frozen"
        if any(p.again for p in layer.parameters):
            return "its gradient comes in several parts of one backward (re-entrant checkpointing)"
        return None

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        (layer,) = layers
        product = layer.measured(ProductFacts)
        ranks, topology = cluster.size, cluster.topology
        message_bytes = layer.rows * self._row_bytes(layer) + _HEADER_BYTES
        sent = message_bytes * (ranks - 1)
        leaving = tuple(
            message_bytes * (ranks - len(topology.ranks_on[host])) for host in topology.hosts
        )
        itemsize = layer.parameters[0].itemsize
        return Cost(
            in_backward=Phase(
                Traffic((sent,) * ranks, (sent,) * ranks, rounds=2, leaving=leaving),
                cluster.pace(str(Direct())),  # its gathers are that exchange's second half
                after_s=product.seconds(layer.rows * ranks),
            ),
            backward_s=-min(product.own_s, layer.backward_s),
            memory_bytes=layer.nbytes
            + ranks * layer.rows * (layer.inputs + layer.outputs) * itemsize,
        )

    def flips_at(self, layer: LayerProfile, ranks: int) -> float | None:
        return 2 * layer.nbytes / (ranks * self._row_bytes(layer))

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        ((name, module),) = place.layers.items()
        profile = place.profiles.get(name)
        use = UNUSED if profile is None else profile.measured(WeightUse)
        if type(module) is nn.Embedding:
            module.__class__ = FactorEmbedding
            product: FactorProduct = EmbeddingProduct(module)
        elif type(module) is nn.Linear:
            module.__class__ = FactorLinear
            product = LinearProduct(module, UNUSED)
        elif use.served:
            kind = type(module)
            module.__class__ = class_served_by(_FactorLayer, kind, f"Factor{kind.__name__}")
            product = LinearProduct(module, use)
        else:
            raise TypeError(f"{label}: no product of its input and its weight, but {type(module)}")
        transfer = FactorTransfer(product, place, label)
        module.__dict__[_SLOT] = transfer
        return [transfer]

    def release(self, place: Place, transfers: Sequence[Transfer]) -> None:
        super().release(place, transfers)
        (module,) = place.layers.values()
        del module.__dict__[_SLOT]
        module.__class__ = kind_before(module)

    @staticmethod
    def _row_bytes(layer: LayerProfile) -> int:
        itemsize = layer.parameters[0].itemsize
        if layer.kind == "Embedding":
            return layer.outputs * itemsize + _ID_BYTES
        return (layer.inputs + layer.outputs) * itemsize


class _LinearFunction(torch.autograd.Function):
    """F.linear that leaves its weight's gradient to a transfer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transfer: FactorTransfer
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transfer = transfer
        return F.linear(x, transfer.product.matrix(weight), bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.transfer.add(x, grad)
        if not ctx.needs_input_grad[0]:
            return None, of_weight, of_bias, None
        matrix = ctx.transfer.product.matrix(weight).to(grad.dtype)
        return (grad @ matrix.conj()).to(x.dtype), of_weight, of_bias, None


class _EmbeddingFunction(torch.autograd.Function):
    """F.embedding that leaves its weight's gradient to a transfer."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, transfer: FactorTransfer) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.transfer = transfer
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        of_weight, _ = ctx.transfer.add(ids, grad)
        return None, of_weight, None


class FactorLinear(nn.Linear):
    """An nn.Linear served by `factor`, with the same parameters, names and repr.

    A copy of it is an ordinary linear layer.
    """

    _factors: FactorTransfer | None = None

    @eager
    def forward(self, input: Tensor) -> Tensor:
        transfer = self._factors
        if transfer is None or not transfer.serves(self):
            return super().forward(input)
        return transfer.called(_LinearFunction.apply(input, self.weight, self.bias, transfer))  # type: ignore[no-untyped-call]

    def _get_name(self) -> str:
        return "Linear"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, nn.Linear, _SLOT)


class _FactorProducts(Products):
    """Leaves the weight's gradient of each product in one call of a layer to a transfer."""

    def __init__(self, transfer: FactorTransfer, product: LinearProduct) -> None:
        use = product.use
        super().__init__(product.weight, product.bias, use.turned, use.adds_late)
        self._transfer = transfer

    def multiply(self, product: Product, plain: Callable[[], Any]) -> Any:
        out = _LinearFunction.apply(product.x, self.weight, self.bias, self._transfer)  # type: ignore[no-untyped-call]
        return self._transfer.called(out)


class _FactorLayer(nn.Module):
    """A layer of any class that is served by `factor`, with the same parameters, names and repr.

    A copy of it is an ordinary layer.
    """

    _factors: FactorTransfer | None = None

    @eager
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        transfer = self._factors
        if transfer is None or not transfer.serves(self):
            return super().forward(*args, **kwargs)
        assert isinstance(transfer.product, LinearProduct)
        return _FactorProducts(transfer, transfer.product).run(super().forward, args, kwargs)

    def _get_name(self) -> str:
        return kind_before(self).__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, kind_before(self), _SLOT)


class FactorEmbedding(nn.Embedding):
    """An nn.Embedding served by `factor`, with the same parameters, names and repr.

    A copy of it is an ordinary embedding.
    """

    _factors: FactorTransfer | None = None

    @eager
    def forward(self, input: Tensor) -> Tensor:
        transfer = self._factors
        if transfer is None or not transfer.serves(self):
            return super().forward(input)
        return transfer.called(_EmbeddingFunction.apply(input, self.weight, transfer))  # type: ignore[no-untyped-call]

    def _get_name(self) -> str:
        return "Embedding"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, nn.Embedding, _SLOT)
