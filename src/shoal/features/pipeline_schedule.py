"""`schedule`: the order of forward and backward in a pipeline (pipeline/schedule.py).

With "1f1b" a micro-batch goes back as soon as it can, so that a rank keeps the activations of few
micro-batches. It does so where a `compute_loss` asks for its one number. Guarded by
tests/pipeline/test_schedule.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final
from weakref import ref

from torch import nn

from shoal.contracts.feature import Attachment, Feature, PlanFacts
from shoal.core.errors import PlanError, UsageError
from shoal.core.option import Flag, option
from shoal.core.plan import Plan
from shoal.pipeline.schedule import most_in_flight
from shoal.planner.holders import groups_in
from shoal.session.opening import Opening
from shoal.session.running import Running
from shoal.strategies.pipeline import is_pipeline, pipeline_of
from shoal.strategies.row_parts import is_pipelined

ALL_FORWARD, ONE_BACK = "all_forward", "1f1b"
_LEAVE_OUT = "leave out schedule"


@final
@dataclass(frozen=True)
class PipelineSchedule(Feature[Opening]):
    """The order of forward and backward in a pipeline.

    Args:
        order: "all_forward": all micro-batches go through, and then all go back. "1f1b": one
            forward, one backward; it needs a `compute_loss` that computes one number.

    Examples:
        >>> from shoal.features.pipeline_schedule import PipelineSchedule
        >>> PipelineSchedule("1f1b").order
        '1f1b'
    """

    name: ClassVar[str] = "pipeline_schedule"
    order: str = option(
        ALL_FORWARD,
        keyword="schedule",
        flag=Flag(
            'Order of forward and backward in a pipeline: "1f1b" keeps fewer activations.',
            "--schedule",
            read=str,
            choices=(ALL_FORWARD, ONE_BACK),
        ),
    )

    def __post_init__(self) -> None:
        if self.order not in (ALL_FORWARD, ONE_BACK):
            raise PlanError(
                f"the order of a schedule is {ALL_FORWARD!r} or {ONE_BACK!r}",
                got=repr(self.order)[:80],
                do=f"give schedule={ONE_BACK!r} to keep fewer activations, or {_LEAVE_OUT}",
            )

    def plan(self, plan: Plan, facts: PlanFacts) -> Plan:
        is_default = self.order == ALL_FORWARD and self.name not in plan.features
        return plan if is_default else self.written(plan)

    def refuses(self, plan: Plan, facts: PlanFacts) -> None:
        if self.order == ALL_FORWARD:
            return
        if facts.tail_hosts:
            raise PlanError(
                f"schedule={self.order!r} is not served with hosts that bring no rows",
                do=_LEAVE_OUT,
            )
        if facts.profile is not None and not is_pipelined(plan):
            raise PlanError(
                f"schedule={self.order!r} is for a pipeline, and the plan has none",
                do=f'give pins={{"*": "pipeline"}}, or {_LEAVE_OUT}',
            )

    def attach(self, opening: Opening) -> Attachment[Running] | None:
        if self.order == ALL_FORWARD:
            return None
        job, terms = opening.job, opening.prepared.terms
        if job.compute_loss is None:
            raise UsageError(
                f"schedule={self.order!r} computes the loss within one call, so it needs a "
                "compute_loss",
                do="give parallelize compute_loss=…, and None for loss_fn; in a recipe write "
                f"compute_loss(model, batch) in place of loss(); or {_LEAVE_OUT}",
            )
        if terms.summed:
            raise UsageError(
                f"with schedule={self.order!r} the loss is a mean, and this one is a sum over rows",
                do=f"return a mean, or {_LEAVE_OUT}",
            )
        return _OneBack(opening.model)

    def line(self, plan: Plan) -> str:
        if self.order == ALL_FORWARD or not is_pipelined(plan):
            return ""
        ranks = len({choice.way for choice in plan.choices})
        groups = groups_in(plan)
        bring = plan.ranks if groups is None else max(map(len, groups.replicas))
        parts, every = plan.micro_batches, bring * plan.micro_batches
        most = min(every, most_in_flight(ranks, 0, parts))
        return (
            f"one forward, one backward: a rank keeps the activations of {most} micro-batches at "
            f"most, of {every}"
        )


@final
class _OneBack(Attachment[Running]):
    """The schedule of one model.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)

    def start(self, running: Running) -> None:
        model = self._model()
        if model is not None and is_pipeline(model):
            pipeline = pipeline_of(model)
            pipeline.parts = replace(pipeline.parts, goes_back_early=True)
