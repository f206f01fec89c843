"""Column: each rank has N/P of a layer's outputs, and computes them for the rows of all ranks.

    forward     gather x: K·M·s·(P−1) sent          send each row's rank its columns of y:
                                                    K·N·s·(P−1)/P
    backward    receive this rank's columns of dy:  send dx back, summed at its rows' rank:
                K·N·s·(P−1)/P                       K·M·s·(P−1)

A rank sends 2·K·(M·(P−1) + N·(P−1)/P)·s in a step, on the critical path, instead of
2·M·N·s·(P−1)/P that may hide. Weight, gradient, update and optimizer state are divided by P. dx is
not computed if x takes no gradient. The outputs of a convolution are its channels: K·M is then all
of a sample's input, and K·N all of its output.

Reference: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014,
section 4; Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from shoal.core.cost import Traffic
from shoal.core.facts import LayerProfile, Topology
from shoal.strategies.cut_layers import ByOutputs, CutFacts, counts, move, wire_itemsize
from shoal.tensors.boundary import CallRows, shaped


@final
class Column(ByOutputs):
    """Cuts a linear layer by its outputs, a convolution by its channels."""

    name = "column"
    codes_rows = True

    def leave(
        self, product: Tensor, rows: CallRows, widths: Sequence[int], shape: Sequence[int]
    ) -> Tensor:
        return shaped(rows.to_rows(product, widths, scale=1 / len(widths)), shape)

    def moved(
        self, layer: LayerProfile, widths: Sequence[int], topology: Topology
    ) -> tuple[list[Traffic], list[Traffic]]:
        itemsize, facts = wire_itemsize(layer), layer.measured(CutFacts)
        row_bytes = layer.rows * itemsize
        x = move(topology, lambda source, to: facts.input_elements * itemsize)
        y = move(topology, lambda source, to: row_bytes * widths[source])
        dy = move(topology, lambda source, to: row_bytes * widths[to])
        back = [dy, x] if facts.input_grad else [dy]
        return [counts(layer, topology), x, y], back
