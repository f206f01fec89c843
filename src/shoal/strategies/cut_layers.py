"""Layers cut over the ranks: the parts that `column`, `row`, pairs and `head` share.

    1  forward    80 bytes tell each peer the number of rows; rows (or columns of them) come from
                  all ranks
    2             the layer runs on this rank's part of the weight for the rows of all ranks, in
                  chunks as they come
    3             the products go to the ranks that have the rows
    4  backward   the same way back; the weight's gradient stays with the weight, and is the
                  global mean at once

The moves are autograd's (tensors/boundary.py). Between them runs the layer's own function, or for
nn.Linear one that does the same, so autocast, hooks on modules and checkpointing work as ever.
Parameters, their gradients and the optimizer's state are divided by P (tensors/cut.py).

Main threads wait for these moves. A part of the time hides under the layer's own products if it is
linear: in forward a chunk is sent during the product of the one before. In backward, rows go back
during the product that makes the weight's gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from shoal.codecs.coded_exchange import read_codec
from shoal.contracts.exchange import Exchange
from shoal.contracts.probe import Layer, Probe, Trial
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Transfer
from shoal.core.cost import Cost, Phase, Traffic, Update, Wait, total
from shoal.core.facts import Cluster, Excerpt, Facts, LayerProfile, Topology
from shoal.core.pieces import cut_sizes
from shoal.core.role import Role
from shoal.profiling.products import ProductFacts, ProductProbe
from shoal.profiling.row_layers import made_of_weight, rowwise
from shoal.profiling.updates import UpdateFacts, UpdateProbe
from shoal.profiling.weight_use import LINEAR, WeightProbe, WeightUse, like_of
from shoal.strategies.copies import kind_before
from shoal.strategies.cut_layer import (
    SLOT,
    CutMoves,
    LayerPart,
    OwnParameters,
    cut_class,
)
from shoal.tensors.boundary import CallRows, Move
from shoal.tensors.cut import cut, is_cut, restore
from shoal.tensors.cut_output import CutOutput
from shoal.tensors.output_call import OutputCall
from shoal.tensors.row_crossing import EXACT
from shoal.tensors.sharded_parameter import OverRanks

COUNT_BYTES = 80  # a message to every peer: the number of rows, and their purpose


@dataclass(frozen=True)
class CutFacts(Facts):
    """Inputs of a layer's calls, and whether it can be cut by outputs."""

    input_elements: int = 0  # sum over all calls
    input_grad: bool = True  # whether any input takes a gradient
    rowwise: bool = False  # whether each of its outputs follows from one row of its weight

    @classmethod
    def of_ranks(cls, ranks: Sequence[CutFacts]) -> CutFacts:
        return replace(super().of_ranks(ranks), rowwise=all(facts.rowwise for facts in ranks))

    def in_excerpt(self, layer: LayerProfile, excerpt: Excerpt) -> CutFacts:
        return replace(self, input_elements=round(self.input_elements * excerpt.rows))


@final
class CutProbe(Probe):
    """Counts the inputs of layers, and tries their forward on parts of the weight."""

    def measure(self, layer: Layer, trial: Trial) -> CutFacts:
        watched = trial.step.layers[layer.name]
        return CutFacts(watched.input_elements, watched.input_grad, trial.once(rowwise)[layer.name])


class CutStrategy(CutMoves, Strategy):
    """Cuts the weight of a layer along one dimension.

    An nn.Linear may be cut along both. Another layer may be cut if its input meets the weight in
    products (profiling/weight_use.py), or along outputs that follow from one row of the weight each
    (profiling/row_layers.py).
    """

    role = Role.CUT
    probes: ClassVar[tuple[type[Probe], ...]] = (
        CutProbe,
        WeightProbe,
        ProductProbe,
        UpdateProbe,
    )

    @abstractmethod
    def moved(
        self, layer: LayerProfile, widths: Sequence[int], topology: Topology
    ) -> tuple[list[Traffic], list[Traffic]]:
        """Return the moves of one forward, and of one backward."""

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        """Estimate a cut layer's cost by these equations (also in docs/ideas/how-it-chooses.md).

        P ranks, K rows a rank, c chunks, n products in backward: 2, or 1 where x takes no gradient.
        A product of k rows takes a + b·k seconds on the whole weight.

            part         its width ÷ all widths          on the rank with most of the weight
            grown        part·(a + b·P·K) / (a + b·K)    a product's time: its part, rows of all
            repeated     part·a / (a + b·K)              added by each further chunk
            memory_s     own product − (a + b·K)         allocates the weight's gradient
            products_s   backward − memory_s             of the layer as profiled
            later_part   1 − 1/c                         share of rows after the first chunk
            entering_s   bytes of x · byte_s             that may hide: all but the latency
            leaving_s    bytes of dx at the move's pace  that may hide
            messages_s   (c−1) · processor's round_s     for further chunks, each way
            forward      (grown + (c−1)·repeated) · profiled forward + messages_s
            backward     grown·products_s + part·memory_s, and with dx
                         (c−1)·repeated·products_s/2 + messages_s
            coding       elements that cross · (code + read) of the codec, if there is one
            hidden       later_part · min(entering_s, forward's product) in forward,
                         min(leaving_s, grown·products_s/n · (1 + later_part)) in backward
        """
        (layer,) = layers
        product, facts = layer.measured(ProductFacts), layer.measured(CutFacts)
        pace, widths = cluster.move_pace, self._widths(layer, cluster)
        entering, returning = self.moved(layer, widths, cluster.topology)
        part = widths[0] / sum(widths)
        own_s, all_s = product.seconds(layer.rows), product.seconds(cluster.size * layer.rows)
        grown = part * all_s / own_s if own_s else 1.0
        repeated = part * product.fixed_s / own_s if own_s else 0.0
        memory_s = max(0.0, product.own_s - own_s)
        products_s = max(0.0, layer.backward_s - memory_s)
        num_products = 2 if facts.input_grad else 1
        chunks, entering_s, leaving_s = 1, 0.0, 0.0
        comes_in_chunks = layer.kind == LINEAR or layer.measured(WeightUse).served
        if comes_in_chunks and not self.takes_parts:
            chunks = max(1, min(layer.setting.chunks, layer.rows // max(layer.calls, 1)))
            entering_s = entering[1].worst * pace.wall.byte_s
            leaving_s = pace.wall.of(returning[-1]) if facts.input_grad else 0.0
        later_part = 1 - 1 / chunks
        all_repeated, messages_s = (chunks - 1) * repeated, (chunks - 1) * pace.cpu.round_s
        forward_product_s = (grown + all_repeated) * layer.forward_s
        backward_s = (grown - 1) * products_s - (1 - part) * memory_s
        if facts.input_grad:
            backward_s += all_repeated * products_s / 2 + messages_s
        hidden_forward_s = later_part * min(entering_s, forward_product_s)
        hidden_backward_s = min(leaving_s, grown * products_s / num_products * (1 + later_part))
        return Cost(
            in_forward=Phase(total(entering), pace, Wait.AT_ONCE, beside_s=hidden_forward_s),
            in_backward=Phase(total(returning), pace, Wait.AT_ONCE, beside_s=hidden_backward_s),
            forward_s=forward_product_s
            - layer.forward_s
            + messages_s
            + _coding_s(layer, cluster, entering),
            backward_s=backward_s + _coding_s(layer, cluster, returning),
            memory_bytes=part * layer.nbytes,
            held=part,
            update=Update(main=part),
        )

    def _widths(self, layer: LayerProfile, cluster: Cluster) -> list[int]:
        """Return the width of each rank's part of the weight. The first is the widest."""
        return cut_sizes((layer.outputs, layer.inputs)[self.dim], cluster.size)

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        ((name, module),) = place.layers.items()
        use = self.use_of(name, module, place)
        if use is not None and not use.served:
            raise TypeError(f"{label}: cannot cut {type(module)}")
        assert place.comm is not None
        own = OwnParameters.of(module, use)
        weight = own.weight
        outputs = weight.shape[1 if own.is_turned else 0]
        widths = cut_sizes(weight.shape[own.dim(self.dim)], place.ranks)
        of_weight, of_bias = (own.dim(self.dim), widths), (0, cut_sizes(outputs, place.ranks))
        for _, leaf, parameter in own.places:
            dim, sizes = of_weight if parameter is weight else of_bias
            over = OverRanks(f"{name}.{leaf}", parameter, dim, sizes, place.comm, place.weighs)
            cut(parameter, over)
        run_cut(name, self, module, place)
        return []

    def use_of(self, name: str, module: nn.Module, place: Place) -> WeightUse | None:
        """Return how a layer's forward uses its weight; None if it runs on parts as it stands."""
        profile = place.profiles.get(name)
        is_rowwise = profile is None or profile.measured(CutFacts).rowwise
        if type(module) is nn.Linear:
            return WeightUse(served=True)
        if not self.dim and isinstance(module, nn.Linear | nn.Conv2d) and is_rowwise:
            return None
        return WeightUse() if profile is None else profile.measured(WeightUse)

    def release(self, place: Place, transfers: Sequence[Transfer]) -> None:
        (module,) = place.layers.values()
        part = run_whole(module)
        for _, _, parameter in part.own.places:
            if is_cut(parameter):
                restore(parameter)


def run_cut(name: str, strategy: CutStrategy, module: nn.Module, place: Place) -> None:
    """Run a module on this rank's part of its weight. The weight must be cut already."""
    own = OwnParameters.of(module, strategy.use_of(name, module, place))
    widths = cut_sizes(own.weight.shape[own.dim(strategy.dim)], place.ranks)
    part = LayerPart(name, strategy, module, own, widths, place)
    module.__class__ = cut_class(type(module))
    module.__dict__[SLOT] = part


def run_whole(module: nn.Module) -> LayerPart:
    """Give a module its own class again, and return its part. Its weight is still cut."""
    part: LayerPart = module.__dict__.pop(SLOT)
    module.__class__ = kind_before(module)
    return part


class ByOutputs(CutStrategy):
    """Cuts by outputs. The output stays cut unless a subclass changes `leave`.

    See tensors/cut_output.py.
    """

    dim = 0

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        reason = uncut(layer, layer.outputs, "outputs", cluster)
        by_parts = layer.measured(CutFacts).rowwise or layer.measured(WeightUse).served
        if reason is None and not by_parts:
            return _not_by_rows(layer.kind)
        return reason

    @classmethod
    def unfit(cls, module: nn.Module) -> str:
        is_table = isinstance(module, nn.Embedding)  # a head may share its weight
        may = made_of_weight(module) or like_of(module) == LINEAR or is_table
        return "" if may else _not_by_rows(type(module).__name__)

    def enter(self, rows: CallRows, widths: Sequence[int]) -> Move:
        return rows.gathered(scale=len(widths))

    def leave(
        self, product: Tensor, rows: CallRows, widths: Sequence[int], shape: Sequence[int]
    ) -> Tensor:
        numbers = torch.arange(rows.counts[rows.comm.rank], device=product.device).view(*shape[:-1])
        # later moves of the output, of a loss's sums or of all logits, are exact
        rows = replace(rows, crossing=EXACT)
        if rows.comm.attendance is None:
            return CutOutput.of(product, rows, widths, numbers)
        call = OutputCall(product, rows, widths, rows.layer)
        return CutOutput.of(product, rows, widths, numbers, call=call)


def _not_by_rows(kind: str) -> str:
    return (
        "it serves layers each of whose outputs is made of one row of the weight, "
        f"and this {kind} was not found to be one"
    )


def uncut(layer: LayerProfile, width: int, unit: str, cluster: Cluster) -> str | None:
    """Return why a layer that all ranks call together cannot be cut so, or None."""
    if layer.calls_vary:
        how_often = "ranks or steps differ in how often they call it"
        return f"{how_often}, and what is cut is called by all ranks together"
    return refused(layer, width, unit, cluster)


def refused(layer: LayerProfile, width: int, unit: str, cluster: Cluster) -> str | None:
    """Return why a layer cannot be cut along a dimension of this width, or None."""
    if layer.outside_use:
        return layer.outside_use
    if not layer.calls:
        return "the sample does not call it"
    if why := layer.measured(UpdateFacts).whole:
        return why
    if not width:
        return f"it has no {unit} that could be cut"
    if width < cluster.size:
        return f"{width} {unit} cannot be cut over {cluster.size} ranks"
    return None


def move(topology: Topology, nbytes: Callable[[int, int], float]) -> Traffic:
    """Return the traffic if every rank sends every other one message of `nbytes(source, to)`."""
    sent, received, leaving = ([0.0] * topology.size for _ in range(3))
    for source, to in permutations(range(topology.size), 2):
        sent[source] += nbytes(source, to)
        received[to] += nbytes(source, to)
        leaving[source] += nbytes(source, to) * topology.apart(source, to)
    return Traffic(tuple(sent), tuple(received), rounds=1, leaving=tuple(leaving))


def wire_itemsize(layer: LayerProfile) -> int:
    """Return the bytes of one element of the layer's rows on the network."""
    itemsize, codec = layer.parameters[0].itemsize, layer.setting.codec
    return min(itemsize, read_codec(codec).nbytes(1, itemsize)) if codec else itemsize


def _coding_s(layer: LayerProfile, cluster: Cluster, moves: Sequence[Traffic]) -> float:
    """Return the seconds that a rank's main thread codes and decodes rows in these moves."""
    if not layer.setting.codec:
        return 0.0
    coding, elements = (
        cluster.coding(layer.setting.codec),
        total(moves).worst / wire_itemsize(layer),
    )
    return elements * (coding.encode_s + coding.decode_s)


def counts(layer: LayerProfile, topology: Topology) -> Traffic:
    """Return the traffic of the numbers of rows, which are told before every call."""
    return move(topology, lambda source, to: COUNT_BYTES * layer.calls)
