"""Sparse: the rows of gradients that are sparse tensors go to every rank.

The gradient of an embedding with `sparse=True` is U different ids and a row of D numbers for each.
A rank sends U·(4 + D·s)·(P−1) bytes, instead of 2·V·D·s·(P−1)/P. `.grad` is still a sparse tensor,
because SparseAdam needs one. Several tables go together.

    1  a gradient lands      it stays where it is, in `.grad`
    2  the last one landed   the gradients are kept for the lane, with this rank's share
    3  on a lane             rows of the same id are added up, and multiplied by the share
    4  on a lane             8 bytes a table, and 8 for the share, tell each peer how many rows
                             come; ids and rows of all ranks are gathered, in rank order
    5  on a lane             they are added up by id: the global mean, alike on every rank
    6  backward ends         `.grad` of every used parameter is this mean

docs/ideas/walk-gradient.md has the same way for a dense gradient: 1 and 2 are its 4 and 5, 3 to 5
stand for its 8 to 11, and 6 is its 12. Some gradients come dense: a bias in the same layer has one,
or a table that the same backward also reads whole. These go whole.

Reference: Sergeev and Del Balso, "Horovod", 2018, and its allreduce of IndexedSlices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Round, Transfer
from shoal.core.cost import Cost, Phase, Traffic
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, LayerProfile
from shoal.core.host_copies import to_host
from shoal.core.role import Role
from shoal.core.rows import in_rows
from shoal.exchange.direct import Direct
from shoal.profiling.sparse import SparseFacts, SparseProbe
from shoal.strategies.landing import Landing, at_least, by_kind

_NUMBER_BYTES = 8  # bytes of a row count, or of the share
_UNUSED, _DENSE = -1, -2  # stand in place of a number of rows
_MOST_ROWS = 1 << 31  # ids of 4 bytes can count so many rows


@final
class Sparse(Strategy):
    """Gathers the rows of sparse gradients on every rank."""

    name = "sparse"
    role = Role.ROWS
    probes = (SparseProbe,)
    takes_sparse = True

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        if not any(parameter.sparse for parameter in layer.parameters):
            return "its gradient is dense"
        return None

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        parameters = [p for layer in layers for p in layer.parameters]
        kinds = len({p.itemsize for p in parameters})  # each goes by itself
        id_bytes = _id_dtype([p.shape for p in parameters]).itemsize
        nbytes = float(_NUMBER_BYTES * (kinds + len(parameters)))
        before_s = after_s = 0.0
        for layer in layers:
            facts = layer.measured(SparseFacts)
            dense = [p for p in layer.parameters if not p.sparse]
            row_bytes = sum(p.nbytes / p.shape[0] for p in layer.parameters if p.sparse)
            nbytes += facts.rows * (id_bytes + row_bytes) + sum(p.nbytes for p in dense)
            before_s += facts.own_s
            after_s += facts.row_s * facts.rows * cluster.size
        topology, others = cluster.topology, cluster.size - 1
        sent = (nbytes * others,) * cluster.size
        leaving = tuple(
            nbytes * (cluster.size - len(topology.ranks_on[host])) for host in topology.hosts
        )
        return Cost(
            in_backward=Phase(
                Traffic(sent, sent, rounds=2, leaving=leaving),
                cluster.pace(str(Direct())),  # its gathers are that exchange's second half
                before_s=before_s,
                after_s=after_s,
            ),
            memory_bytes=nbytes * cluster.size,
        )

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        kinds = by_kind(place.parameters)
        return [SparseTransfer(parameters, place.ranks, label) for parameters in kinds]


@final
class RowLanding(Landing):
    """Gradients of tables, which stay in `.grad` and are kept for the lane.

    Args:
        transfer: the transfer that the parameters belong to.
        parameters: by name.
        ranks: number of ranks that add to the sums.
    """

    def __init__(
        self, transfer: Transfer, parameters: Mapping[str, nn.Parameter], ranks: int
    ) -> None:
        self.gradients: dict[nn.Parameter, Tensor] = {}
        nothing = next(iter(parameters.values())).detach().new_empty(0)
        super().__init__(transfer, parameters, nothing, ranks, sparse=True)

    def take(self, parameter: nn.Parameter, backward: Round) -> bool:
        gradient = parameter.grad
        if gradient is None:
            return False
        if gradient.layout is not torch.strided and (
            gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1
        ):
            raise UsageError(
                "a sparse gradient is exchanged by rows, and this one has none",
                where=f"parameter {self.names[parameter]}",
                got=f"{gradient.layout} of shape {tuple(gradient.shape)}",
                expected="torch.sparse_coo with one sparse dimension, the first",
                do="make it dense: gradient.to_dense() in the function that gives it",
            )
        self.gradients[parameter] = gradient.detach()
        return True


@final
class SparseTransfer(Transfer):
    """Rows of the gradients of several tables, of one dtype and device."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: int, label: str) -> None:
        self.label = label
        self._parameters = tuple(parameters.values())
        self._ranks = ranks
        self._ids = _id_dtype([parameter.shape for parameter in self._parameters])
        self._packed: tuple[list[Tensor | None], float] | None = None  # and this rank's share
        self._sums: list[Tensor | None] = []
        self._landing = RowLanding(self, parameters, ranks)

    def pack(self, backward: Round) -> None:
        self._landing.close(backward)
        landed = self._landing.gradients
        gradients = [landed.get(parameter) for parameter in self._parameters]
        self._packed = gradients, backward.share
        landed.clear()

    def run(self, comm: Comm) -> None:
        assert self._packed is not None
        gradients, share = self._packed
        own = [_TableGradient.of(gradient) for gradient in gradients]  # 3
        used = [table for table in own if table.count != _UNUSED]
        nothing = self._parameters[0].detach().new_empty(0)
        ids = torch.cat([nothing.to(self._ids), *(table.ids for table in used)]).to(self._ids)
        values = torch.cat([nothing, *(table.values.reshape(-1) for table in used)])
        values.mul_(at_least(share) / self._ranks)
        header = torch.tensor(
            [share, *(table.count for table in own)], dtype=torch.float64, device="cpu"
        )
        headers, of_ranks = self._gather(comm, header, ids, values)  # 4
        mean_share = at_least(sum(float(header[0]) for header in headers) / comm.size)
        parts = [self._tables(*arrived) for arrived in zip(headers, *of_ranks, strict=True)]
        self._sums = [
            _sum(parameter, tables, mean_share)
            for parameter, *tables in zip(self._parameters, *parts, strict=True)
        ]  # 5

    def _gather(
        self, comm: Comm, header: Tensor, ids: Tensor, values: Tensor
    ) -> tuple[list[Tensor], tuple[list[Tensor], list[Tensor]]]:
        """Gather every rank's header, ids and values, by rank.

        A peer posts its receives when it knows the sizes.
        """
        headers = [header if r == comm.rank else torch.empty_like(header) for r in range(comm.size)]
        pending = [comm.receive(headers[r], r) for r in comm.others]
        sends = [comm.send(header, r) for r in comm.others]
        comm.finish(pending)
        all_ids, all_values = [ids] * comm.size, [values] * comm.size
        pending = []
        for r in comm.others:
            num_ids, num_values = self._sizes(headers[r])
            all_ids[r], all_values[r] = ids.new_empty(num_ids), values.new_empty(num_values)
            pending += [comm.receive(p, r) for p in (all_ids[r], all_values[r]) if len(p)]
        # copied from a GPU once for all peers
        own = [to_host(part) for part in (ids, values) if len(part)]
        pending += comm.send_in_turn((r, own) for r in comm.others if own)
        comm.finish([*pending, *sends])
        return headers, (all_ids, all_values)

    def _counts(self, header: Tensor) -> list[int]:
        return [int(count) for count in header[1:].tolist()]

    def _sizes(self, header: Tensor) -> tuple[int, int]:
        """Return how many ids, and how many values, follow a header."""
        counts = self._counts(header)
        num_values = sum(map(_num_values, counts, self._parameters))
        return sum(max(0, count) for count in counts), num_values

    def _tables(self, header: Tensor, ids: Tensor, values: Tensor) -> list[_TableGradient]:
        """Divide a rank's ids and values by table."""
        counts = self._counts(header)
        its_ids = ids.split([max(0, count) for count in counts])
        its_values = values.split(list(map(_num_values, counts, self._parameters)))
        return list(map(_TableGradient, counts, its_ids, its_values))

    def publish(self) -> None:
        for parameter, gradient in zip(self._parameters, self._sums, strict=True):
            if gradient is not None:  # 6
                parameter.grad = gradient
        self._packed, self._sums = None, []
        self._landing.open()

    def gather_parts(self, names: Set[str]) -> None:
        self._landing.gather(names)

    def kept(self) -> Sequence[Tensor]:
        return []

    def release(self) -> None:
        self._landing.release()


@dataclass(frozen=True)
class _TableGradient:
    """A rank's gradient of one table: ids, and values by row; or all of its values."""

    count: int  # number of rows, or _UNUSED or _DENSE
    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, gradient: Tensor | None) -> _TableGradient:
        """Make a rank's gradient of a table, with each id once."""
        if gradient is None:
            nothing = torch.empty(0, dtype=torch.int32, device="cpu")
            return cls(_UNUSED, nothing, nothing)
        if gradient.layout is torch.strided:
            return cls(_DENSE, gradient.new_empty(0, dtype=torch.int32), gradient)
        once = gradient.coalesce()
        ids = once.indices()[0]
        return cls(len(ids), ids, once.values())


def _num_values(count: int, parameter: Tensor) -> int:
    if count < 0:
        return parameter.numel() if count == _DENSE else 0
    return count * parameter.shape[1:].numel()


def _sum(parameter: Tensor, tables: Sequence[_TableGradient], mean_share: float) -> Tensor | None:
    """Add up all ranks' rows of a table, in rank order; return None if no rank used it."""
    used = [table for table in tables if table.count != _UNUSED]
    if not used:
        return None
    if any(table.count == _DENSE for table in used):
        total = torch.zeros_like(parameter)
        for table in used:
            if table.count == _DENSE:
                total.add_(table.values.view(parameter.shape))
            else:
                rows = table.values.view(table.count, *parameter.shape[1:])
                total.index_put_((table.ids.long(),), rows, accumulate=True)
        return total.div_(mean_share)
    ids = torch.cat([table.ids for table in used]).long()
    values = torch.cat([table.values for table in used])
    if mean_share != 1:
        values.div_(mean_share)
    rows = values.view(len(ids), *parameter.shape[1:])
    return in_rows(ids, rows, parameter.shape).coalesce()


def _id_dtype(shapes: Sequence[Sequence[int]]) -> torch.dtype:
    most = max((shape[0] for shape in shapes if shape), default=0)
    return torch.int32 if most < _MOST_ROWS else torch.int64
