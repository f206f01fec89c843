"""Row: each rank has the weights of M/P inputs, and computes their part of all outputs.

    forward     receive this rank's columns of x:     sum the products at the rows' ranks:
                K·M·s·(P−1)/P                         K·N·s·(P−1)
    backward    gather dy: K·N·s·(P−1)                send each row's rank its columns of dx:
                                                      K·M·s·(P−1)/P

It suits layers of many inputs and few outputs, as `column` suits the opposite. The bias is cut by
outputs; each rank adds its own.

Reference: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.core.cost import Traffic
from shoal.core.facts import Cluster, LayerProfile, Topology
from shoal.profiling.weight_use import why_no_product
from shoal.strategies.cut_layers import CutFacts, CutStrategy, counts, move, uncut, wire_itemsize
from shoal.tensors.boundary import CallRows, Move, shaped


class Row(CutStrategy):
    """Cuts by inputs a linear layer, or any layer that multiplies its input with its weight."""

    name = "row"
    kinds = ("Linear",)
    takes_alike = True
    codes_rows = True
    dim = 1

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        if not layer.outside_use and (reason := why_no_product(layer)):
            return reason
        return uncut(layer, layer.inputs, "inputs", cluster)

    def enter(self, rows: CallRows, widths: Sequence[int]) -> Move:
        return rows.to_columns(widths, scale=len(widths))

    def leave(
        self, product: Tensor, rows: CallRows, widths: Sequence[int], shape: Sequence[int]
    ) -> Tensor:
        return shaped(rows.summed(product, scale=1 / len(widths)), shape)

    def moved(
        self, layer: LayerProfile, widths: Sequence[int], topology: Topology
    ) -> tuple[list[Traffic], list[Traffic]]:
        row_bytes = layer.rows * wire_itemsize(layer)
        x = move(topology, lambda source, to: row_bytes * widths[to])
        y = move(topology, lambda source, to: row_bytes * layer.outputs)
        dx = move(topology, lambda source, to: row_bytes * widths[source])
        back = [y, dx] if layer.measured(CutFacts).input_grad else [y]
        return [counts(layer, topology), x, y], back
