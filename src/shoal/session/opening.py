"""Opening: a model that is about to be attached. Features may open channels for it and change it.

All of it happens alike on every rank, so all make channels in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.contracts.comm import Comm
from shoal.contracts.feature import Features
from shoal.contracts.row_weights import Weighing
from shoal.contracts.transfer import Transfer
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, ModelProfile, MovingState
from shoal.core.plan import Plan
from shoal.core.rank_groups import RankGroups
from shoal.core.terms import OF_ROWS, Terms
from shoal.engine.attendance import LaneAttendance
from shoal.engine.lanes import streaming
from shoal.engine.shared_parts import SharedParts
from shoal.pipeline.replica import PipelineReplica
from shoal.remote.tables import Tables
from shoal.rewrite.apply import PlacedSite, by_strategy
from shoal.session.holding import HeldApart
from shoal.session.job import TrainingJob
from shoal.session.session import Session, SessionPart
from shoal.session.watch import Watched
from shoal.strategies.state_agreement import OfState


class Serve(Protocol):
    """A function that rewrites one site and returns its transfers."""

    def __call__(self, placed: PlacedSite) -> Sequence[Transfer]:
        """Rewrite the site, and return its transfers."""


@dataclass(frozen=True)
class Prepared:
    """A plan for a model, and the facts that it was made from.

    Args:
        plan: the plan to follow.
        profile: the model as it was measured; None without a measurement.
        cluster: the ranks and their links as they were measured; None without a measurement.
        features: features of training, in their order.
        inputs_alike: whether ranks get the same inputs on purpose.
        values: rank 0's values that differ between ranks. None: ranks compare all values as the
            model is attached.
        before: the hooks of an earlier plan, which has been released. The loss goes on with them.
    """

    plan: Plan
    profile: ModelProfile | None = None
    cluster: Cluster | None = None
    features: Features = ()
    inputs_alike: bool = False
    values: Mapping[str, Tensor] | None = field(default=None, compare=False)
    before: Watched | None = field(default=None, compare=False)

    @property
    def moving(self) -> Sequence[MovingState]:
        """State that ranks bring to agreement after each backward."""
        return () if self.profile is None else self.profile.moving

    @property
    def terms(self) -> Terms:
        """Terms that a loss without a count is a mean over."""
        return OF_ROWS if self.profile is None else self.profile.terms


@dataclass
class Opening:
    """One model, before its layers are rewritten and its engine starts.

    Args:
        session: the ranks.
        job: the model, its loss and its optimizers.
        prepared: the plan, and the facts that it was made from.
        serve: rewrites each site. A feature may put another function there.
        state_among: makes the transfers of state among so many ranks. A feature may replace it.
        inside: channels among the ranks of an island, each for a lane.
        main: channels that the main thread itself waits for.
        weighing: tells the weight of this rank's rows in the running backward.
        tables: the way to tables at servers, if there are any.
        apart: the ways to hosts that hold layers and bring no rows, if there are any.
        threads: threads of features, which end as the lanes do.
        replica: this rank's replica of a pipeline, if groups of ranks hold its layers.
    """

    session: Session
    job: TrainingJob
    prepared: Prepared
    state_among: Callable[[int], Sequence[OfState]]
    serve: Serve = by_strategy
    inside: tuple[Comm, ...] = ()
    main: list[Comm] = field(default_factory=list)
    weighing: Weighing = field(default_factory=Weighing)
    tables: Tables | None = None
    apart: HeldApart | None = None
    threads: list[SessionPart] = field(default_factory=list)
    replica: PipelineReplica | None = None
    _boundary: Comm | None = None
    _attendance: LaneAttendance | None = None
    _channels: list[Comm] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        """The plan to follow."""
        return self.prepared.plan

    @property
    def model(self) -> nn.Module:
        """The module."""
        return self.job.model

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that hold the model's parameters."""
        return self.job.optimizers

    @property
    def comm(self) -> Comm:
        """The ranks that train."""
        return self.session.comm

    @property
    def prefix(self) -> str:
        """The beginning of the names of this model's channels."""
        return f"model{self.session.models}"

    def channel(self, name: str, *, idle: bool = False) -> Comm:
        """Open a channel of this model among all ranks that train (see `Comm.channel`)."""
        opened = self.comm.channel(f"{self.prefix}-{name}", idle=idle)
        self._channels.append(opened)
        return opened

    def close(self) -> None:
        """Give back the channels, because the model will not be attached."""
        if self._attendance is not None:
            self._attendance.abandon()
        for opened in self._channels:
            opened.close()

    def boundary(self) -> Comm:
        """Return the channel between ranks in forward and backward, which is opened once."""
        if self._boundary is None:
            self._boundary = self.channel("boundary")
            self.main.append(self._boundary)
        return self._boundary

    def open_replica(self, groups: RankGroups) -> None:
        """Open the channels of this rank's replica of a pipeline.

        Raises:
            PlanError: training changes a buffer of the model.
        """
        if moving := self.prepared.moving:
            raise PlanError(
                "training changes a buffer of a pipeline with groups of ranks",
                where=f"buffer {moving[0].name}",
                do='name one rank for each layer, as "pipeline:0"; or leave the pin out',
            )
        self.replica = PipelineReplica.open(self.boundary(), groups)
        self.main.append(self.replica.comm)
        self._channels += self.replica.channels

    def attendance(self) -> None:
        """Let a rank that is alone read the parts of the others."""
        device = streaming(parameter.device for parameter in self.model.parameters())
        boundary, channel = self._boundary, self.channel("attendance")
        parts = SharedParts(self.model, boundary, self.job.memory_limit)
        self._attendance = LaneAttendance(parts, channel, device)
        if boundary is not None:
            boundary.attendance = self._attendance

    @property
    def opened_attendance(self) -> LaneAttendance | None:
        """The attendance of ranks at readings; None if there is none."""
        return self._attendance

    @property
    def opened_boundary(self) -> Comm | None:
        """The boundary channel; None if no layer needs it."""
        return self._boundary
