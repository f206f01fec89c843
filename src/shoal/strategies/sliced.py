"""Sliced: every rank owns a slice of each bucket, updates that slice alone, and sends the new
parameters back.

    1  a gradient lands   its hook divides it by P into the slices of its owners; the gradient
                          itself is freed (if several transfers share the parameter, by the last
                          of them)
    2  the last landed    the exchange's first half brings each slice's sum to its owner
                          (own_sums.py), while backward goes on
    3  optimizer.step()   returns at once; on the lane the owner updates its pieces
                          (optim/owners.py)
    4  on the same lane   the exchange's second half brings the new parameters to all ranks, while
                          the next forward runs

    slice of owner o  │ piece │ piece ···│ flags │ shares │ marks │ turn │

    a piece    the part of one parameter that o owns
    a flag     whether any rank used that parameter
    shares     the weights of ranks with unlike numbers of rows (landing.py)
    marks      show whether ranks differ where they must not (marks.py)
    the turn   this rank's purpose for the exchange (slice_control.py)

The bytes are the same as for `replicate` through the same exchange, but half of them hide under the
next forward. The update and the optimizer's state are divided by P. Flags and shares lie next to
their pieces. So the owner knows by itself which parameters no rank used, and does not update them,
as in one process. It also knows the ranks' weights. Gradients, fetched gradients and parameters
have one size on one channel. So a rank with another purpose would mix them up, and the turn shows
that. (Messages from servers have a channel of their own: there, ranks wait for such a rank.)

Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, section 5.1; CaffeOnSpark's socket exchange, in which every node is the master of
one slice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Carrier, Exchange, SplitExchange
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import OwnedTransfer, Round, Slice, Transfer, Turn
from shoal.core.cost import Cost, Direction, Phase, Update, Wait
from shoal.core.facts import Cluster, LayerProfile, Topology
from shoal.core.pieces import Piece, local_gradient, set_local_gradient
from shoal.core.role import Role
from shoal.profiling.updates import UpdateFacts, UpdateProbe
from shoal.strategies.carrier_terms import first_coded, profiles_coded_first
from shoal.strategies.landing import Landing, by_kind, mark
from shoal.strategies.marks import can_tell
from shoal.strategies.own_sums import OwnSums
from shoal.strategies.slice_bucket import SliceBucket, placed, width
from shoal.strategies.slice_control import SliceControl
from shoal.strategies.unsent_values import Unsent


@final
class Sliced(Strategy):
    """Sums gradients at their owners, and gathers the parameters that owners have updated."""

    name = "sliced"
    role = Role.OWNED
    probes = (UpdateProbe,)

    def takes(self, exchange: Exchange) -> bool:
        return isinstance(exchange, SplitExchange)

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        for parameter in layer.parameters:
            if (
                parameter.owner is not None
                and parameter.owner.given
                and parameter.owner.number >= cluster.size
            ):
                return (
                    f"only workers own here, but the placement gives {parameter.name} to a server"
                )
        return update_refusal(layer)

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        assert exchange is not None
        return owned_cost(layers, exchange, cluster, even(cluster.size), cluster.topology)

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        assert isinstance(exchange, SplitExchange)
        shares = even(place.ranks)
        return [
            SlicedTransfer(kind, exchange, place, shares, label)
            for kind in by_kind(place.parameters)
        ]


def update_refusal(layer: LayerProfile) -> str | None:
    """Return why owners cannot update the layer, or None.

    An optimizer may need whole tensors; a placement can give owners whole parameters.
    """
    update = layer.measured(UpdateFacts)
    if update.unread:
        would_not_wait = "would not wait for those that owners have updated"
        return f"its parameters are read by C++ code, it seems, which {would_not_wait}"
    if all(parameter.owner is not None for parameter in layer.parameters):
        return update.joint or None
    if update.whole and not update.joint:
        return f'{update.whole}; placement="round-robin" gives owners whole parameters'
    return update.whole or None


def even(ranks: int) -> tuple[float, ...]:
    """Return the same share for each rank."""
    return (1 / ranks,) * ranks


def owned_cost(
    layers: Sequence[LayerProfile],
    exchange: Exchange,
    cluster: Cluster,
    shares: Sequence[float],
    topology: Topology,
) -> Cost:
    """Estimate a site's cost for a worker, if each rank of the topology owns its share of it."""
    parameters, num_coded = profiles_coded_first(layers, exchange)
    itemsize = max(p.itemsize for p in parameters)
    rows = placed(
        [p.numel for p in parameters], [p.owner for p in parameters], shares, topology.workers
    )
    value_counts = [sum(stop - start for _, start, stop in row) for row in rows]
    widths = tuple(width(row, itemsize) for row in rows)
    largest = max(value_counts)
    coded = [sum(stop - start for i, start, stop in row if i < num_coded) for row in rows]
    control = tuple(whole - values for whole, values in zip(widths, coded, strict=True))
    bucket = Bucket(sum(widths), itemsize, widths, control)
    own_bytes = max(widths[: cluster.size]) * itemsize
    return_s = (bucket.nbytes + 2 * own_bytes) * cluster.pack_byte_s
    traffic, pace = exchange.traffic(bucket, topology), exchange.pace(cluster)
    there_s, back_s = exchange.coding_s(bucket, cluster, topology.size, topology.servers)
    if topology.servers:
        going, coming = traffic.one_way(topology.workers)
        out, back = Direction.OUT, Direction.IN
    else:
        going = coming = traffic.half
        out = back = Direction.BOTH
    return Cost(
        in_backward=Phase(going, pace, Wait.NEVER, out, before_s=there_s),
        # new parameters are copied out; own sums are kept, and own new values put in before
        after_step=Phase(coming, pace, direction=back, before_s=back_s, after_s=return_s),
        backward_s=cluster.pack_s(bucket.nbytes, len(parameters)),
        memory_bytes=bucket.nbytes + own_bytes + exchange.memory_bytes(bucket, topology.size),
        update=Update(
            main=0.0,
            lane=largest / sum(p.numel for p in parameters) if largest else 1.0,
            pieces=max(map(len, rows)),
        ),
    )


@final
class SliceLanding(Landing):
    """Gradients on their way into the slices of their owners. They are freed afterwards.

    Args:
        transfer: the transfer that the parameters belong to.
        parameters: by name.
        bucket: the bucket with these slices.
        sums: this rank's sums of its own pieces.
    """

    def __init__(
        self,
        transfer: OwnedTransfer,
        parameters: dict[str, nn.Parameter],
        bucket: SliceBucket,
        sums: OwnSums,
    ) -> None:
        self._owned_transfer, self._bucket, self._sums = transfer, bucket, sums
        self._is_begun = False  # whether the slices have anything of this backward
        flat = sums.coming.whole
        super().__init__(transfer, parameters, flat, bucket.workers, served=transfer.served)

    def take(self, parameter: nn.Parameter, backward: Round) -> bool:
        if not self._is_begun:
            backward.make_room(self._owned_transfer)
            self._bucket.open()
            self._is_begun = True
            self._sums.begin(set(self._owned_transfer.held))  # before this backward's
        gradient = local_gradient(parameter)
        for piece, value in self._bucket.places[parameter]:
            if gradient is None:
                value.zero_()
            else:
                self.bring(piece.of(gradient), value)
        if parameter in self._bucket.ends:  # earlier transfers have read their parts of it
            set_local_gradient(parameter, None)
        return gradient is not None

    def open(self) -> None:
        super().open()
        self._is_begun = False


@final
class SlicedTransfer(OwnedTransfer):
    """Gradients of one dtype and device in their owners' slices, and later the parameters."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        exchange: SplitExchange,
        place: Place,
        shares: Sequence[float],
        label: str,
    ) -> None:
        parameters, coded = first_coded(parameters, exchange)
        bucket = SliceBucket(parameters, place, shares)
        own = bucket.slices[place.rank]
        self.label, self.period = label, place.period
        self.native = exchange.native
        self.served = len(shares) > place.ranks
        self.parameters = tuple(parameters.values())
        self.owned, self.pieces = bucket.owned, bucket.owned[place.rank]
        self.held: set[nn.Parameter] = set()
        self._bucket = bucket
        self._sums = OwnSums(self.pieces, own, self.slice_of(place.rank))
        self.carrier: Carrier = exchange.carrier(bucket.live(coded))
        self._unsent: Unsent | None = None  # set while a codec may lose something
        if not self.carrier.exact:
            lossy = set(coded.values())
            may_lose = [piece for piece in self.pieces if piece.parameter in lossy]
            self._unsent = Unsent(self.carrier, may_lose, place.rank)
        bucket.close()
        # all ranks see a sum of marks only if each of them owns something
        self.tells = not self.served and all(self.owned) and can_tell(own.whole, bucket.workers)
        self._control = SliceControl(label, bucket.slices, own)
        self._landing = SliceLanding(self, parameters, bucket, self._sums)

    @property
    def exact(self) -> bool:
        return self.carrier.exact

    def pack(self, backward: Round) -> None:
        used = dict(zip(self.parameters, self._landing.close(backward), strict=True))
        self._sums.note_used(p for p in used if used[p])
        for owned, part in zip(self.owned, self._bucket.slices, strict=True):
            mark(part.flags, [used[piece.parameter] for piece in owned])
            if owned:
                self._landing.weigh(part.values, part.shares, backward)
        self._control.put_mark(backward.mark(self))
        self.held = set(self.parameters)

    def follow(self, held: set[nn.Parameter]) -> None:
        self._bucket.open()
        self._sums.begin(held)
        self._sums.forget_used()
        self.held = set(self.parameters)

    def run(self, comm: Comm) -> None:
        self._control.put_sum()
        self.carrier.reduce(comm)
        self._control.check_sum(comm)
        if self.pieces:
            self._landing.divide(self._sums.coming.sums, self._sums.coming.shares)
        self._sums.take_in()
        self._bucket.close()

    def publish(self) -> None:
        self._landing.open()

    def gradients(self) -> list[Tensor | None]:
        return self._sums.gradients()

    def gather(
        self, values: Sequence[Tensor], turn: Turn, comm: Comm
    ) -> list[tuple[Piece, Tensor]]:
        self._bucket.open()
        own = self._sums.coming
        in_changes = turn is Turn.VALUES and not self.exact
        if values and not in_changes:
            torch._foreach_copy_(list(own.values), list(values))
        own.flags.copy_(self._sums.total.flags)
        self._control.put_turn(turn)
        if in_changes:
            self._gather_changes(values, comm)
        else:
            self.carrier.gather(comm)
        if self._unsent is not None and self.exact and turn is Turn.VALUES:
            self._unsent.forget()
            if not self.carrier.passing:
                self._unsent = None
        if self._bucket.at_server:
            return self._bucket.known if in_changes else []
        self._control.check_turn(turn)
        return self._bucket.everything

    def _gather_changes(self, values: Sequence[Tensor], comm: Comm) -> None:
        """Bring the own pieces' changes to all ranks through a codec, and keep its error."""
        assert self._unsent is not None
        for piece, value in self._bucket.known:
            value.copy_(piece.of(piece.parameter))
        places, num_coded = self._sums.coming.values, len(self._unsent.pieces)
        for new, place in zip(values[num_coded:], places[num_coded:], strict=True):
            place.copy_(new)
        values, own = values[:num_coded], places[:num_coded]
        changes = self._unsent.changes(values, own)
        self.carrier.gather_changes(changes, comm)
        self._unsent.keep(values, own)

    def open_update(self, parameters: Collection[Tensor]) -> None:
        if self._unsent is not None:
            self._unsent.put_in(parameters)

    def slice_of(self, rank: int) -> Slice:
        return self._bucket.new_slice(rank)

    def used(self) -> set[nn.Parameter]:
        if self._bucket.at_server:
            return set()
        return {
            piece.parameter
            for owned, part in zip(self.owned, self._bucket.slices, strict=True)
            for piece, flag in zip(owned, self._sums.flags(owned, part), strict=True)
            if flag
        }

    def close_bucket(self) -> None:
        self._bucket.close()

    def gather_parts(self, names: Set[str]) -> None:
        self._landing.gather(names)

    def kept(self) -> Sequence[Tensor]:
        held = () if self.period is None else self.period.tensors()
        return [self._sums.total.whole, *self.carrier.tensors(), *held]

    def release(self) -> None:
        self._landing.release()
