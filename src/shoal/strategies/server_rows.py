"""Server rows: servers hold V/S rows of a table each; workers pull rows and push gradients.

    forward     each id once: 64 bytes and 8 an id to the row's server; D·s a row come back
    backward    64 bytes, and 8 + D·s a row, go to the servers; no worker waits for that
    step        64 bytes to each server, with the optimizer's settings from rank 0; the next forward
                waits for them

With U different ids a worker sends U·(16 + D·s) and gets U·D·s, instead of about 2·V·D·s. It holds
no part of the table, no gradient and no state. The servers' side is servers/tables.py. It works
with a staleness.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.contracts.exchange import Exchange
from shoal.contracts.row_weights import Weighing
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Transfer
from shoal.contracts.ways import TableRows
from shoal.core.cost import Cost, Phase, Traffic, Update, Wait
from shoal.core.facts import Cluster, LayerProfile, Topology
from shoal.core.role import Role
from shoal.profiling.products import ProductFacts, ProductProbe
from shoal.profiling.updates import UpdateProbe
from shoal.remote.channel import HEAD_BYTES
from shoal.remote.tables import ID_BYTES
from shoal.strategies.cut_layers import refused
from shoal.strategies.embedding import IdFacts, IdProbe, run_by, run_by_itself
from shoal.tensors.boundary import refuse_second_derivative
from shoal.tensors.cut import restore


@final
class ServerRows(Strategy):
    """Gives the rows of an nn.Embedding to servers, which update them."""

    name = "server_rows"
    kinds = ("Embedding",)
    role = Role.TABLE
    probes = (ProductProbe, IdProbe, UpdateProbe)

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        return refused(
            layer, layer.inputs, "rows", replace(cluster, topology=Topology(cluster.servers))
        )

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        (layer,) = layers
        product = layer.measured(ProductFacts)
        servers, row_bytes = len(cluster.servers), layer.outputs * layer.parameters[0].itemsize
        asked = servers * HEAD_BYTES * layer.calls + layer.measured(IdFacts).distinct * ID_BYTES
        rows = float(layer.measured(IdFacts).distinct * row_bytes)
        forward = _between(cluster, asked, rows, rounds=2)
        backward = _between(cluster, asked + rows + servers * HEAD_BYTES, 0.0, rounds=0)
        return Cost(
            in_forward=Phase(forward, cluster.move_pace, Wait.AT_ONCE),
            in_backward=Phase(backward, cluster.move_pace, Wait.AT_ONCE),
            backward_s=-min(product.own_s, layer.backward_s) + product.s_per_row * layer.rows,
            held=0.0,
            update=Update(main=0.0, host=1 / servers),
        )

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        ((name, module),) = place.layers.items()
        if type(module) is not nn.Embedding:
            raise TypeError(f"{label}: not a plain nn.Embedding, but {type(module)}")
        assert place.ways.tables is not None and isinstance(module.weight, nn.Parameter)
        rows = place.ways.tables.give(f"{name}.weight", module.weight, place.weighs)
        run_by(module, _ServedTable(name, module, module.weight, rows, place.weighs))
        return []

    def release(self, place: Place, transfers: Sequence[Transfer]) -> None:
        (module,) = place.layers.values()
        restore(run_by_itself(module))


def _between(cluster: Cluster, out: float, back: float, rounds: int) -> Traffic:
    """Return the traffic if each worker sends and gets so many bytes, divided over all servers."""
    workers, servers = cluster.size, len(cluster.servers)
    of_worker, of_server = (out, back), (back * workers / servers, out * workers / servers)
    sent, received = zip(*[of_worker] * workers, *[of_server] * servers, strict=True)
    afar = [
        sum(host != other for other in cluster.servers) / servers for host in cluster.topology.hosts
    ]
    afar += [
        sum(host != other for other in cluster.topology.hosts) / workers for host in cluster.servers
    ]
    leaving = tuple(nbytes * part for nbytes, part in zip(sent, afar, strict=True))
    return Traffic(sent, received, rounds, leaving)


@final
class _ServedTable:
    """A table on servers, for the embedding that looks up its rows."""

    def __init__(
        self,
        name: str,
        module: nn.Embedding,
        weight: nn.Parameter,
        table: TableRows,
        weighs: Weighing,
    ) -> None:
        self.name, self.weight, self._weighs = name, weight, weighs
        self._table, self._padding, self._rows = table, module.padding_idx, module.num_embeddings

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids."""
        distinct, place = torch.unique(ids.long(), return_inverse=True)
        if len(distinct) and not 0 <= int(distinct[0]) <= int(distinct[-1]) < self._rows:
            raise IndexError(f"an id is not one of the table's {self._rows} rows")
        # the part is empty, but autograd needs it as an input
        with torch._C.DisableTorchFunctionSubclass():
            rows: Tensor = _Pulled.apply(distinct, self.weight, self)  # type: ignore[no-untyped-call]
        return F.embedding(place, rows)

    def pull(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, which must be different and ascending."""
        return self._table.pull(ids)

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        """Send the rows' gradients to the servers, without the padding's."""
        if self._padding is not None:
            gradients = gradients.masked_fill((ids == self._padding).unsqueeze(1), 0.0)
        weight = self._weighs()
        self._table.push(ids, gradients if weight is None else gradients * weight)


class _Pulled(torch.autograd.Function):
    """Pulls rows from the servers, and pushes their gradients there."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, part: Tensor, table: _ServedTable) -> Tensor:
        ctx.ids, ctx.table = ids, table
        return table.pull(ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        refuse_second_derivative(ctx.table.name)
        ctx.table.push(ctx.ids, grad)
        return None, None, None
