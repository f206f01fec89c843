"""Stragglers: ranks that keep step name a rank that keeps others waiting (engine/stragglers.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from shoal.contracts.feature import Attachment, Feature
from shoal.core.facts import Cluster
from shoal.engine.stragglers import Stragglers
from shoal.planner.step import Timeline
from shoal.planner.timeline import Predictor, with_settings_of
from shoal.session.opening import Opening
from shoal.session.running import Running


@final
@dataclass(frozen=True)
class NameStragglers(Feature[Opening]):
    """Names of slow ranks and links, with the cause, while training goes on."""

    name: ClassVar[str] = "stragglers"

    @classmethod
    def unasked(cls) -> NameStragglers:
        return cls()

    def attach(self, opening: Opening) -> Attachment[Running] | None:
        profile, cluster = opening.prepared.profile, opening.prepared.cluster
        if profile is None or cluster is None or not opening.plan.in_step:
            return None
        step = Predictor(with_settings_of(profile, opening.plan), cluster).as_is(opening.plan)
        return _StragglerWatch(step, cluster)


@final
class _StragglerWatch(Attachment[Running]):
    """Watch over the ranks of one model.

    Args:
        step: the predicted step.
        cluster: the ranks and their links.
    """

    def __init__(self, step: Timeline, cluster: Cluster) -> None:
        self._step, self._cluster = step, cluster

    def start(self, running: Running) -> None:
        routes, step = running.engine.routes, self._step
        if routes.among_workers is None:
            return
        for lane in routes.lanes:
            lane.expects(step.step_s)
        expected_s = step.end_s - step.backward_s + step.waited_s
        topology, rate = self._cluster.topology, self._cluster.link.bytes_per_s
        Stragglers(running.engine, routes.among_workers, topology, expected_s, rate)
