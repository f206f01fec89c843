"""Experience: rank 0 keeps what steps took beside the prediction, for the next start of the job."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, final

from shoal.contracts.cadence import Event
from shoal.contracts.feature import Attachment, Feature
from shoal.core import cache_folder
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.plan import Plan
from shoal.engine.engine import Engine
from shoal.planner.experience import keep
from shoal.planner.measured_steps import has_terms, outcome_of
from shoal.session.opening import Opening
from shoal.session.running import Running

_STEPS = 32  # after which they are kept for the first time; a run may be killed later
_LOGGER = logging.getLogger("shoal")


@final
@dataclass(frozen=True)
class KeepExperience(Feature[Opening]):
    """Seconds of steps as predicted and as measured, kept in the user's cache folder."""

    name: ClassVar[str] = "experience"

    @classmethod
    def unasked(cls) -> KeepExperience:
        return cls()

    def attach(self, opening: Opening) -> Attachment[Running] | None:
        profile, cluster = opening.prepared.profile, opening.prepared.cluster
        if profile is None or cluster is None or opening.comm.rank or not has_terms(opening.plan):
            return None
        return (
            None
            if cache_folder.folder() is None
            else _RunExperience(opening.plan, profile, cluster)
        )


@final
class _RunExperience(Attachment[Running]):
    """The experience of one model's run.

    Args:
        plan: the plan that the model follows.
        profile: the model as it was measured.
        cluster: the ranks and their links as they were measured.
    """

    def __init__(self, plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
        self._plan, self._profile, self._cluster = plan, profile, cluster
        self._engine: Engine | None = None
        self._left = _STEPS

    def start(self, running: Running) -> None:
        self._engine = running.engine
        running.engine.listen(Event.BACKWARD_ENDED, self._counted)

    def finish(self) -> None:
        self._keep()

    def release(self, *, goes_on: bool) -> None:
        self._keep()

    def _counted(self) -> None:
        self._left -= 1
        if not self._left:
            self._keep()

    def _keep(self) -> None:
        if self._engine is None or self._left > _STEPS / 2:
            return
        spent = self._engine.spent.told(self._engine.routes.waits())
        outcome = outcome_of(self._plan, self._profile, self._cluster, [spent])
        if outcome is not None:
            keep(self._plan, self._profile, self._cluster.topology, outcome, _LOGGER.warning)
