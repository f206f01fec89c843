"""What is refused of a plan where state of all ranks agrees: buffers, and norms by all rows."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.errors import PlanError
from shoal.core.facts import MovingState, SyncNorm
from shoal.core.plan import Plan


def check_moving(plan: Plan, moving: Sequence[MovingState]) -> None:
    """Refuse state that is to agree where workers run ahead of one another, as they do not wait."""
    if plan.staleness != 0 and moving:
        raise PlanError(
            "training changes buffers on each rank otherwise, and workers that run ahead of one "
            "another cannot agree on them",
            where=", ".join(state.name for state in moving[:3]),
            do='give staleness=0, or buffers="local", with which each rank keeps its own',
        )


def check_sync_norms(plan: Plan, norms: Sequence[SyncNorm], *, has_tail: bool) -> None:
    """Refuse norms over all ranks where these do not keep step, or do not have all of the model."""
    if not norms or (plan.staleness == 0 and not has_tail):
        return
    do = "leave out sync_batchnorm, and use nn.BatchNorm in place of nn.SyncBatchNorm"
    where = ", ".join(norm.name for norm in norms[:3])
    if has_tail:
        raise PlanError(
            "batch norms over all ranks are not served where the end of the model has hosts of "
            "its own",
            where=where,
            do=f'{do}; or leave "stage" out of strategies',
        )
    raise PlanError(
        "workers that run ahead of one another cannot normalise by the rows of all",
        where=where,
        do=f"{do}; or give staleness=0",
    )
