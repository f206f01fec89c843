"""Local steps: ranks step by themselves, and come together every so many steps by an outer rule.

Without servers ranks hold all weights, and exchange them in rounds (strategies/local.py, or
quorum.py if rounds have a quorum). With servers each worker pushes its changes of the weights to
them (strategies/geo.py).

    planner/local.py     the number of steps that hide the exchange, and the time of such a step
    local_rounds.py      the rounds in which ranks come together, and the exchanges of each step
    local_weights.py     the weights that all ranks have in common: to evaluate, and to save

The mathematics is not that of one process, so the plan and the report say it. Guarded by
tests/equivalence/test_local_steps.py, test_quorum.py, test_islands.py, test_warmup.py and
test_geo.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final
from weakref import ref

from torch import nn

from shoal.codecs.coded_exchange import read_exchange
from shoal.comm import rendezvous
from shoal.contracts.cadence import Cadence, Event
from shoal.contracts.exchange import SplitExchange
from shoal.contracts.feature import Attachment, Feature, PlanFacts, check_buffers
from shoal.contracts.state_dicts import is_amount, unlike_tensors
from shoal.contracts.transfer import Transfer
from shoal.core.errors import PlanError, UsageError
from shoal.core.numbers import check_whole, is_count, whole
from shoal.core.option import Flag, option
from shoal.core.outer_step import Outer
from shoal.core.placement import BALANCED
from shoal.core.plan import Plan
from shoal.engine.common_state import Common
from shoal.features.local_rounds import NEVER, Companies, Company, Exchanged, LocalRounds, island_of
from shoal.features.local_weights import LocalWeights
from shoal.optim.extend import scaler_of
from shoal.planner.local import with_local_steps
from shoal.rewrite.apply import PlacedSite
from shoal.session.compiled_models import without_compilation
from shoal.session.opening import Opening
from shoal.session.running import Running
from shoal.session.session import found
from shoal.strategies.geo import GeoTransfer
from shoal.strategies.landing import by_kind
from shoal.strategies.local import LocalTransfer
from shoal.strategies.quorum import QuorumTransfer
from shoal.strategies.state_agreement import OfState

_MOST = 1 << 20
_AUTO = "auto"


def _read(text: str) -> int | str:
    if text == _AUTO:
        return text
    if not (steps := whole(text)):
        raise ValueError(f'{text!r} is not a number of steps above 0, nor "auto"')
    return steps


def _outer(**fields: Any) -> Outer:
    """Make the outer rule that flags ask for. Servers know only one."""
    usual = "average" if rendezvous.servers() else Outer.rule
    return Outer(**{"rule": usual, **fields})


@final
@dataclass(frozen=True)
class LocalSteps(Feature[Opening]):
    """Steps that each rank makes by itself before all come together by an outer rule.

    Args:
        steps: their number, or "auto" for the fewest that hide the exchange.
        outer: the rule. None for the usual one: `shoal.Outer()`, or with servers their only rule.

    Raises:
        UsageError: `steps` is no such number, or the rule does not go with it.

    Examples:
        >>> from shoal.features.local_steps import LocalSteps
        >>> LocalSteps(16).steps
        16
    """

    name: ClassVar[str] = "local_steps"
    steps: int | str | None = option(
        _AUTO,
        keyword="local_steps",
        off=None,
        flag=Flag(
            'Steps that each rank makes by itself before all come together; "auto" for as many '
            "as hide the exchange. This changes the mathematics.",
            "--local-steps",
            read=_read,
            metavar="STEPS",
        ),
    )
    outer: Outer | None = option(None, compared=str, flag=Flag(record=Outer, make=_outer))

    def __post_init__(self) -> None:
        outer: Any = self.outer
        if outer is not None and not isinstance(outer, Outer):
            raise UsageError(
                "the outer rule is no shoal.Outer",
                got=type(outer).__name__,
                do="give for instance outer=shoal.Outer(lr=0.7, momentum=0.9): its momentum is "
                "kept by the ranks, so no optimizer of torch is given",
            )
        if self.steps is None:
            raise UsageError(
                "there is an outer rule, and no local_steps", do='give local_steps="auto", or 16'
            )
        steps: Any = self.steps
        if isinstance(steps, str) and steps == _AUTO:
            return
        check_whole(
            'local_steps is a number of steps, at least 1, or "auto"',
            steps,
            1,
            _MOST,
            do="give 16, or leave it out to exchange gradients in every step",
        )
        lag = outer.lag if outer is not None else None
        if lag is not None and lag > steps:
            raise UsageError(
                "the lag is longer than the local steps, so weights would be sent again before "
                "their result is there",
                got=f"{self.steps} local steps, a lag of {lag}",
                do=f"give a lag of {self.steps} at most",
            )

    @classmethod
    def of_plan(cls, plan: Plan) -> LocalSteps | None:
        return cls(plan.local_steps, plan.outer) if plan.is_local else None

    def plan(self, plan: Plan, facts: PlanFacts) -> Plan:
        usual = Outer(rule="average") if facts.servers else Outer()
        outer = self.outer or plan.outer or usual
        if facts.profile is None or facts.cluster is None:
            steps = plan.local_steps or 1 if self.steps == _AUTO else self.steps
            assert isinstance(steps, int)
            return replace(plan, local_steps=steps, outer=outer)
        # each worker pushes to servers by itself, so there are no islands
        outer = replace(outer, islands=False) if facts.servers else outer.on(facts.topology)
        cluster = plan.on(facts.cluster)
        assert self.steps is not None
        return with_local_steps(plan, facts.profile, cluster, self.steps, outer)

    def refuses(self, plan: Plan, facts: PlanFacts) -> None:
        if facts.tail_hosts:
            raise PlanError(
                "local steps are among workers, or with servers, and there are tail hosts",
                do="start without tail hosts, or leave out local_steps",
            )
        if facts.servers:
            self._check_at_servers(plan, facts)
            return
        if plan.outer is not None and plan.outer.quorum is not None:
            _check_quorum(plan, facts)
        for choice in plan.choices:
            exchange = choice.exchange and read_exchange(choice.exchange)
            if choice.strategy == "replicate" and (
                not exchange or isinstance(exchange, SplitExchange)
            ):
                continue
            raise PlanError(
                "with local steps every rank has all of every layer, and an exchange of two "
                "halves carries it",
                where=f"layer {choice.layer}",
                got=choice.way,
                do='leave out strategies, and pin layers to "replicate:direct" or '
                '"replicate:ring" only, a codec behind it or none',
            )

    def _check_at_servers(self, plan: Plan, facts: PlanFacts) -> None:
        """Refuse options that do not go with workers that step alone and push to servers."""
        for choice in plan.choices:
            if choice.strategy != "server" or choice.codec:
                raise PlanError(
                    "with local steps and servers these have the weights of every layer, exactly",
                    where=f"layer {choice.layer}",
                    got=choice.way,
                    do='leave out strategies, and pins to others than "server:direct"; or start '
                    "without servers",
                )
        if self.outer is not None and self.outer.rule != "average":
            raise PlanError(
                "servers add what workers have learned: they know no other outer rule",
                got=f'rule="{self.outer.rule}"',
                do='give outer=shoal.Outer(rule="average"), or leave it out; or start without '
                "servers",
            )
        outer = self.outer
        if outer is not None and (
            outer.islands or outer.warmup_steps or outer.grows or outer.quorum is not None
        ):
            raise PlanError(
                "to servers each worker pushes by itself, in rounds of one length from the first "
                "step on",
                got=str(outer),
                do="leave out islands, warmup_steps, grows and quorum, or start without servers",
            )
        if plan.placement not in (BALANCED, {}):
            raise PlanError(
                "with local steps every server has an equal share of the weights",
                got=f"placement={plan.placement!r}"[:80],
                do="leave out placement",
            )
        if facts.counted:
            raise UsageError(
                "servers weigh what each worker has learned the same",
                do="leave out count, or start without servers",
            )

    def attach(self, opening: Opening) -> Attachment[Running]:
        return _LocalTraining(opening)

    @classmethod
    def dropped(cls, state: Any) -> str:
        return ""

    def line(self, plan: Plan) -> str:
        return f"{plan.locally}: this changes the mathematics"


def _check_quorum(plan: Plan, facts: PlanFacts) -> None:
    """Refuse what does not go together with a quorum (PlanError)."""
    for choice in plan.choices:
        if choice.codec:
            raise PlanError(
                "with a quorum weights travel exactly",
                where=f"layer {choice.layer}",
                got=choice.way,
                do="leave out pins with codecs and codecs=, or leave out the quorum",
            )
    check_buffers(facts, "ranks that a round does not wait for", "leave out the quorum")


def _quorum_of(opening: Opening, outer: Outer) -> QuorumTransfer | None:
    """Return the transfer of all parameters if rounds have a quorum (a collective)."""
    if outer.quorum is None:
        return None
    channel = opening.channel("rounds", idle=True)
    transfer = QuorumTransfer(channel, opening.comm, outer)
    opening.threads.append(transfer.office)
    return transfer


def _waiting(transfers: Sequence[Transfer]) -> Sequence[Any]:
    """Have transfers go as a step ends, but not before a round has begun; return them."""
    for transfer in transfers:
        transfer.cadence = Cadence(Event.STEP_ENDED, phase=NEVER)
    return transfers


@final
class _LocalTraining(Attachment[Running]):
    """The rounds of one model, and the weights that all ranks have in common.

    Args:
        opening: the model. Its sites and state go in rounds from here on.
    """

    def __init__(self, opening: Opening) -> None:
        self._model, self._plan = ref(opening.model), opening.plan
        self._optimizers, self._comm = tuple(opening.optimizers), opening.comm
        self._passes, self._state_among = opening.session.passes, opening.state_among
        outer = opening.plan.outer
        assert outer is not None
        self._outer = outer
        counts = opening.channel("counts") if outer.warmup_steps else None
        island = island_of(opening.comm, opening.plan, opening.prefix)
        self._companies = Companies(Company(opening.comm.size, counts), island)
        opening.inside = () if island is None else island.lanes
        opening.serve = self._serve
        opening.state_among = self._state_in_rounds
        self._rounds: LocalRounds | None = None
        self._weights: LocalWeights | None = None
        self._quorum = _quorum_of(opening, outer)

    def _serve(self, placed: PlacedSite) -> Sequence[Transfer]:
        """Rewrite nothing, because the site's parameters come together in rounds."""
        place, exchange = placed.place, placed.exchange
        if self._quorum is not None:
            is_first = not self._quorum.parameters
            self._quorum.add(place.parameters)
            return _waiting([self._quorum] if is_first else [])
        kinds = by_kind(place.parameters)
        if placed.strategy.role.takes_servers:
            geo = [GeoTransfer(kind, place, placed.label, self._outer) for kind in kinds]
            return _waiting(geo)
        assert isinstance(exchange, SplitExchange)
        at = place.rank, place.ranks
        return _waiting(
            [LocalTransfer(kind, exchange, at, placed.label, self._outer) for kind in kinds]
        )

    def _state_in_rounds(self, ranks: int) -> Sequence[OfState]:
        return _waiting(self._state_among(ranks))

    def start(self, running: Running) -> None:
        exchanged = Exchanged([site for site, _ in running.rewritten.sites], self._state_among)
        self._weights = LocalWeights(running.engine, self._comm, self._outer)
        if self._quorum is not None:
            self._quorum.start()
        self._rounds = LocalRounds(
            running, self._plan, self._optimizers, exchanged, self._companies, self._in_common
        )
        self._rounds.begin({})

    def _in_common(self) -> Common:
        model = self._model()
        assert model is not None
        return Common(model, self._optimizers, self._passes, scaled=scaler_of)

    @property
    def rounds(self) -> LocalRounds:
        """The rounds in which ranks come together."""
        assert self._rounds is not None
        return self._rounds

    @property
    def weights(self) -> LocalWeights | None:
        """The weights in common; None in the warm-up, because every rank has everything then."""
        return None if self.rounds.is_exact else self._weights

    def is_whole(self) -> bool:
        return self.rounds.has_ended

    @contextmanager
    def saving(self) -> Iterator[None]:
        model, weights = self._model(), self.weights
        if model is None or weights is None:
            yield
            return
        with weights.latest(model, self._optimizers):
            yield

    def state(self) -> Any:
        weights = self.weights
        outer = {} if weights is None else weights.outer_state()
        made = {"warmup_steps": self.rounds.warmup_steps, "length": self.rounds.length}
        return {"outer": outer, **made}

    def problem(self, state: Any) -> str:
        if not isinstance(state, dict):
            return "no dict"
        warmup = state.get("warmup_steps", -1)
        if warmup is not None and not (is_count(warmup) and warmup >= 0):
            return f"warmup_steps is {str(warmup)[:40]}"
        length = state.get("length", 1)
        if not (is_count(length) and length > 0):
            return f"a round of {str(length)[:40]} steps"
        if unlike := unlike_tensors(state.get("outer"), flat=("momentum",)):
            return unlike
        rates = [known["rate"] for known in state["outer"].values() if "rate" in known]
        if not all(map(is_amount, rates)):
            return "a rate that is no number"
        assert self._weights is not None
        self._weights.check(state["outer"])
        return ""

    def load(self, state: Any) -> None:
        """Begin a round with the loaded weights and the outer rule's state."""
        outer = {} if state is None else state["outer"]
        assert self._weights is not None
        self._weights.check(outer)
        made = {"warmup_steps": 0} if state is None else state
        self.rounds.begin(outer, made["warmup_steps"], made.get("length", 1))
        if self.weights is not None:
            self.weights.give_servers()

    def release(self, *, goes_on: bool) -> None:
        model, weights = self._model(), self.weights
        if model is not None and weights is not None:
            weights.take_global(model)
        self.rounds.stop()


def _attachment(model: nn.Module) -> _LocalTraining | None:
    """Return the model's attachment; None if gradients are exchanged in each step."""
    session = found()
    attached = None if session is None else session.attached.get(without_compilation(model))
    kept = None if attached is None else attached.running.attachments.get(LocalSteps.name)
    assert kept is None or isinstance(kept, _LocalTraining)
    return kept


@contextmanager
def global_weights(model: nn.Module) -> Iterator[None]:
    """Lend a model the weights that all ranks have in common: to evaluate, or to look at them.

    With `local_steps` a rank's own weights differ from them until a round ends. Inside the context
    the weights are the ones with which the running round began, and so are the buffers. Nothing is
    sent, so one rank may do it alone. Afterwards this rank has its own weights again. With any
    other plan nothing happens.

    Args:
        model: a parallelised model, between a step and the next forward. Do not train it inside.

    Examples:
        >>> import shoal, torch
        >>> _ = shoal.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> with shoal.global_weights(model):
        ...     output = model(torch.ones(3, 4))
    """
    kept = _attachment(model)
    if kept is None or kept.weights is None:
        yield
        return
    with kept.weights.at_round(model):
        yield


def round_number(model: nn.Module) -> int:
    """Return the number of the running round, counted from 0 since training began here.

    With a quorum ranks may make different numbers of steps, and a loop that ends at a round ends on
    all of them soon. Without `local_steps`, and with servers, there are none.

    Args:
        model: a parallelised model.

    Examples:
        >>> import shoal, torch
        >>> _ = shoal.init()
        >>> shoal.round_number(torch.nn.Linear(4, 2))
        0
    """
    kept = _attachment(model)
    return 0 if kept is None else kept.rounds.number


def check_in_step(models: Iterable[nn.Module]) -> None:
    """Refuse models that train by local steps, also during the warm-up."""
    if any(_attachment(model) is not None for model in models):
        raise UsageError(
            "torch.distributed.checkpoint does not have what local steps need to go on: the "
            "outer rule's state",
            do="save with shoal.save or shoal.Checkpoints",
        )
