"""Local steps: when ranks come together, and what they exchange in each step all the same.

    warm-up   for the first steps all ranks exchange gradients: each is the ordinary exact step
    then      every H steps weights come together (strategies/local.py); in each step the ranks of
              an island, which share a host, exchange gradients. Without islands nobody does

So the ranks of an island have the same weights and make the same steps, bit for bit: an island is
one rank. From one kind of step to the other nothing is copied but θ_old.

Costs a step of an island what `replicate` costs among as many ranks, over lanes of their own.
Guarded by tests/equivalence/test_islands.py and test_warmup.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from shoal.codecs.coded import exchange_named
from shoal.contracts.cadence import Cadence, Event
from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Transfer
from shoal.core.plan import Choice, Plan
from shoal.engine.common import Common
from shoal.rewrite.apply import PlacedSite
from shoal.session.running import Running
from shoal.strategies.geo import GeoTransfer
from shoal.strategies.local import LocalTransfer
from shoal.strategies.moving import OfState

NEVER = 1 << 62  # steps before the first round, as long as there is to be none


def set_off(
    transfers: Sequence[Transfer],
    optimizers: Sequence[Optimizer],
    steps: int,
    lag: int,
    after: int = 0,
) -> None:
    """Have transfers go every so many steps; of several optimizers, a step is one of each.

    With a lag they take turns.

    Args:
        transfers: of weights, and of state.
        optimizers: that make the steps.
        steps: of a round.
        lag: steps until what has come is taken over.
        after: steps of single optimizers before the first round.
    """
    learning, each = partial(_rates, optimizers), len(optimizers)
    for number, transfer in enumerate(transfers):
        phase = steps * number // len(transfers) if lag else 0
        transfer.cadence = Cadence(
            Event.STEP_ENDED, every=steps * each, phase=after + phase * each, lag=lag * each
        )
        if isinstance(transfer, LocalTransfer):
            transfer.learning = learning


def _rates(optimizers: Sequence[Optimizer]) -> dict[int, float]:
    """Learning rates as they are now, by the id of a parameter."""
    return {
        id(parameter): float(group["lr"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@dataclass(frozen=True)
class Company:
    """Ranks that exchange gradients in each step.

    Args:
        size: how many.
        counts: the channel on which they tell their rows; None where these are not weighed.
        lanes: channels of their own, if they are of one host.
    """

    size: int
    counts: Comm | None
    lanes: tuple[Comm, ...] = ()


def island_of(comm: Comm, plan: Plan, prefix: str) -> Company | None:
    """The ranks of this one's host, where several step together (a collective)."""
    if plan.outer is None or not plan.outer.islands:
        return None
    ranks = comm.topology.ranks_on[comm.topology.hosts[comm.rank]]
    if len(ranks) == 1:
        return None
    beside, prefix = comm.group(ranks), f"{prefix}-island{ranks[0]}"
    counts = beside.channel(f"{prefix}-counts")
    lanes = tuple(beside.channel(f"{prefix}-lane{number}") for number in range(plan.lanes))
    beside.close()
    return Company(len(ranks), counts, lanes)


@dataclass(frozen=True)
class Exchanged:
    """What a model's ranks exchange in each step.

    Args:
        sites: of the plan.
        of_state: what brings state to agree among so many ranks.
    """

    sites: Sequence[PlacedSite]
    of_state: Callable[[int], Sequence[OfState]]

    def among(self, company: Company) -> list[Transfer]:
        """New transfers, in the order in which they are sent."""
        state = self.of_state(company.size)
        with self._trainable():
            landing = gradients(self.sites, company.size, beside=bool(company.lanes))
        return [
            *(transfer for transfer in state if transfer.at_once),
            *landing,
            *(transfer for transfer in state if not transfer.at_once),
        ]

    @contextmanager
    def _trainable(self) -> Iterator[None]:
        """Have parameters that are frozen now take hooks: they may be trained again."""
        frozen = [
            parameter
            for placed in self.sites
            for parameter in placed.place.parameters.values()
            if not parameter.requires_grad
        ]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


def gradients(sites: Sequence[PlacedSite], ranks: int, *, beside: bool) -> list[Transfer]:
    """What sums a model's gradients exactly among some of its ranks, which hold all of it.

    Args:
        sites: of the plan, each served by "replicate".
        ranks: how many these are.
        beside: whether they are of one host, where messages go from each to each. Else the plan's
            exchanges carry them, without their codecs.
    """
    found: list[Transfer] = []
    for placed in sites:
        exact = Choice("", placed.site.strategy, placed.site.exchange).without_codec().exchange
        place, label = replace(placed.place, ranks=ranks), f"gradients of {placed.label}"
        exchange = exchange_named("direct" if beside else exact)
        found += placed.strategy.apply(place, exchange, label)
    return found


@dataclass(frozen=True)
class Companies:
    """The ranks that exchange gradients in each step.

    Args:
        all_ranks: who take part in the warm-up.
        island: who exchange gradients behind it, if several ranks of a host step together.
    """

    all_ranks: Company
    island: Company | None


@final
class LocalRounds:
    """When one model's ranks come together, and what they exchange in each step.

    Args:
        running: what sends, and what weighs rows.
        plan: with local steps.
        optimizers: that make the steps.
        exchanged: in each step, by those who exchange something.
        companies: who these are.
        in_common: what ranks compare as long as all exchange gradients.
    """

    def __init__(
        self,
        running: Running,
        plan: Plan,
        optimizers: Sequence[Optimizer],
        exchanged: Exchanged,
        companies: Companies,
        in_common: Callable[[], Common],
    ) -> None:
        assert plan.outer is not None
        self._engine, self._weigher = running.engine, running.weigher
        self._exchanged, self._companies, self._in_common = exchanged, companies, in_common
        kinds = LocalTransfer | GeoTransfer | OfState
        engine = running.engine
        self._transfers = [transfer for transfer in engine.transfers if isinstance(transfer, kinds)]
        self._each = len(optimizers)
        self._set_off = partial(
            set_off, self._transfers, optimizers, plan.local_steps, plan.outer.lag or 0
        )
        self._warmup = plan.outer.warmup_steps * self._each  # steps of single optimizers
        self._left, self._steps = 0, 0  # of the warm-up, and all so far
        self._is_exact = False
        engine.listen(Event.STEP_ENDED, self._stepped)

    @property
    def is_exact(self) -> bool:
        """Whether the warm-up goes on, in which every rank has all that training makes."""
        return self._is_exact

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up that were made."""
        return (self._warmup - self._left) // self._each

    def begin(
        self, state: Mapping[str, Mapping[str, Tensor]], warmup_steps: int | None = 0
    ) -> None:
        """Begin with the weights as they are, on every rank alike.

        Args:
            state: the outer rule's, by parameter; it is forgotten where exact steps come first.
            warmup_steps: that were made before; None for all.
        """
        made = self._warmup if warmup_steps is None else warmup_steps * self._each
        self._left = max(0, self._warmup - made)
        if self._left:
            self._exactly()
        else:
            self._by_islands(state)

    def stop(self) -> None:
        """Exchange nothing any more."""
        self._engine.take(())
        island = self._companies.island
        counts = None if island is None else island.counts
        if counts is not None and not self._weigher.has(counts):
            counts.close()

    def _stepped(self) -> None:
        self._steps += 1
        if self._left:
            self._left -= 1
            if not self._left:
                self._by_islands({})

    def _exactly(self) -> None:
        """Every step is one of all ranks, from here on."""
        self._is_exact = True
        self._set_off(after=NEVER)
        self._engine.take(self._exchanged.among(self._companies.all_ranks))
        self._weigher.among(self._companies.all_ranks.counts)
        common = self._in_common()
        if not self._engine.compare(common):
            self._weigher.compare(common)

    def _by_islands(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """A round begins here, in which each island steps by itself."""
        self._is_exact, island = False, self._companies.island
        landing = [] if island is None else self._exchanged.among(island)
        self._engine.take(landing, inside=True)
        self._weigher.among(None if island is None else island.counts)
        self._set_off(after=self._steps)
        for transfer in self._transfers:
            if isinstance(transfer, LocalTransfer):
                transfer.counted = self._weigher
                transfer.begin(state)
            elif isinstance(transfer, GeoTransfer):
                transfer.begin()
            else:
                transfer.begin(self._weigher.own)
