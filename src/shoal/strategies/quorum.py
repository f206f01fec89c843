"""Rounds with a quorum: local steps that wait for no slow or stopped rank longer than a grace time.

    1  H steps     each rank steps by its own gradients; a slow rank makes fewer if it is called
    2  pack        as a step ends: Δ_r = θ_old − θ_r, of all parameters
    3  on a lane   Δ_r and this rank's rows go to rank 0 (round_keeper.py), which answers with θ_new
    4  publish     if the rank's steps are in θ_new:   θ_r = θ_new
                   if they came too late:              θ_r = θ_new + (θ_r − θ_old)
                   and its rows count with the next round

So a difference that comes too late is not lost. It is the residual of the next round.

There is one transfer for all parameters, because a round has the same members for all of them. Each
rank sends all weights to rank 0 and gets as many back, so rank 0's link carries P − 1 times that
each way. Memory: a copy of the weights at the host, and two while a round is under way.
Guarded by tests/equivalence/test_quorum.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from shoal.contracts.attendance import MainWait
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import LiveBucket, StateDict
from shoal.contracts.transfer import Round, Transfer
from shoal.core.outer_step import Outer
from shoal.core.pieces import line, shape_like
from shoal.strategies.local import RowCounter, Velocity
from shoal.strategies.round_keeper import Keeper, KeptWeights
from shoal.strategies.round_mail import Mail, MailChannel, MailKind
from shoal.strategies.round_members import RoundMembers
from shoal.strategies.round_office import RoundOffice

_MEETING = "local steps: ranks meet outside of a round"


@final
class _Flat:
    """Parameters of one dtype, as one line at the host."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.values = self.copy()
        numels = {name: p.numel() for name, p in parameters.items()}
        self.spans = LiveBucket.even(self.values, numels, 1).spans[0]

    def copy(self) -> Tensor:
        """Return a copy of the parameters as they are."""
        return torch.cat([line(p, p).to("cpu") for p in self.parameters.values()])

    def views(self, flat: Tensor) -> Mapping[str, Tensor]:
        """Return a line's parts in the shapes of the parameters, by name."""
        parts = flat.split([p.numel() for p in self.parameters.values()])
        items = self.parameters.items()
        return {name: shape_like(part, p) for (name, p), part in zip(items, parts, strict=True)}

    def put(self, flat: Tensor) -> None:
        """Give the parameters the values of a line."""
        for name, view in self.views(flat).items():
            self.parameters[name].copy_(view)


@dataclass(frozen=True, eq=False)
class _PackedSteps:
    """This rank's steps under way, from `pack` to `publish`."""

    steps: Mail
    rows: float  # all rows so far
    weights: Mail | None = None  # the answer


def _go_on(number: int, main: MainWait) -> None:
    """Do nothing. No rank waits in vain for a rank that is elsewhere: its rounds close without."""


@final
class QuorumTransfer(Transfer):
    """All parameters, with the values that this rank knows as the ones that all have in common.

    Args:
        channel: an idle channel of the ranks.
        comm: the ranks, for what all of them do together outside of rounds.
        outer: the outer rule, with a quorum.
    """

    label = "all weights"

    def __init__(self, channel: Comm, comm: Comm, outer: Outer) -> None:
        self._channel, self._comm, self._outer = channel, comm, outer
        self.office = RoundOffice(channel)
        self.parameters: dict[str, nn.Parameter] = {}
        self._flats: list[_Flat] = []
        self._packed: _PackedSteps | None = None
        self.version = 0  # number of the round that this rank is in
        self._first = 0  # number of the first round
        self._missed = 0  # rounds that this rank's lane has not noted
        self._counted_rows = 0.0  # rows of steps that are in the weights in common
        self.counted: RowCounter  # set before the first round
        self.learning: Callable[[], Mapping[int, float]] = dict  # rates now, by id of a parameter

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Serve these parameters, too. Only before `start`."""
        self.parameters |= parameters

    @torch.no_grad()
    def start(self) -> None:
        """Begin to receive messages. Every rank serves the same parameters."""
        kinds: dict[torch.dtype, dict[str, nn.Parameter]] = {}
        for name, p in self.parameters.items():
            kinds.setdefault(p.dtype, {})[name] = p
        self._flats = [_Flat(kind) for kind in kinds.values()]
        channel = MailChannel(self._channel, self._values)
        keeper = None
        if self._comm.rank == 0:
            outer = self._outer
            assert outer.quorum is not None
            members = RoundMembers(self._comm.size, outer.quorum, outer.grace_s)
            velocities = [Velocity(flat.values, flat.spans) for flat in self._flats]
            weights = KeptWeights(self._values, velocities, outer, self._learning_rates)
            keeper = Keeper(channel, members, weights, self.office.take)
        self.office.start(channel, keeper)

    @property
    def _values(self) -> list[Tensor]:
        return [flat.values for flat in self._flats]

    def _learning_rates(self) -> dict[str, float]:
        rates = self.learning()
        return {name: rates.get(id(p), 0.0) for name, p in self.parameters.items()}

    @property
    def round_number(self) -> int:
        """Number of rounds that have closed since the last `begin`, as far as this rank knows."""
        return self.version - self._first

    def has_call(self) -> bool:
        """Return whether the others wait for this rank's steps of its round."""
        return self.office.has_call(self.version)

    @torch.no_grad()
    def pack(self, backward: Round) -> None:
        self.office.in_round = True
        rows = self.counted.own()
        differences = [flat.values - flat.copy() for flat in self._flats]
        new_rows, batch = rows - self._counted_rows, self.counted.first_batch()
        steps = Mail(MailKind.STEPS, self.version, rows=new_rows, batch=batch, values=differences)
        self._packed = _PackedSteps(steps, rows)

    def run(self, comm: Comm) -> None:
        packed = self._packed
        assert packed is not None
        comm.journal.may_attend(_go_on)
        answer = self.office.exchange(packed.steps, comm)
        self._missed += answer.version - self.version - 1
        for _ in range(self._missed):  # ranks count their exchanges alike
            comm.journal.queued(f"exchange {self.label}")
        self._missed = 0
        self._packed = _PackedSteps(packed.steps, packed.rows, answer)

    @torch.no_grad()
    def publish(self) -> None:
        packed, self._packed = self._packed, None
        assert packed is not None and packed.weights is not None
        answer = packed.weights
        if answer.counts:
            self._counted_rows = packed.rows
            for flat, new in zip(self._flats, answer.values, strict=True):
                flat.put(new)
                flat.values = new
            self.version = answer.version
        else:
            self._take(answer.values, answer.version)
        self.office.in_round = False

    def _take(self, values: Sequence[Tensor], version: int) -> None:
        """Take newer weights in common, and keep this rank's own steps on top of them."""
        for flat, new in zip(self._flats, values, strict=True):
            flat.put(new + (flat.copy() - flat.values))
            flat.values = new
        self.version = version

    @torch.no_grad()
    def meet(self) -> None:
        """Bring every rank to the newest weights in common (a collective, outside of rounds)."""
        keeper = self.office.keeper
        version = self._comm.gather_objects(0 if keeper is None else keeper.version, _MEETING)[0]
        values = [torch.empty_like(own) for own in self._values]
        if keeper is not None:
            values = [own.clone() for own in keeper.weights.values]
        for value in values:
            self._comm.broadcast(value, root=0)
        if version > self.version:
            self._missed += version - self.version
            self._take(values, version)

    def common(self) -> Mapping[str, Tensor]:
        """Return the weights in common that this rank knows, by name, as views."""
        return {
            name: view for flat in self._flats for name, view in flat.views(flat.values).items()
        }

    @torch.no_grad()
    def begin(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Begin a round with the parameters as they are on all ranks (a collective).

        Args:
            state: the outer rule's, as `state` returns it; {} for none.
        """
        keeper = self.office.keeper
        own = 0 if keeper is None else keeper.version
        last = self._comm.gather_objects(own, "local steps: a round begins")[0]
        for flat in self._flats:
            flat.values = flat.copy()
        if keeper is not None:
            keeper.begin(self._values, last + 1)
            for velocity, flat in zip(keeper.weights.velocities, self._flats, strict=True):
                velocity.load(state, flat.parameters)
        self._missed += last - self.version
        self.version = self._first = last + 1
        self._packed = None
        self._counted_rows = self.counted.own()
        self._comm.gather_objects(None, "local steps: a round has begun")

    def state(self, comm: Comm) -> StateDict:
        """Bring the outer rule's state to every rank, by parameter name (a collective)."""
        keeper, found = self.office.keeper, StateDict()
        own = None if keeper is None else [dict(v.rates) for v in keeper.weights.velocities]
        rates = comm.gather_objects(own, "local steps: the outer rule's state")[0]
        for number, flat in enumerate(self._flats):
            wide = torch.float32 if flat.values.itemsize < 4 else flat.values.dtype
            momentum = torch.empty_like(flat.values, dtype=wide)
            if keeper is not None:
                momentum.copy_(keeper.weights.velocities[number].momentum)
            comm.broadcast(momentum, root=0)
            parts = momentum.split([p.numel() for p in flat.parameters.values()])
            found |= {n: {"momentum": part} for n, part in zip(flat.parameters, parts, strict=True)}
            for name, rate in rates[number].items():
                found[name]["rate"] = torch.tensor(rate, dtype=torch.float64, device="cpu")
        return found

    def kept(self) -> Sequence[Tensor]:
        keeper, packed = self.office.keeper, self._packed
        under_way = [] if packed is None else list(packed.steps.values)
        kept = [] if keeper is None else keeper.weights.values
        momenta = [] if keeper is None else [v.momentum for v in keeper.weights.velocities]
        return [*self._values, *under_way, *kept, *momenta]

    def release(self) -> None:
        return
