"""Linear layers cut over the ranks: what `column`, `row`, pairs and `head` share.

    1  forward    80 bytes tell each peer the number of rows; rows (or columns of them) come from all ranks
    2             F.linear on this rank's part of the weight, for the rows of all ranks
    3             what came out goes to the ranks whose rows they are
    4  backward   the same way back; the weight's gradient stays where the weight is, and is the global mean at once

The moves are autograd's (comm/boundary.py); between them it is the ordinary function, so autocast, hooks on modules and
checkpointing work as ever. Parameters, their gradients and the optimizer's state are divided by P (core/cut.py).
Main threads wait for these moves: they hide under nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, permutations
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.boundary import Rows, call_of, rows_of_all
from shoal.comm.cut_output import CutOutput
from shoal.core.contracts import Comm, Exchange, Place, Strategy, Transfer
from shoal.core.cost import Cost, Traffic, total
from shoal.core.cut import Cut, cut
from shoal.core.facts import Cluster, LayerProfile, Topology
from shoal.core.pieces import cut_sizes
from shoal.strategies.copies import plain

COUNT_BYTES = 80  # the number of rows, and what for, to every peer
_SLOT = "_cut_linear"  # where a served layer keeps what runs it


class CutStrategy(Strategy):
    """Cuts the weight of an nn.Linear along one dimension."""

    cuts = True
    dim: ClassVar[int]  # of the weight: 0 has the outputs, 1 the inputs
    takes_parts: ClassVar[bool] = False  # what it is called with is cut already, as its weight is

    @abstractmethod
    def enter(self, x: Tensor, rows: Rows, widths: Sequence[int]) -> Tensor:
        """Bring this rank's rows to the weight's parts."""

    @abstractmethod
    def leave(self, product: Tensor, rows: Rows, widths: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Bring the parts' products to the ranks whose rows they are, who have them in that shape."""

    @abstractmethod
    def moved(
        self, layer: LayerProfile, widths: Sequence[int], topology: Topology
    ) -> tuple[list[Traffic], list[Traffic]]:
        """The moves of one forward, and of one backward."""

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        width, what = ((layer.outputs, "outputs"), (layer.inputs, "inputs"))[self.dim]
        return refused(layer, "Linear", width, what, cluster)

    def estimate(self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster) -> Cost:
        (layer,) = layers
        ranks = cluster.size
        widths = cut_sizes((layer.outputs, layer.inputs)[self.dim], ranks)
        forward, backward = map(total, self.moved(layer, widths, cluster.topology))
        part, own_s, all_s = widths[0] / sum(widths), layer.product_s(layer.rows), layer.product_s(ranks * layer.rows)
        spared = 1 - part * all_s / own_s if own_s else 0.0  # of each product
        taken_anew_s = max(0.0, layer.own_product_s - own_s)  # the memory of the weight's gradient
        products_s = max(0.0, layer.backward_s - taken_anew_s)
        return Cost(
            total([forward, backward]),
            cluster.pace("direct"),  # its messages are `direct`'s
            forward_s=-spared * layer.forward_s,
            backward_s=-spared * products_s - (1 - part) * taken_anew_s,
            memory_bytes=part * layer.nbytes,
            awaited=(forward, backward),
            held=part,
        )

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        ((name, module),) = place.layers.items()
        if type(module) is not nn.Linear:
            raise TypeError(f"{label}: not a plain nn.Linear, but {type(module)}")
        assert place.comm is not None
        widths = cut_sizes(module.weight.shape[self.dim], place.ranks)
        outputs = cut_sizes(module.out_features, place.ranks)
        assert isinstance(module.weight, nn.Parameter)
        cut(module.weight, Cut(f"{name}.weight", module.weight, self.dim, widths, place.comm))
        if module.bias is not None:
            cut(module.bias, Cut(f"{name}.bias", module.bias, 0, outputs, place.comm))
        module.__class__ = CutLinear
        module.__dict__[_SLOT] = _Parts(name, self, module, widths, place.comm)
        return []


class ByOutputs(CutStrategy):
    """Cuts by outputs; what comes out stays cut (comm/cut_output.py)."""

    dim = 0

    def enter(self, x: Tensor, rows: Rows, widths: Sequence[int]) -> Tensor:
        return rows.gathered(x, scale=len(widths))

    def leave(self, product: Tensor, rows: Rows, widths: Sequence[int], shape: Sequence[int]) -> Tensor:
        numbers = torch.arange(rows.counts[rows.comm.rank], device=product.device).view(*shape[:-1])
        return CutOutput.of(product, rows, widths, numbers)


def refused(layer: LayerProfile, kind: str, width: int, what: str, cluster: Cluster) -> str | None:
    """Why a layer cannot be cut along a dimension of that width, or None."""
    if layer.kind != kind:
        return f"it serves nn.{kind}, and this is a {layer.kind}"
    if layer.outside_use:
        return layer.outside_use
    if not layer.calls:
        return "the sample does not call it"
    if layer.whole_update:
        return layer.whole_update
    if width < cluster.size:
        return f"{width} {what} cannot be cut over {cluster.size} ranks"
    return None


def move(topology: Topology, nbytes: Callable[[int, int], float]) -> Traffic:
    """One message from every rank to every other, of `nbytes(source, to)`."""
    sent, received, leaving = ([0.0] * topology.size for _ in range(3))
    for source, to in permutations(range(topology.size), 2):
        sent[source] += nbytes(source, to)
        received[to] += nbytes(source, to)
        leaving[source] += nbytes(source, to) * topology.apart(source, to)
    return Traffic(tuple(sent), tuple(received), rounds=1, leaving=tuple(leaving))


def counts(layer: LayerProfile, topology: Topology) -> Traffic:
    """The numbers of rows, told before every call."""
    return move(topology, lambda source, to: COUNT_BYTES * layer.calls)


@final
class _Parts:
    """Runs a layer of whose weight this rank has a part."""

    def __init__(self, name: str, strategy: CutStrategy, module: nn.Linear, widths: Sequence[int], comm: Comm) -> None:
        self._name = name
        self.weight, self.bias = module.weight, module.bias
        self._strategy, self._widths, self._comm = strategy, widths, comm
        self._outputs = module.out_features
        at = accumulate(cut_sizes(self._outputs, comm.size), initial=0)
        self._mine = list(pairwise(at))[comm.rank]  # of the outputs, those whose bias is here

    def linear(self, x: Tensor) -> Tensor:
        """The layer's output for this rank's rows."""
        taken = None
        if self._strategy.takes_parts and isinstance(x, CutOutput):
            taken = x.taken_by(self._name, self._widths)
        if taken is not None:
            rows, inside = taken
        else:
            flat = x.reshape(-1, x.shape[-1])
            rows = rows_of_all(self._comm, len(flat), call_of(self._name))
            inside = self._strategy.enter(flat, rows, self._widths)
        with torch._C.DisableTorchFunctionSubclass():  # the parts themselves
            product = F.linear(inside, self.weight, self._bias(len(self.weight)))
        return self._strategy.leave(product, rows, self._widths, (*x.shape[:-1], self._outputs))

    def _bias(self, outputs: int) -> Tensor | None:
        """This rank's bias, with zeros for other ranks' where the product has all outputs."""
        if self.bias is None or outputs < self._outputs:
            return self.bias
        start, stop = self._mine
        return F.pad(self.bias, (start, outputs - stop))


class CutLinear(nn.Linear):
    """An nn.Linear that is cut over the ranks. Same parameters, names and repr; a copy of it is an ordinary layer."""

    _cut_linear: _Parts | None = None

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        parts = self._cut_linear
        if parts is None or self.weight is not parts.weight:  # functional_call gives it others
            return super().forward(input)
        return parts.linear(input)

    def _get_name(self) -> str:
        return "Linear"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, nn.Linear, _SLOT)
