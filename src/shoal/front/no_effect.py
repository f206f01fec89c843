"""Arguments of `parallelize` that have no effect: refused early if that is certain, or else logged.

    micro_batches     parts of a batch, with a plan that has no pipeline and no stage
    parameters        they train, and no optimizer that Shoal knows would update them

Rank 0 logs them once for each call of `parallelize`. Nothing else changes.
Guarded by tests/front/test_no_effect.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.numbers import how_many
from shoal.core.plan import Plan
from shoal.core.registry import named
from shoal.front.options import Options
from shoal.front.request import Request
from shoal.planner.dealt_plans import way_of_dealing
from shoal.planner.search_options import Constraints
from shoal.session.job import TrainingJob
from shoal.session.session import Session

_MOST_NAMES = 4
_ASK = 'ask for a pipeline, as by strategies=["pipeline"], or leave micro_batches out'


def effective(request: Request) -> Request:
    """Return a request in which every argument can have an effect.

    Raises:
        PlanError: no plan for the request can have micro-batches, or a given plan has others.
    """
    options, draft = request.options, request.draft
    if options.micro_batches in (None, 1) or request.facts.tail_hosts:
        return request
    if request.given_plan is not None:
        if draft.micro_batches != options.micro_batches:
            raise PlanError(
                "there are both a plan and micro_batches",
                got=f"micro_batches={options.micro_batches}, and {draft.micro_batches} in the plan",
                do="write the number into the plan, or leave micro_batches out",
            )
        return request
    among = Constraints(pins=options.pins, strategies=request.usable, placement=options.placement)
    if not _has_parts(draft) and way_of_dealing(among) is None:
        raise PlanError(
            f"micro_batches={options.micro_batches} has no effect: no layer can be in a pipeline",
            got="pins, strategies or a placement without one",
            do='pin all layers to one, pins={"*": "pipeline"}, or leave micro_batches out',
        )
    return request


def unused_micro_batches(options: Options, plan: Plan) -> str:
    """Return a line about micro-batches that a plan does not use; '' if there is none."""
    if options.micro_batches in (None, 1) or _has_parts(plan):
        return ""
    return (
        f"micro_batches={options.micro_batches} has no effect, as no layer is in a pipeline: {_ASK}"
    )


def find_untrained(session: Session, job: TrainingJob) -> str:
    """Return a line about parameters that train and are in no optimizer; '' if there are none."""
    known = [*job.optimizers, *(o for held in session.optimizers.values() for o in held)]
    in_optimizers = {id(p) for o in known for group in o.param_groups for p in group["params"]}
    in_optimizers |= set(map(id, job.left_alone))
    loss = job.loss
    of_loss = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    found = _out_of(in_optimizers, "", job.model.named_parameters())
    own = {id(parameter) for parameter in job.model.parameters()}
    found += _out_of(in_optimizers | own, "the loss's ", of_loss)
    if not found:
        return ""
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    return (
        f"{how_many(len(found), 'parameter')} would train, but no optimizer has them: "
        f"{', '.join(found[:_MOST_NAMES])}{more}. If that is meant, freeze them by "
        "requires_grad_(False), which spares their gradients; else give their optimizer, too"
    )


def _out_of(held: set[int], of: str, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """List the names of parameters that train and are not held."""
    return [f"{of}{n}" for n, p in parameters if p.requires_grad and id(p) not in held]


def _has_parts(plan: Plan) -> bool:
    """Return whether a layer of a plan runs in micro-batches."""
    return any(named(Strategy, choice.strategy).role.runs_elsewhere for choice in plan.choices)
