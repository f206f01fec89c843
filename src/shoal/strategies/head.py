"""Head: `column` for the layer of the logits. Each rank computes the loss on its own classes.

    forward     gather x: K·M·s·(P−1) sent; for each row in the loss its number and target, 16
                bytes, to every peer, and four sums to the rank that has the row
    backward    four numbers a row to every peer               send dx back, summed at its rows'
                                                               rank: K·M·s·(P−1)

A softmax before the loss sends every peer two sums for each of all P·K rows, and gets one number
back.

Neither the K·N logits nor the M·N gradients cross the network, so heads of very many classes can
train. The model returns this rank's rows of logits as a tensor that takes no memory for them
(tensors/cut_output.py).

Reference: Shoeybi et al., "Megatron-LM", 2019, section 3; An et al., "Partial FC", 2020, section
3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from shoal.contracts.attendance import READING_BYTES
from shoal.contracts.probe import Layer, Probe, Trial
from shoal.core.cost import Traffic
from shoal.core.facts import Cluster, Excerpt, Facts, LayerProfile, Topology
from shoal.profiling.ends import Ends
from shoal.strategies.cut_layers import ByOutputs, CutFacts, counts, move, wire_itemsize

_TARGET_BYTES = 16  # a row's number and class
_TERMS = 4  # terms of a row, each way


@dataclass(frozen=True)
class LossFacts(Facts):
    """The losses that a layer's output goes into, if it goes nowhere else."""

    rows: int = 0  # rows of its output in cross entropies; 0 if the output has other uses
    calls: int = 0  # number of cross entropies and of softmaxes before them
    softmax_rows: int = 0  # rows in these softmaxes

    @classmethod
    def of_ranks(cls, ranks: Sequence[LossFacts]) -> LossFacts:
        if not all(facts.rows for facts in ranks):
            return cls()
        return super().of_ranks(ranks)

    def in_excerpt(self, layer: LayerProfile, excerpt: Excerpt) -> LossFacts:
        return LossFacts()  # its loss belongs to the workers


@final
class LossProbe(Probe):
    """Follows the outputs of linear layers to the losses."""

    def measure(self, layer: Layer, trial: Trial) -> LossFacts:
        uses = trial.once(Ends.of).losses.get(layer.name, [])
        return LossFacts(
            sum(use.loss_rows for use in uses), len(uses), sum(use.softmax_rows for use in uses)
        )


@final
class Head(ByOutputs):
    """Cuts the last linear layer by its outputs, and the loss with it."""

    name = "head"
    codes_rows = True
    probes = (*ByOutputs.probes, LossProbe)

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        reason = super().refuses(layer, cluster)
        if reason is None and not layer.measured(LossFacts).rows:
            return "its output does not go into a cross entropy, or not only"
        return reason

    def moved(
        self, layer: LayerProfile, widths: Sequence[int], topology: Topology
    ) -> tuple[list[Traffic], list[Traffic]]:
        itemsize, loss = layer.parameters[0].itemsize, layer.measured(LossFacts)
        x = move(topology, lambda source, to: layer.rows * layer.inputs * wire_itemsize(layer))
        count = move(topology, lambda source, to: READING_BYTES * loss.calls)
        targets = move(topology, lambda source, to: loss.rows * _TARGET_BYTES)
        terms = move(topology, lambda source, to: loss.rows * _TERMS * itemsize)
        of_all = topology.size * loss.softmax_rows * itemsize
        sums = [move(topology, lambda source, to: 2 * of_all)] if of_all else []
        slopes = [move(topology, lambda source, to: of_all)] if of_all else []
        dx = [x] if layer.measured(CutFacts).input_grad else []
        return [counts(layer, topology), x, count, targets, terms, *sums], [terms, *slopes, *dx]
