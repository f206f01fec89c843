"""`first`: a lossy run begins with exact steps, or steps by a nearer codec, in the same call.

Each carrier of codes counts its own rounds, on its lane. So the switch is the same on every rank,
and copies nothing (codecs/carrier_memory.py). A checkpoint has the number of rounds, and any number
of ranks makes the rounds that are left. Rows of cut layers cross as codes from the first step on.
Guarded by tests/features/test_first_steps.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from shoal.codecs.carrier_memory import Remembering, coded_carriers
from shoal.codecs.coded_exchange import read_codec
from shoal.contracts.feature import Attachment, Feature, PlanFacts
from shoal.core.beginning import Beginning
from shoal.core.errors import PlanError
from shoal.core.numbers import is_count
from shoal.core.option import Flag, option, read_whole
from shoal.core.plan import Plan
from shoal.session.opening import Opening
from shoal.session.running import Running


@final
@dataclass(frozen=True)
class FirstSteps(Feature[Opening]):
    """The first steps of a run with codecs: exact, or by a nearer codec.

    Args:
        first: the number of exact steps, or a `shoal.Beginning`.

    Examples:
        >>> from shoal.features.first_steps import FirstSteps
        >>> FirstSteps(100).first
        100
    """

    name: ClassVar[str] = "nearer_first"
    first: Beginning | int = option(
        0,
        keyword="first",
        off=None,
        compared=str,
        flag=Flag(
            "Exact steps before codecs begin.",
            "--first",
            read=read_whole("steps"),
            metavar="STEPS",
        ),
    )

    def __post_init__(self) -> None:
        if self._first.codec:
            read_codec(self._first.codec)  # PlanError if there is none

    @property
    def _first(self) -> Beginning:
        return Beginning.of(self.first)

    def refuses(self, plan: Plan, facts: PlanFacts) -> None:
        if plan.is_local:
            raise PlanError(
                "first is about codecs here, and ranks make local steps",
                do="say both in one record, as shoal.Lossy(local_steps=16, first=100), or give "
                "outer=shoal.Outer(warmup_steps=100)",
            )
        if facts.servers and any(choice.codec for choice in plan.choices):
            raise PlanError(
                "servers take codes from the first step on",
                got=f"first={self.first}",
                do="leave out first, or start without servers",
            )

    def attach(self, opening: Opening) -> Attachment[Running] | None:
        return _FirstRounds(self._first) if self._first.steps else None


@final
class _FirstRounds(Attachment[Running]):
    """The first rounds of one model's carriers.

    Args:
        first: the number of rounds, and their codec.
    """

    def __init__(self, first: Beginning) -> None:
        self._first = first
        self._running: Running | None = None

    def start(self, running: Running) -> None:
        self._running = running
        self._begin(0)

    def _carriers(self) -> list[Remembering]:
        """Return the carriers of codes, once parameters on their way are there."""
        assert self._running is not None
        if self._running.owners is not None:
            self._running.owners.settle()
        return list(coded_carriers(self._running.engine.transfers))

    def _begin(self, made: int) -> None:
        codec = read_codec(self._first.codec) if self._first.codec else None
        for carrier in self._carriers():
            carrier.begin_with(self._first.steps, codec, made)

    def state(self) -> Any:
        return {"rounds": max((carrier.rounds for carrier in self._carriers()), default=0)}

    def problem(self, state: Any) -> str:
        rounds = state.get("rounds") if isinstance(state, dict) else None
        known = is_count(rounds) and isinstance(rounds, int) and rounds >= 0
        return "" if known else "no number of rounds"

    def load(self, state: Any) -> None:
        self._begin(0 if state is None else state["rounds"])
