"""Local steps: the rounds in which ranks come together, and the exchanges of each step.

    warm-up   in the first steps all ranks exchange gradients: each is the ordinary exact step
    then      weights come together every H steps (strategies/local.py). In each step the ranks of
              an island, which share a host, exchange gradients. Without islands no rank does

So the ranks of an island have the same weights and make the same steps, bit for bit: an island acts
as one rank. Between one kind of step and the other nothing is copied but θ_old.

A step of an island costs as much as `replicate` does among that many ranks. The island has lanes of
its own.
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

from shoal.codecs.coded_exchange import read_exchange
from shoal.contracts.cadence import Cadence, Event
from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Transfer
from shoal.core.plan import Choice, Plan
from shoal.engine.common_state import Common
from shoal.rewrite.apply import PlacedSite
from shoal.session.running import Running
from shoal.strategies.geo import GeoTransfer
from shoal.strategies.local import LocalTransfer
from shoal.strategies.state_agreement import OfState

NEVER = 1 << 62  # steps before the first round, while there must be none


def set_off(
    transfers: Sequence[Transfer],
    optimizers: Sequence[Optimizer],
    steps: int,
    lag: int,
    after: int = 0,
) -> None:
    """Have transfers go every so many steps. With a lag they take turns.

    If there are several optimizers, a step is one step of each.

    Args:
        transfers: the transfers of weights and of state.
        optimizers: the optimizers that make the steps.
        steps: number of steps in a round.
        lag: number of steps until the result of an exchange is taken over.
        after: number of steps of single optimizers before the first round.
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
    """Return the present learning rates by the id of each parameter."""
    return {
        id(parameter): float(group["lr"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@final
class RoundLength:
    """Number of steps of the present round: that of the plan, or a growing one.

    Args:
        transfers: the transfers of weights and of state.
        optimizers: the optimizers that make the steps.
        plan: a plan with local steps.
    """

    def __init__(
        self, transfers: Sequence[Transfer], optimizers: Sequence[Optimizer], plan: Plan
    ) -> None:
        assert plan.outer is not None
        self._set_off = partial(set_off, transfers, optimizers)
        self._each, self._most = len(optimizers), plan.local_steps
        self._lag, self._grows = plan.outer.lag or 0, plan.outer.grows
        self._present = self._most
        self._begun = 0  # the step of single optimizers after which rounds of this length began
        self._ends = NEVER  # the step of single optimizers that ends the round, while rounds grow

    def after(self, steps: int) -> int:
        """Return the length of the round that a next step belongs to.

        Args:
            steps: steps of single optimizers that were made.
        """
        has_ended = steps >= self._ends
        return min(2 * self._present, self._most) if has_ended else self._present

    def has_ended(self, steps: int) -> bool:
        """Return whether ranks have all that each has learned, after steps of single optimizers.

        With a lag there is no such moment, and one is as good as another.
        """
        if self._lag and self._present == self._most:
            return True
        return (steps - self._begun) % (self._present * self._each) == 0

    def put(self, length: int) -> None:
        """Have the next round have this length, if rounds grow."""
        self._present = min(length, self._most) if self._grows else self._most

    def suspend(self) -> None:
        """Have no round for now."""
        self._ends = NEVER
        self._set_off(self._most, self._lag, after=NEVER)

    def begin(self, steps: int) -> None:
        """Begin a round after so many steps of single optimizers."""
        has_grown, self._begun = self._present == self._most, steps
        self._ends = NEVER if has_grown else steps + self._present * self._each
        self._set_off(self._present, self._lag if has_grown else 0, after=steps)

    def note_step(self, steps: int) -> None:
        """Begin the next round if its first step has been made: then the last one has ended."""
        if steps > self._ends:
            self._present = self.after(steps)
            self.begin(self._ends)


@dataclass(frozen=True)
class Company:
    """Ranks that exchange gradients in each step.

    Args:
        size: number of these ranks.
        counts: the channel on which they tell their rows; None if rows are not weighed.
        lanes: channels of their own, if they share a host.
    """

    size: int
    counts: Comm | None
    lanes: tuple[Comm, ...] = ()


def island_of(comm: Comm, plan: Plan, prefix: str) -> Company | None:
    """Return the ranks of this host if several step together, else None (a collective)."""
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
    """Gradients and state that a model's ranks exchange in each step.

    Args:
        sites: the sites of the plan.
        of_state: makes the transfers that bring state to agreement among so many ranks.
    """

    sites: Sequence[PlacedSite]
    of_state: Callable[[int], Sequence[OfState]]

    def among(self, company: Company) -> list[Transfer]:
        """Make new transfers, in the order in which they are sent."""
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
        """Let frozen parameters take hooks, because they may be trained again."""
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
    """Make transfers that sum a model's gradients exactly among some of its ranks.

    Each of these ranks holds the whole model.

    Args:
        sites: the sites of the plan, each served by "replicate".
        ranks: number of these ranks.
        beside: whether they share a host. Messages then go from each to each. Otherwise the plan's
            exchanges carry the gradients, without their codecs.
    """
    found: list[Transfer] = []
    for placed in sites:
        exact = Choice("", placed.site.strategy, placed.site.exchange).without_codec().exchange
        place, label = replace(placed.place, ranks=ranks), f"gradients of {placed.label}"
        exchange = read_exchange("direct" if beside else exact)
        found += placed.strategy.apply(place, exchange, label)
    return found


@dataclass(frozen=True)
class Companies:
    """The ranks that exchange gradients in each step.

    Args:
        all_ranks: the ranks of the warm-up.
        island: the ranks after the warm-up, if several ranks of a host step together.
    """

    all_ranks: Company
    island: Company | None


@final
class LocalRounds:
    """Schedule of one model: its rounds, and the exchanges of each step.

    Args:
        running: the engine that sends, and the weigher of rows.
        plan: a plan with local steps.
        optimizers: the optimizers that make the steps.
        exchanged: the gradients and state of each step.
        companies: the ranks that exchange them.
        in_common: returns the values that ranks compare while all of them exchange gradients.
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
        self._rounds = RoundLength(self._transfers, optimizers, plan)
        self._warmup = plan.outer.warmup_steps * self._each  # steps of single optimizers
        self._left, self._steps = 0, 0  # steps left in the warm-up; all steps so far
        self._is_exact = False
        engine.listen(Event.STEP_ENDED, self._note_step)

    @property
    def is_exact(self) -> bool:
        """Whether the warm-up goes on. In it every rank has all results of training."""
        return self._is_exact

    @property
    def has_ended(self) -> bool:
        """Whether a round ends here, so that ranks have all that each of them has learned."""
        return self._is_exact or self._rounds.has_ended(self._steps)

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up steps made so far."""
        return (self._warmup - self._left) // self._each

    def begin(
        self,
        state: Mapping[str, Mapping[str, Tensor]],
        warmup_steps: int | None = 0,
        length: int = 1,
    ) -> None:
        """Begin with the present weights, on every rank alike.

        Args:
            state: the outer rule's state by parameter. It is forgotten if exact steps come first.
            warmup_steps: number of warm-up steps made before; None if all were made.
            length: steps of the first round, if rounds grow.
        """
        self._rounds.put(length)
        made = self._warmup if warmup_steps is None else warmup_steps * self._each
        self._left = max(0, self._warmup - made)
        if self._left:
            self._exactly()
        else:
            self._by_islands(state)

    def stop(self) -> None:
        """Stop all exchanges."""
        self._engine.take(())
        island = self._companies.island
        counts = None if island is None else island.counts
        if counts is not None and not self._weigher.has(counts):
            counts.close()

    @property
    def length(self) -> int:
        """Number of steps of the present round; of the next one if the present one has ended."""
        return self._rounds.after(self._steps)

    def _note_step(self) -> None:
        self._steps += 1
        self._rounds.note_step(self._steps)
        if self._left:
            self._left -= 1
            if not self._left:
                self._by_islands({})

    def _exactly(self) -> None:
        """Make every step a step of all ranks, from here on."""
        self._is_exact = True
        self._rounds.suspend()
        self._engine.take(self._exchanged.among(self._companies.all_ranks))
        self._weigher.among(self._companies.all_ranks.counts)
        common = self._in_common()
        if not self._engine.compare(common):
            self._weigher.compare(common)

    def _by_islands(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Begin a round in which each island steps by itself."""
        self._is_exact, island = False, self._companies.island
        landing = [] if island is None else self._exchanged.among(island)
        self._engine.take(landing, inside=True)
        self._weigher.among(None if island is None else island.counts)
        self._rounds.begin(self._steps)
        for transfer in self._transfers:
            if isinstance(transfer, LocalTransfer):
                transfer.counted = self._weigher
                transfer.begin(state)
            elif isinstance(transfer, GeoTransfer):
                transfer.begin()
            else:
                transfer.begin(self._weigher.own)
