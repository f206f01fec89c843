"""Head: `column` for the layer that gives the logits, whose loss is computed on each rank's
classes.

    forward     gather x: K·M·s·(P−1) sent; of every row in the loss its number and target, 16
                bytes, to every peer, and four sums to the rank whose row it is
    backward    four numbers a row to every peer               give dx back, summed where the rows
                                                               are: K·M·s·(P−1)

A softmax on the way tells every peer two sums of each of all P·K rows, and one number back.

Neither the K·N logits nor the M·N gradients cross the network, which is what heads of very many
classes need. What the model returns is this rank's rows of logits without the memory
(comm/cut_output.py).

Reference: Shoeybi et al., "Megatron-LM", 2019, section 3; An et al., "Partial FC", 2020, section
3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from shoal.core.cost import Traffic
from shoal.core.facts import Cluster, LayerProfile, Topology
from shoal.strategies.cutting import COUNT_BYTES, ByOutputs, counts, move

_TARGET_BYTES = 16  # a row's number and class
_TERMS = 4  # of a row, each way


@final
class Head(ByOutputs):
    """Cuts the last linear layer by its outputs, and the loss with it."""

    name = "head"

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        reason = super().refuses(layer, cluster)
        if reason is None and not layer.loss_rows:
            return "its output does not go into a cross entropy, or not only"
        return reason

    def moved(
        self, layer: LayerProfile, widths: Sequence[int], topology: Topology
    ) -> tuple[list[Traffic], list[Traffic]]:
        itemsize = layer.parameters[0].itemsize
        x = move(topology, lambda source, to: layer.rows * layer.inputs * itemsize)
        count = move(topology, lambda source, to: COUNT_BYTES * layer.loss_calls)
        targets = move(topology, lambda source, to: layer.loss_rows * _TARGET_BYTES)
        terms = move(topology, lambda source, to: layer.loss_rows * _TERMS * itemsize)
        of_all = topology.size * layer.softmax_rows * itemsize
        sums = [move(topology, lambda source, to: 2 * of_all)] if of_all else []
        slopes = [move(topology, lambda source, to: of_all)] if of_all else []
        dx = [x] if layer.input_grad else []
        return [counts(layer, topology), x, count, targets, terms, *sums], [terms, *slopes, *dx]
