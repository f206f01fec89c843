"""Local steps: each rank trains by itself, and every H steps all ranks come together.

    1  H steps      each rank steps by its own gradients; nothing is sent
    2  pack         as a step ends: the bucket, which holds θ_old, becomes θ_old − θ
    3  on a lane    ranks tell their rows; each difference is multiplied by its rank's share of
                    all rows; the exchange's first half brings the sums to the owners of slices
    4  the owner    makes new values of its slice by the outer rule (core/outer_step.py); it alone
                    has that slice's momentum
    5  on the lane  the exchange's second half brings new values to all ranks
    6  publish      parameters become the new values; with a lag they also keep their changes
                    since 2

The bytes are the same as for `replicate` by the same exchange, every H steps, and a message of 16
bytes a rank. The bucket holds θ_old between rounds; that is the memory of one copy of the
parameters. During the exchange there is a second one, and with a lag a third. Momentum is divided
by P.

Ranks of an island step as one (features/local_rounds.py): each has the island's θ. The sum by the
ranks' shares of rows is then the mean over islands by their shares, with nothing else to do here.

With a codec, differences and changes travel as codes. The error of each code is kept and added to
the next, as it is for gradients (codecs/coded_exchange.py).

Guarded by tests/equivalence/test_local_steps.py and test_islands.py. References:
core/outer_step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn

from shoal.contracts.batch import same_batch
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import (
    UNSENT,
    Carrier,
    LiveBucket,
    Span,
    SplitExchange,
    StateDict,
)
from shoal.contracts.transfer import Round, Transfer
from shoal.core.errors import RanksDiffer, UsageError
from shoal.core.outer_step import Outer
from shoal.core.pieces import cut, line, shape_like
from shoal.strategies.carrier_terms import first_coded


class RowCounter(Protocol):
    """A counter of this rank's rows."""

    def own(self) -> float:
        """Return the number of rows so far."""

    def first_batch(self) -> float:
        """Return a digest of the first batch; 0 if there is none, or if ranks may have the same."""


@dataclass(frozen=True, eq=False)
class _PackedRound:
    """A round that travels, from `pack` to `publish`."""

    before: Tensor  # θ_old, flat
    left: Sequence[Tensor]  # parameters as they were packed, if steps go on meanwhile
    told: tuple[float, ...]  # rows since the last round, number of rounds, first batch's digest
    rates: Mapping[str, float]  # learning rates, for slowmo
    momentum: Tensor  # momentum of the own slice, which the outer rule changes


@final
class Velocity:
    """The outer rule's v of one rank's slice. With a quorum rank 0 has all.

    Args:
        own: the slice.
        spans: the parts of parameters that the slice holds.
    """

    def __init__(self, own: Tensor, spans: Sequence[Span]) -> None:
        wide = torch.float32 if own.itemsize < 4 else own.dtype
        self.momentum = torch.zeros_like(own, dtype=wide)
        self.rates: Mapping[str, float] = {}  # learning rates at the last round
        self._spans = spans

    def rescale(self, momentum: Tensor, rates: Mapping[str, float]) -> None:
        """Convert momentum from the last round's learning rates to these."""
        for span, part in self._parts(momentum):
            before, now = self.rates.get(span.name, 0.0), rates.get(span.name, 0.0)
            if before > 0 and now > 0 and before != now:
                part.mul_(now / before)

    def load(self, state: Mapping[str, Mapping[str, Tensor]], names: Collection[str]) -> None:
        """Load the state of parameters of these names. Parameters without state begin anew."""
        for span, part in self._parts(self.momentum):
            known = state.get(span.name)
            if known is None:
                part.zero_()
            else:
                part.copy_(known["momentum"][span.start : span.stop])
        self.rates = {
            name: float(known["rate"])
            for name, known in state.items()
            if name in names and "rate" in known
        }

    def _parts(self, own: Tensor) -> list[tuple[Span, Tensor]]:
        """Pair the slice's parts with the spans of the parameters that they hold."""
        parts = own.split([span.stop - span.start for span in self._spans])
        return list(zip(self._spans, parts, strict=True))


@final
class LocalTransfer(Transfer):
    """Parameters of one dtype and device, flat, with the values that all ranks have in common.

    Args:
        parameters: by dotted name.
        exchange: the exchange that carries the bucket.
        place: this rank, and the number of ranks.
        label: the transfer's name in messages.
        outer: the outer rule for that many ranks.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        exchange: SplitExchange,
        place: tuple[int, int],
        label: str,
        outer: Outer,
    ) -> None:
        (rank, ranks), self.label, self._outer = place, label, outer
        self.native = exchange.native
        self.parameters, coded = first_coded(parameters, exchange)
        listed = list(self.parameters.values())
        self._flat = torch.cat([line(p, p) for p in listed])
        numels = {name: p.numel() for name, p in self.parameters.items()}
        parts = self._flat.split(list(numels.values()))
        self._views = [shape_like(part, p) for part, p in zip(parts, listed, strict=True)]
        of_codec = {name: numels[name] for name in coded}
        self.carrier: Carrier = exchange.carrier(LiveBucket.even(self._flat, of_codec, ranks))
        self._own = cut(self._flat, ranks)[rank]
        spans = LiveBucket.even(self._flat, numels, ranks).spans  # the spans of every rank
        self._velocity = Velocity(self._own, spans[rank])
        self._packed: _PackedRound | None = None  # set between `pack` and `publish`
        self._is_lossy = not self.carrier.exact  # whether a codec has lost something so far
        self._packed_rows, self._times = 0.0, 0  # this rank's rows and rounds at the last pack
        self.counted: RowCounter  # set before the first round
        self.learning: Callable[[], Mapping[int, float]] = dict  # rates now, by id of a parameter

    @property
    def _listed(self) -> list[Tensor]:
        return list(self.parameters.values())

    @torch.no_grad()
    def pack(self, backward: Round) -> None:
        listed, rows = self._listed, self.counted.own()
        before = self._flat.clone()
        torch._foreach_sub_(self._views, listed)
        slowed = self._outer.rule == "slowmo"
        self._packed = _PackedRound(
            before,
            [p.detach().clone() for p in listed] if self.cadence.lag else [],
            (rows - self._packed_rows, float(self._times), self.counted.first_batch()),
            self._learning_rates() if slowed else {},
            self._velocity.momentum.clone(),
        )
        self._packed_rows, self._times = rows, self._times + 1

    def _learning_rates(self) -> dict[str, float]:
        rates = self.learning()
        return {name: rates.get(id(p), 0.0) for name, p in self.parameters.items()}

    def run(self, comm: Comm) -> None:
        packed = self._packed
        assert packed is not None
        self._flat.mul_(self._share(packed.told, comm))
        self.carrier.reduce(comm)
        before = cut(packed.before, comm.size)[comm.rank]
        momentum = packed.momentum
        self._velocity.rescale(momentum, packed.rates)
        new = self._outer.step(before.to(momentum.dtype), self._own.to(momentum.dtype), momentum)
        if self.carrier.exact:
            self._own.copy_(new)
            if self._is_lossy:  # the codec went away since
                unsent = self.carrier.kept(UNSENT, comm.rank)
                self._own[: len(unsent)].add_(unsent)
                unsent.zero_()
                self._is_lossy = False
            self.carrier.gather(comm)
        else:
            self._gather_changes(new, before, packed.before, comm)

    def _gather_changes(self, new: Tensor, before: Tensor, common: Tensor, comm: Comm) -> None:
        """Bring the own slice's changes to all ranks through a codec, and keep its error."""
        self._flat.copy_(common)
        unsent = self.carrier.kept(UNSENT, comm.rank)
        num = len(unsent)  # the values after these travel exactly
        changes = new[:num].to(unsent.dtype) - before[:num] + unsent
        self._own[num:].copy_(new[num:])
        self.carrier.gather_changes(changes, comm)
        torch.sub(changes, self._own[:num] - before[:num], out=unsent)

    def _share(self, own: tuple[float, ...], comm: Comm) -> float:
        """Return this rank's share of all ranks' rows."""
        told = torch.zeros(comm.size, len(own), dtype=torch.float64, device=self._flat.device)
        told[comm.rank] = torch.tensor(own, dtype=torch.float64, device="cpu")
        comm.all_reduce(told)
        rows, times, batches = told.T.tolist()
        for rank, number in enumerate(times):
            if number != times[0]:
                raise RanksDiffer(
                    f"rank {rank} and rank 0 are at different rounds of local steps",
                    where=self.label,
                    got=f"rank {rank}: round {number:g}",
                    expected=f"as on rank 0: round {times[0]:g}",
                    do="make as many steps on every rank",
                    rank=rank,
                )
        if not times[0] and comm.size > 1 and len(set(batches)) == 1 and batches[0]:
            raise same_batch(comm.size)
        total = sum(rows)
        return rows[comm.rank] / total if total else 1 / comm.size

    @torch.no_grad()
    def publish(self) -> None:
        packed, listed = self._packed, self._listed
        assert packed is not None
        if packed.left:
            torch._foreach_add_(listed, self._views)
            torch._foreach_sub_(listed, list(packed.left))
        else:
            torch._foreach_copy_(listed, self._views)
        self._velocity.momentum, self._velocity.rates = packed.momentum, packed.rates
        self._packed = None

    def common(self, *, latest: bool = False) -> Mapping[str, Tensor]:
        """Return the common values of all parameters, by name, as views that must be read at once.

        These are the values from the start of the running round. With `latest` they are the newest
        that an exchange has brought, published or not. Then no lane may still be at work.
        """
        packed = None if latest else self._packed
        flat = self._flat if packed is None else packed.before
        listed = self.parameters.items()
        parts = flat.split([p.numel() for _, p in listed])
        return {name: shape_like(part, p) for (name, p), part in zip(listed, parts, strict=True)}

    def begin(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Begin a round with the parameters as they are, and the outer rule's state.

        Args:
            state: as `state` returns it; {} for none. Parameters of other buckets are skipped.

        Raises:
            UsageError: the state belongs to parameters of other sizes.
        """
        for name, p in self.parameters.items():
            numel = state[name]["momentum"].numel() if name in state else p.numel()
            if numel != p.numel():
                raise UsageError(
                    "the outer rule's state is that of another model",
                    where=f"parameter {name}",
                    got=f"{numel} elements",
                    expected=str(p.numel()),
                    do="load it into a model that is made with the same sizes",
                )
        with torch.no_grad():
            torch._foreach_copy_(self._views, self._listed)
            self._velocity.load(state, self.parameters)
        self._packed, self._packed_rows = None, self.counted.own()

    def state(self, comm: Comm) -> StateDict:
        """Gather the outer rule's latest state on every rank, by parameter name (a collective).

        "momentum" is flat, in the order of the parameter's memory. "rate" is SlowMo's.
        """
        latest = self._packed or self._velocity
        momentum, rates = latest.momentum, latest.rates
        whole = torch.zeros_like(self._flat, dtype=momentum.dtype)
        cut(whole, comm.size)[comm.rank].copy_(momentum)
        comm.all_reduce(whole)
        parts = whole.split([p.numel() for p in self.parameters.values()])
        found = {n: {"momentum": part} for n, part in zip(self.parameters, parts, strict=True)}
        for name, rate in rates.items():
            found[name]["rate"] = torch.tensor(rate, dtype=torch.float64, device="cpu")
        return found

    @property
    def round_number(self) -> int:
        """Number of rounds that this rank has come to."""
        return self._times

    def kept(self) -> Sequence[Tensor]:
        packed = self._packed
        under_way = [] if packed is None else [packed.before, *packed.left, packed.momentum]
        return [self._flat, self._velocity.momentum, *under_way, *self.carrier.tensors()]

    def release(self) -> None:
        return
