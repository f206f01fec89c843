"""Replicate: every rank holds the layer, and ranks sum its gradients, one bucket at a time.

This is the general way; it serves every layer. It costs as much as its exchange states, for the
gradients and a few numbers more. One flag a parameter says whether the parameter was used: if no
rank used it, it keeps the gradient it had (None, usually), as in one process. If ranks have unlike
numbers of rows, they send shares, and the sum is divided by their mean. Five numbers are the
round's mark (marks.py).

    4   a gradient lands      its hook divides it by P into the bucket's flat tensor; `.grad`
                              becomes a view of that
    5   the last one landed   flags and this rank's share are written after the gradients
    6                         and the round's mark, in one transfer of a round
    8   on a lane             the bucket's carrier has the exchange sum it
    11  on the lane           the sum of marks is checked, and the sum divided by the mean share
    12  backward ends         `.grad` of every used parameter is its view: the mean over ranks,
                              without another copy

Their numbers are the same in docs/ideas/walk-gradient.md, which follows one gradient all the way.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Carrier, Exchange, LiveBucket
from shoal.contracts.period import Period
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Mark, Round, Transfer
from shoal.core.cost import Cost, Phase
from shoal.core.facts import Cluster, LayerProfile
from shoal.core.pieces import lined_shape, shape_like
from shoal.core.role import Role
from shoal.strategies.carrier_terms import first_coded, profiles_coded_first
from shoal.strategies.landing import Landing, by_kind, mark, num_shares
from shoal.strategies.marks import can_tell, check, num_marks, put


@final
class Replicate(Strategy):
    """Sums the gradients of any layers over the ranks through an exchange."""

    name = "replicate"
    role = Role.BUCKET

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        return None

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        assert exchange is not None
        parameters, num_coded = profiles_coded_first(layers, exchange)
        itemsize = max(p.itemsize for p in parameters)
        num_control = len(parameters) + num_shares(itemsize) + num_marks(itemsize)
        numel = sum(p.numel for p in parameters) + num_control
        num_exact = sum(p.numel for p in parameters[num_coded:])
        shapes = tuple(p.shape for p in parameters[:num_coded])
        bucket = Bucket(numel, itemsize, control=(num_exact + num_control,), shapes=shapes)
        traffic = exchange.traffic(bucket, cluster.topology)
        before_s, after_s = exchange.coding_s(bucket, cluster, cluster.size)
        return Cost(
            in_backward=Phase(traffic, exchange.pace(cluster), before_s=before_s, after_s=after_s),
            backward_s=cluster.pack_s(bucket.nbytes, len(parameters)),
            memory_bytes=bucket.nbytes + exchange.memory_bytes(bucket, cluster.size),
        )

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        assert exchange is not None
        kinds = by_kind(place.parameters)
        return [
            BucketTransfer(parameters, exchange, place.ranks, label, place.period)
            for parameters in kinds
        ]


@final
class BucketLanding(Landing):
    """Gradients on their way into a bucket. `.grad` is a view of the bucket afterwards.

    Args:
        transfer: the transfer that the parameters belong to.
        parameters: by name.
        views: views of the bucket, in each parameter's shape.
        flat: the bucket.
        ranks: number of ranks that add to its sums.
    """

    def __init__(
        self,
        transfer: Transfer,
        parameters: Mapping[str, nn.Parameter],
        views: Mapping[nn.Parameter, Tensor],
        flat: Tensor,
        ranks: int,
    ) -> None:
        self._views = views
        super().__init__(transfer, parameters, flat, ranks)

    def take(self, parameter: nn.Parameter, backward: Round) -> bool:
        view, gradient = self._views[parameter], parameter.grad  # gradient 4
        if gradient is None:
            view.zero_()
            return False
        self.bring(gradient.detach(), view)
        # another tensor of the same memory, because model.to() and others may set its `.data`
        parameter.grad = view.detach()
        return True


@final
class BucketTransfer(Transfer):
    """Gradients of one dtype and device, flat, then a flag for each, the shares and the mark."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        exchange: Exchange,
        ranks: int,
        label: str,
        period: Period | None = None,
    ) -> None:
        self.label, self.period = label, period
        self.native = exchange.native
        self._ranks = ranks
        parameters, coded = first_coded(parameters, exchange)
        first, numels = next(iter(parameters.values())), [p.numel() for p in parameters.values()]
        sizes = [sum(numels), len(numels), num_shares(first.itemsize), num_marks(first.itemsize)]
        self._flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._gradients, self._flags, self._shares, self._marks = self._flat.split(sizes)
        self.tells = can_tell(self._flat, ranks)
        self._mark: Mark | None = None  # mark of the round that is packed
        by_name = {name: p.numel() for name, p in coded.items()}
        shapes = {name: lined_shape(p) for name, p in coded.items()}
        live = LiveBucket.even(self._flat, by_name, ranks, shapes)
        self.carrier: Carrier = exchange.carrier(live)
        pieces = self._gradients.split(numels)
        self._views = {
            p: shape_like(piece, p) for piece, p in zip(pieces, parameters.values(), strict=True)
        }
        self._used = [False] * len(numels)  # whether this rank used each parameter
        self._landing = BucketLanding(self, parameters, self._views, self._flat, ranks)

    def pack(self, backward: Round) -> None:
        self._used = self._landing.close(backward)  # gradient 5
        mark(self._flags, self._used)
        self._landing.weigh([self._gradients], self._shares, backward)
        self._mark = backward.mark(self)
        put(self._mark, [self._marks])  # gradient 6

    def run(self, comm: Comm) -> None:
        self.carrier.reduce(comm)  # gradient 8
        self.carrier.gather(comm)
        check(self._mark, self._marks, comm)  # gradient 11
        self._landing.divide(self._gradients, self._shares)

    def publish(self) -> None:
        used = self._used if all(self._used) else self._flags.tolist()  # gradient 12
        for (parameter, view), users in zip(self._views.items(), used, strict=True):
            if users and parameter.grad is None:  # this rank had no gradient for it
                parameter.grad = view.detach()
        self._landing.open()

    def gather_parts(self, names: Set[str]) -> None:
        self._landing.gather(names)

    def kept(self) -> Sequence[Tensor]:
        held = () if self.period is None else self.period.tensors()
        return [self._flat, *self.carrier.tensors(), *held]

    def release(self) -> None:
        self._landing.release()
