"""`replan`: the plan is made anew as epochs end. front/replan.py says how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from shoal.contracts.feature import Feature, PlanFacts
from shoal.core.errors import PlanError
from shoal.core.numbers import check_truth
from shoal.core.option import Flag, option
from shoal.core.plan import Plan
from shoal.planner.holders import is_dealt
from shoal.planner.measured_steps import has_terms
from shoal.session.opening import Opening


@final
@dataclass(frozen=True)
class Replan(Feature[Opening]):
    """New plans as epochs end, from the measured times of steps and the speed of links.

    The model follows another plan only if it is predicted to take a tenth less time.

    Args:
        on: whether the plan is made anew.

    Examples:
        >>> from shoal.features.replan import Replan
        >>> Replan().on
        True
    """

    name: ClassVar[str] = "replan"
    judges: ClassVar[bool] = True
    on: bool = option(
        True,
        keyword="replan",
        off=False,
        flag=Flag(
            "Make the plan anew as epochs end, from what steps took and links carry; another one "
            "is followed where it is predicted to take a tenth less time.",
            "--replan",
        ),
    )

    def __post_init__(self) -> None:
        do = "give replan=True to make the plan anew at the end of epochs"
        check_truth("replan is True or False", self.on, do=do)

    def refuses(self, plan: Plan, facts: PlanFacts) -> None:
        if not self.on:
            return
        for count, who in ((facts.servers, "servers"), (facts.tail_hosts, "tail hosts")):
            if count:
                raise PlanError(
                    f"a plan is made anew among workers only, and there are {who}",
                    got="replan=True",
                    do=f"start without {who}, or leave out replan",
                )
        if not has_terms(plan):
            apart = {
                "local_steps": plan.is_local,
                "staleness": plan.staleness != 0,
                "update_every": bool(plan.update_every),
                "the pipeline": is_dealt(plan),
            }
            other = next((name for name, is_said in apart.items() if is_said), "the plan")
            raise PlanError(
                "a plan is made anew only where ranks update all in each step, together",
                got="replan=True and a plan of steps that are not alike, or not predicted",
                do=f"leave out replan, or {other}",
            )
