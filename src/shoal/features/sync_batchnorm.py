"""`sync_batchnorm`: batch norms over the rows of all ranks (strategies/sync_batchnorm.py).

nn.SyncBatchNorm layers always go by these rows, torch's BatchNorm layers if you ask for it.
Guarded by tests/equivalence/test_sync_batchnorm.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import nn

from shoal.contracts.feature import Attachment, Feature, PlanFacts, Profiled
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.facts import ModelProfile
from shoal.core.numbers import check_truth
from shoal.core.option import Flag, option
from shoal.core.plan import Plan
from shoal.core.registry import named
from shoal.session.opening import Opening
from shoal.session.running import Running
from shoal.strategies.sync_batchnorm import SyncNorms, alone, norms_of

_LEAVE_OUT = "leave out sync_batchnorm, and use nn.BatchNorm in place of nn.SyncBatchNorm"


@final
@dataclass(frozen=True)
class SyncBatchNorm(Feature[Opening]):
    """Normalisation of BatchNorm layers by the rows of all ranks, as one process does it.

    Their statistics cross the network in forward and backward, and main threads wait for them.

    Args:
        convert: whether torch's BatchNorm layers do so, too, and not only nn.SyncBatchNorm.

    Examples:
        >>> from shoal.features.sync_batchnorm import SyncBatchNorm
        >>> SyncBatchNorm().convert
        True
    """

    name: ClassVar[str] = "sync_batchnorm"
    convert: bool = option(
        True,
        keyword="sync_batchnorm",
        off=False,
        flag=Flag(
            "Let BatchNorm layers normalise by the rows of all ranks, as SYNC_BATCHNORM = True in "
            "the recipe does.",
            "--sync-batchnorm",
            plans=True,
        ),
    )

    def __post_init__(self) -> None:
        do = "give sync_batchnorm=True to normalise by the rows of all ranks"
        check_truth("sync_batchnorm is True or False", self.convert, do=do)

    @classmethod
    def unasked(cls) -> SyncBatchNorm:
        return cls(convert=False)

    def refuses(self, plan: Plan, facts: PlanFacts) -> None:
        roles = {named(Strategy, choice.strategy).role for choice in plan.choices}
        has_tail = any(role.is_at_tail for role in roles)
        is_pipeline = any(role.names_ranks for role in roles)
        if plan.in_step and not (has_tail or is_pipeline):
            return
        names = list(norms_of(facts.model, self.convert))  # a walk through the model, so last
        if not names:
            return
        where = ", ".join(names[:3])
        if plan.is_local:
            raise PlanError(
                "ranks that step by themselves cannot normalise by the rows of all",
                where=where,
                do=_LEAVE_OUT,
            )
        if plan.runs_ahead:
            raise PlanError(
                "workers that run ahead of one another cannot normalise by the rows of all",
                where=where,
                do=f"{_LEAVE_OUT}; or give staleness=0",
            )
        if is_pipeline:
            raise PlanError(
                "a pipeline takes the rows of one rank after those of another, so batch norms "
                "cannot go by the rows of all",
                where=where,
                do=f"{_LEAVE_OUT}; or leave out the pipeline",
            )
        raise PlanError(
            "batch norms over all ranks are not served where the end of the model has hosts of its "
            "own",
            where=where,
            do=f'{_LEAVE_OUT}; or leave "stage" out of strategies',
        )

    @contextmanager
    def measuring(self, model: nn.Module) -> Iterator[Profiled]:
        with alone(model, self.convert) as norms:

            def with_norms(profile: ModelProfile) -> ModelProfile:
                return replace(profile, norms=norms.describe(profile))

            yield with_norms

    def attach(self, opening: Opening) -> Attachment[Running] | None:
        norms = SyncNorms(opening.model, self.convert)
        return _NormsOfRanks(norms, opening) if norms.names else None


@final
class _NormsOfRanks(Attachment[Running]):
    """Norms of one model that go by the rows of all ranks."""

    def __init__(self, norms: SyncNorms, opening: Opening) -> None:
        self._norms, self._boundary = norms, opening.boundary()
        self._weighing = opening.weighing

    def start(self, running: Running) -> None:
        self._norms.join(self._boundary, self._weighing)

    def release(self, *, goes_on: bool) -> None:
        self._norms.release()
