"""Pair: two linear layers, the first cut by outputs, the second by inputs: the hidden width is cut.

    forward     column_pair   gather x: K·M·s·(P−1) sent
                              (its N outputs are row_pair's inputs, and lie on the same ranks)
                row_pair      sum the products at the rows' ranks: K·N'·s·(P−1)
    backward    row_pair      gather dy: K·N'·s·(P−1)
                              (the result is the gradient that column_pair's backward takes)
                column_pair   send dx back, summed at the rows' ranks: K·M·s·(P−1)

It saves 4·K·N·s·(P−1)/P against `column` and `row`. Between the two layers there may be any modules
and functions that tensors/cut_output.py leaves cut. A run of the sample finds them. Dropout there
draws its own numbers on every rank: it is as random as in one process, but not the same.
Reference: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from shoal.contracts.probe import Layer, Probe, Trial
from shoal.core.cost import Traffic
from shoal.core.facts import Cluster, Excerpt, Facts, LayerProfile, Topology
from shoal.profiling.ends import Ends
from shoal.strategies.cut_layers import ByOutputs, CutFacts, counts, move, wire_itemsize
from shoal.strategies.row import Row


@dataclass(frozen=True)
class PairFacts(Facts):
    """The linear layers that feed one another, with only element-wise work between them."""

    feeds: str = ""  # the layer that takes all of its output
    fed_by: str = ""  # the layer with the output that is all of its input

    @classmethod
    def of_ranks(cls, ranks: Sequence[PairFacts]) -> PairFacts:
        feeds, fed_by = (facts.feeds for facts in ranks), (facts.fed_by for facts in ranks)
        return cls(_same(feeds), _same(fed_by))

    def in_excerpt(self, layer: LayerProfile, excerpt: Excerpt) -> PairFacts:
        inside = excerpt.layers
        return PairFacts(
            self.feeds if self.feeds in inside else "",
            self.fed_by if self.fed_by in inside else "",
        )


def _same(names: Iterable[str]) -> str:
    """Return the name if every rank has the same, else ''."""
    different = set(names)
    return different.pop() if len(different) == 1 else ""


@final
class PairProbe(Probe):
    """Follows the outputs of linear layers to the next ones."""

    def measure(self, layer: Layer, trial: Trial) -> PairFacts:
        feeds = trial.once(Ends.of).feeds
        fed_by = {taker: feeder for feeder, taker in feeds.items()}
        return PairFacts(feeds.get(layer.name, ""), fed_by.get(layer.name, ""))


@final
class ColumnPair(ByOutputs):
    """Cuts a linear layer by its outputs, and leaves them for the layer that takes them."""

    name = "column_pair"
    codes_rows = True
    probes = (*ByOutputs.probes, PairProbe)

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        reason = super().refuses(layer, cluster)
        if reason is None and not layer.measured(PairFacts).feeds:
            return (
                "its output does not go to one linear layer alone, with element-wise work between"
            )
        return reason

    def needs(self, layer: LayerProfile) -> dict[str, str]:
        return {layer.measured(PairFacts).feeds: RowPair.name}

    def moved(
        self, layer: LayerProfile, widths: Sequence[int], topology: Topology
    ) -> tuple[list[Traffic], list[Traffic]]:
        row_bytes = layer.inputs * wire_itemsize(layer)
        x = move(topology, lambda source, to: layer.rows * row_bytes)
        return [counts(layer, topology), x], [x] if layer.measured(CutFacts).input_grad else []


@final
class RowPair(Row):
    """Cuts a linear layer by its inputs, which already lie on the ranks that need them.

    If it is called with any other tensor, it works as `Row`.
    """

    name = "row_pair"
    probes = (*Row.probes, PairProbe)
    takes_parts = True

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        reason = super().refuses(layer, cluster)
        if reason is None and not layer.measured(PairFacts).fed_by:
            alone = "one linear layer alone, with element-wise work between"
            return f"what it is called with does not come from {alone}"
        return reason

    def needs(self, layer: LayerProfile) -> dict[str, str]:
        return {layer.measured(PairFacts).fed_by: ColumnPair.name}

    def moved(
        self, layer: LayerProfile, widths: Sequence[int], topology: Topology
    ) -> tuple[list[Traffic], list[Traffic]]:
        row_bytes = layer.outputs * wire_itemsize(layer)
        y = move(topology, lambda source, to: layer.rows * row_bytes)
        return [y], [y]
