"""Staleness: with servers a worker may run ahead of the slowest by so many steps.

Servers own every layer then, and answer each worker by itself (servers/ahead_workers.py). A
checkpoint needs one state of all of them, a consistent cut:

    1  finish    each worker has the servers' answers to its last step
    2  meet      so all gradients of all workers have been applied, and no worker makes a step
    3  refresh   each worker has the servers' parameters, like one that goes on from the checkpoint
    4  save      parameters and optimizer's state are of the same moment
    5  part      all workers go on together

That costs the slowest worker's lag, and one gather of the parameters. Guarded by
tests/equivalence/test_ahead.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from shoal.contracts.comm import Comm
from shoal.contracts.feature import Attachment, Feature, PlanFacts, check_buffers
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError, UsageError
from shoal.core.numbers import check_whole, whole
from shoal.core.option import Flag, option
from shoal.core.plan import Plan
from shoal.core.registry import named
from shoal.servers.ahead_workers import RunningAhead
from shoal.session.opening import Opening
from shoal.session.running import Running


def _read(text: str) -> int | None:
    if text == "none":
        return None
    if (steps := whole(text)) is None:
        raise ValueError(f'{text!r} is not a number of steps, nor "none"')
    return steps


def _compared(steps: int | None) -> Any:
    return "unbounded" if steps is None else steps


@final
@dataclass(frozen=True)
class Staleness(Feature[Opening]):
    """Number of steps that a worker may run ahead of the slowest, with servers.

    All layers are served then. Every rank weighs the same, however many rows it has, and there is
    no one gradient to read or to clip. With local steps the number counts rounds of them.

    Args:
        steps: that number; None for no bound.

    Examples:
        >>> from shoal.features.staleness import Staleness
        >>> Staleness(2).steps
        2
    """

    name: ClassVar[str] = "staleness"
    steps: int | None = option(
        0,
        keyword="staleness",
        compared=_compared,
        flag=Flag(
            'With servers: how far a worker may run ahead; "none" for any number. 0 by default.',
            "--staleness",
            read=_read,
            metavar="STEPS",
        ),
    )

    def __post_init__(self) -> None:
        if self.steps is not None:
            rule = "staleness is a number of steps, or None"
            check_whole(rule, self.steps, 0, do="give 0 to keep step")

    @classmethod
    def of_plan(cls, plan: Plan) -> Staleness | None:
        return cls(plan.staleness) if plan.staleness != 0 else None

    def plan(self, plan: Plan, facts: PlanFacts) -> Plan:
        return replace(plan, staleness=self.steps)

    def refuses(self, plan: Plan, facts: PlanFacts) -> None:
        if self.steps == 0:
            return
        if not facts.servers:
            raise PlanError(
                "there are no servers, which a staleness needs",
                do="start the ranks with --servers 1, or set SHOAL_SERVERS=1 on every rank",
            )
        for choice in plan.choices:
            if not named(Strategy, choice.strategy).role.takes_servers:
                raise PlanError(
                    "with a staleness servers own every layer, so nothing else can be said about "
                    "layers",
                    where=f"layer {choice.layer}",
                    got=choice.strategy,
                    do='leave out strategies, and pins to others than "server" and "server_rows"',
                )
            if choice.codec:
                raise PlanError(
                    "codecs need workers that keep step",
                    where=f"layer {choice.layer}",
                    got=f"{choice.exchange}, with a staleness of {self.steps}",
                    do=f'write "{choice.without_codec().exchange}", or set the staleness to 0',
                )
        if facts.counted and not plan.is_local:
            raise UsageError(
                "where workers run ahead every rank weighs the same",
                do="leave out count, or staleness",
            )
        check_buffers(facts, "workers that run ahead of one another", "give staleness=0")

    def attach(self, opening: Opening) -> Attachment[Running] | None:
        return None if self.steps == 0 else _RunAhead(opening.comm)


@final
class _RunAhead(Attachment[Running]):
    """Workers of one model that run ahead of one another.

    Args:
        comm: the workers.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._running: Running | None = None

    def start(self, running: Running) -> None:
        self._running = running

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Have the workers stand still within the context."""
        assert self._running is not None
        owners, tables = self._running.owners, self._running.tables
        with ExitStack() as stack:
            if owners is not None and isinstance(owners.tell, RunningAhead):
                stack.enter_context(owners.tell.standing())
                owners.settle()  # 1
            if tables is not None:
                tables.reach()
            self._comm.gather_objects(None, "shoal.save: workers that run ahead stand still")  # 2
            if owners is not None:
                owners.refresh()  # 3
            if tables is not None:
                tables.stands = True
                stack.callback(setattr, tables, "stands", False)
            yield  # 4
            self._comm.gather_objects(None, "shoal.save: workers that run ahead go on")  # 5
