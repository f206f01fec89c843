"""Layers cut over the ranks: what `column`, `row`, pairs and `head` share.

    1  forward    80 bytes tell each peer the number of rows; rows (or columns of them) come from
                  all ranks
    2             the layer on this rank's part of the weight, for the rows of all ranks; in chunks,
                  as they come
    3             what came out goes to the ranks whose rows they are
    4  backward   the same way back; the weight's gradient stays where the weight is, and is the
                  global mean at once

The moves are autograd's (tensors/boundary.py); between them it is the layer's own function, or for
nn.Linear one that does the same, so autocast, hooks on modules and checkpointing work as ever.
Parameters, their gradients and the optimizer's state are divided by P (tensors/cut.py).

Main threads wait for these moves. What a linear layer's rows take on their way in hides under its
own products: that of one chunk under the sending of the next, and in backward, where they go back,
that of the weight's gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, permutations
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.codecs.coded import codec_named
from shoal.contracts.exchange import Exchange
from shoal.contracts.probe import Layer, Probe, Trial
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Transfer
from shoal.core.cost import Cost, Phase, Traffic, Update, Wait, total
from shoal.core.eager import eager
from shoal.core.facts import Cluster, Excerpt, Facts, LayerProfile, Topology
from shoal.core.pieces import cut_sizes
from shoal.core.role import Role
from shoal.profiling.products import ProductFacts, ProductProbe
from shoal.profiling.rowwise import row_dims, rowwise
from shoal.profiling.updates import UpdateFacts, UpdateProbe
from shoal.strategies.copies import plain
from shoal.tensors.boundary import CallRows, Move, call_of, linear
from shoal.tensors.crossing import EXACT, RowCrossing
from shoal.tensors.cut import cut, is_cut, restore
from shoal.tensors.cut_output import CutOutput
from shoal.tensors.output_call import OutputCall
from shoal.tensors.over_ranks import OverRanks
from shoal.tensors.wholes import holding_wholes, told_numbers

COUNT_BYTES = 80  # the number of rows, and what for, to every peer
_SLOT = "_cut_layer"  # where a served layer keeps what runs it


@dataclass(frozen=True)
class CutFacts(Facts):
    """What a layer is called with, and whether it can be cut by outputs."""

    input_elements: int = 0  # of all calls
    input_grad: bool = True  # something it is called with takes a gradient
    rowwise: bool = False  # each of its outputs follows from one row of its weight

    @classmethod
    def of_ranks(cls, ranks: Sequence[CutFacts]) -> CutFacts:
        return replace(super().of_ranks(ranks), rowwise=all(facts.rowwise for facts in ranks))

    def in_excerpt(self, layer: LayerProfile, excerpt: Excerpt) -> CutFacts:
        return replace(self, input_elements=round(self.input_elements * excerpt.rows))


@final
class CutProbe(Probe):
    """Counts what layers are called with, and tries their forward on parts of the weight."""

    def measure(self, layer: Layer, trial: Trial) -> CutFacts:
        watched = trial.step.layers[layer.name]
        return CutFacts(watched.input_elements, watched.input_grad, trial.once(rowwise)[layer.name])


class CutStrategy(Strategy):
    """Cuts the weight of a layer along one dimension: of an nn.Linear, by outputs also of others
    (rowwise.py).
    """

    role = Role.CUT
    probes: ClassVar[tuple[type[Probe], ...]] = (CutProbe, ProductProbe, UpdateProbe)
    dim: ClassVar[int]  # of the weight: 0 has the outputs, 1 the inputs
    takes_parts: ClassVar[bool] = False  # what it is called with is cut already, as its weight is

    @abstractmethod
    def enter(self, rows: CallRows, widths: Sequence[int]) -> Move:
        """How rows come to the weight's parts."""

    @abstractmethod
    def leave(
        self, product: Tensor, rows: CallRows, widths: Sequence[int], shape: Sequence[int]
    ) -> Tensor:
        """Bring the parts' products to the ranks whose rows they are, in that shape."""

    @abstractmethod
    def moved(
        self, layer: LayerProfile, widths: Sequence[int], topology: Topology
    ) -> tuple[list[Traffic], list[Traffic]]:
        """The moves of one forward, and of one backward."""

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        """What a cut layer costs, by these equations (docs/ideas/how-it-chooses.md has them too).

        P ranks, K rows a rank, c chunks, n products in backward: 2, or 1 where x takes no gradient.
        A product of k rows takes a + b·k seconds on the whole weight.

            part         its width ÷ all widths          of the rank that has most of the weight
            grown        part·(a + b·P·K) / (a + b·K)    a product's time: its part, rows of all
            repeated     part·a / (a + b·K)              what each further chunk adds to that
            memory_s     own product − (a + b·K)         to take memory for the weight's gradient
            products_s   backward − memory_s             of the layer as profiled
            later_part   1 − 1/c                         rows that come after the first chunk
            entering_s   bytes of x · byte_s             that may hide: all but the latency
            leaving_s    bytes of dx at the move's pace  that may hide
            messages_s   (c−1) · processor's round_s     of further chunks, each way
            forward      (grown + (c−1)·repeated) · profiled forward + messages_s
            backward     grown·products_s + part·memory_s, and with dx
                         (c−1)·repeated·products_s/2 + messages_s
            coding       elements that cross · (code + read) of the codec, where there is one
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
        if layer.kind == "Linear" and not self.takes_parts:
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
        """Of each rank's part of the weight, the first of which is widest."""
        return cut_sizes((layer.outputs, layer.inputs)[self.dim], cluster.size)

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        ((name, module),) = place.layers.items()
        if not isinstance(module, nn.Linear | nn.Conv2d) or (
            self.dim and type(module) is not nn.Linear
        ):
            raise TypeError(f"{label}: cannot cut {type(module)}")
        assert place.comm is not None
        weight, bias = (module._parameters.get(leaf) for leaf in ("weight", "bias"))
        assert weight is not None
        outputs = len(weight)
        widths = cut_sizes(weight.shape[self.dim], place.ranks)
        over = OverRanks(f"{name}.weight", weight, self.dim, widths, place.comm, place.weighs)
        cut(weight, over)
        if bias is not None:
            cut(
                bias,
                OverRanks(
                    f"{name}.bias",
                    bias,
                    0,
                    cut_sizes(outputs, place.ranks),
                    place.comm,
                    place.weighs,
                ),
            )
        part = _LayerPart(name, self, module, outputs, widths, place)
        module.__class__ = _cut_class(type(module))
        module.__dict__[_SLOT] = part
        return []

    def release(self, place: Place, transfers: Sequence[Transfer]) -> None:
        (module,) = place.layers.values()
        del module.__dict__[_SLOT]
        module.__class__ = _kind_of(module)
        for parameter in filter(is_cut, module.parameters(recurse=False)):
            restore(parameter)


def error_of_rows(layer: nn.Module) -> float | None:
    """How far rows of a cut layer were off as they crossed, relative; None where none did."""
    part: _LayerPart | None = layer.__dict__.get(_SLOT)
    return None if part is None else part.crossing.error


class ByOutputs(CutStrategy):
    """Cuts by outputs. What comes out stays cut, unless `leave` says otherwise.

    See tensors/cut_output.py.
    """

    dim = 0

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        reason = uncut(layer, layer.outputs, "outputs", cluster)
        if reason is None and not layer.measured(CutFacts).rowwise:
            return (
                "it serves layers each of whose outputs is made of one row of the weight, "
                f"and this {layer.kind} was not found to be one"
            )
        return reason

    def enter(self, rows: CallRows, widths: Sequence[int]) -> Move:
        return rows.gathered(scale=len(widths))

    def leave(
        self, product: Tensor, rows: CallRows, widths: Sequence[int], shape: Sequence[int]
    ) -> Tensor:
        numbers = torch.arange(rows.counts[rows.comm.rank], device=product.device).view(*shape[:-1])
        # what is asked of the output crosses as it is: sums of a loss, or all of it
        rows = replace(rows, crossing=EXACT)
        if rows.comm.attendance is None:
            return CutOutput.of(product, rows, widths, numbers)
        call = OutputCall(product, rows, widths, rows.layer)
        return CutOutput.of(product, rows, widths, numbers, call=call)


def uncut(layer: LayerProfile, width: int, unit: str, cluster: Cluster) -> str | None:
    """Why a layer called by all ranks together cannot be cut along such a dimension, or None."""
    if layer.calls_vary:
        how_often = "ranks or steps differ in how often they call it"
        return f"{how_often}, and what is cut is called by all ranks together"
    return refused(layer, width, unit, cluster)


def refused(layer: LayerProfile, width: int, unit: str, cluster: Cluster) -> str | None:
    """Why a layer cannot be in parts along a dimension of that width, or None."""
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
    """One message from every rank to every other, of `nbytes(source, to)`."""
    sent, received, leaving = ([0.0] * topology.size for _ in range(3))
    for source, to in permutations(range(topology.size), 2):
        sent[source] += nbytes(source, to)
        received[to] += nbytes(source, to)
        leaving[source] += nbytes(source, to) * topology.apart(source, to)
    return Traffic(tuple(sent), tuple(received), rounds=1, leaving=tuple(leaving))


def wire_itemsize(layer: LayerProfile) -> int:
    """Bytes that an element of its rows takes where it crosses."""
    itemsize, codec = layer.parameters[0].itemsize, layer.setting.codec
    return min(itemsize, codec_named(codec).nbytes(1, itemsize)) if codec else itemsize


def _coding_s(layer: LayerProfile, cluster: Cluster, moves: Sequence[Traffic]) -> float:
    """Seconds that coding what is sent and reading what comes takes a rank, on its main thread."""
    if not layer.setting.codec:
        return 0.0
    coding, elements = (
        cluster.coding(layer.setting.codec),
        total(moves).worst / wire_itemsize(layer),
    )
    return elements * (coding.encode_s + coding.decode_s)


def counts(layer: LayerProfile, topology: Topology) -> Traffic:
    """The numbers of rows, told before every call."""
    return move(topology, lambda source, to: COUNT_BYTES * layer.calls)


@final
class _LayerPart:
    """This rank's part of a layer: it runs the layer for the rows of all ranks."""

    def __init__(
        self,
        name: str,
        strategy: CutStrategy,
        module: nn.Linear | nn.Conv2d,
        outputs: int,
        widths: Sequence[int],
        place: Place,
    ) -> None:
        assert place.comm is not None
        self._name, self._comm, self._chunks = name, place.comm, place.rows.chunks
        self._weighs, self.crossing = place.weighs, RowCrossing(place.rows.codec)
        self._backward_hooks = place.ways.backward_hooks
        self._is_linear = type(module) is nn.Linear
        self.weight, self.bias = module.weight, module.bias
        self._strategy, self._widths = strategy, widths
        self._row_dims = row_dims(module)
        self._outputs = outputs
        at = accumulate(cut_sizes(outputs, place.ranks), initial=0)
        self._mine = list(pairwise(at))[place.rank]  # of the outputs, those whose bias is here

    def called(self, module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The layer's output for this rank's rows; `forward` is the layer's own."""
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
            told = told_numbers(self._comm, [len(flat)] * self._comm.size, purpose)
            if told is None:
                with holding_wholes([module], self._comm):
                    return forward(x)
            if self._comm.attendance is not None and torch._C._current_graph_task_id() == -1:
                self._comm.attendance.drop(self._name)  # no rank reads it alone any more
            crossing = self.crossing
            rows = CallRows(self._comm, tuple(told), purpose, self._weighs, self._name, crossing)
            inside = None
        with torch._C.DisableTorchFunctionSubclass():  # the parts themselves
            if inside is not None:
                product = F.linear(inside, self.weight, self._added_bias())
            elif self._is_linear:
                product = linear(
                    flat, self.weight, self._added_bias(), rows.chunks(self._chunks), self._enter
                )
            else:
                product = forward(self._enter(rows)(flat).view(-1, *row))
        place = product.shape[2:]  # of an output, in a convolution
        widths = [width * place.numel() for width in self._widths]
        output = self._strategy.leave(
            product.flatten(1), rows, widths, (*ahead, self._outputs, *place)
        )
        # torch hangs backward hooks of modules on ordinary tensors only
        if isinstance(output, CutOutput) and any(self._backward_hooks):
            return output.whole()
        return output

    def _enter(self, rows: CallRows) -> Move:
        return self._strategy.enter(rows, self._widths)

    def _added_bias(self) -> Tensor | None:
        """What this rank adds to its product: its bias, with zeros for other ranks' where all
        outputs are summed.
        """
        if self.bias is None or not self._strategy.dim:
            return self.bias
        start, stop = self._mine
        return F.pad(self.bias, (start, self._outputs - stop))


class _CutLayer(nn.Module):
    """A layer that is cut over the ranks, with the same parameters, names and repr.

    A copy of it is an ordinary layer.
    """

    _cut_layer: _LayerPart | None = None

    @eager
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        part = self._cut_layer
        # by functional_call
        if part is None or self.weight is not part.weight or self.bias is not part.bias:
            output: Tensor = super().forward(*args, **kwargs)
            return output
        (x,) = (*args, *kwargs.values())  # or it would not have been cut
        return part.called(self, super().forward, x)

    def _get_name(self) -> str:
        return _kind_of(self).__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, _kind_of(self), _SLOT)


def _cut_class(kind: Any) -> Any:
    """Layers of a kind, cut: one class for all of them."""
    return _CLASSES.setdefault(kind, type(f"Cut{kind.__name__}", (_CutLayer, kind), {}))


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _kind_of(layer: nn.Module) -> type[nn.Module]:
    """What it was before."""
    kind: type[nn.Module] = type(layer).__bases__[1]
    return kind
