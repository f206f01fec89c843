"""Why a plan is as it is: plain data that the planner fills and a report prints."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.facts import MovingState, SyncNorm
from shoal.core.placement import BALANCED, Placement
from shoal.core.plan import Choice


@dataclass(frozen=True)
class Alternative:
    """One way to serve a layer: what it sends, and what the step would take with it."""

    choice: Choice
    sent_bytes: float  # by the busiest rank
    link_s: float  # that the link, and the lane's own compute, would take alone
    step_s: float  # predicted, everything else as planned
    refusal: str = ""  # why it cannot serve the layer; the numbers are then 0


@dataclass(frozen=True)
class LayerExplanation:
    """A layer's choice beside its alternatives."""

    layer: str
    kind: str
    parameters: int
    rows: int
    backward_s: float
    chosen: Alternative
    others: tuple[Alternative, ...]
    reason: str
    flips: str  # the rows K a rank at which another strategy would send less, or ''
    forward_s: float = 0.0
    plain_bytes: float = 0.0  # that an all-reduce of its gradients would send
    exact_bytes: float = 0.0  # that the choice would send without its codec


@dataclass(frozen=True)
class Route:
    """What a worker sends to the end of the model on another host, and gets, in a step."""

    worker: str  # rank and host
    to: str
    sent_bytes: float
    received_bytes: float


@dataclass(frozen=True)
class TailExplanation:
    """The end of the model on hosts of its own."""

    layers: tuple[str, ...]
    micro_batches: int
    joined: bool  # these go through it at once
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class StationExplanation:
    """A run of layers of a pipeline that one rank holds. Seconds are for one rank's rows."""

    rank: str  # and its host
    layers: tuple[str, ...]
    parameter_bytes: float
    forward_s: float
    backward_s: float
    sent_bytes: float  # bytes to the stations beside it, for the rows of all ranks


@dataclass(frozen=True)
class PredictedStep:
    """One step under a plan as it is predicted: its seconds by parts, and its bytes."""

    forward_s: float
    backward_s: float
    exposed_s: float  # communication that hides under nothing
    optimizer_s: float
    sent_bytes: float  # by the busiest rank
    stations: tuple[StationExplanation, ...] = ()  # stations of a pipeline, in the order of forward
    rival: tuple[str, float] | None = None  # a plan of another kind, and seconds of its step

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.forward_s + self.backward_s + self.exposed_s + self.optimizer_s


@dataclass(frozen=True)
class Explanation:
    """A plan's layers, in the order their gradients come, and the predicted step by its parts."""

    ranks: int
    rate_bytes_per_s: float
    latency_s: float
    bucket_bytes: int
    lanes: int
    step: PredictedStep
    layers: tuple[LayerExplanation, ...]
    placement: Placement = BALANCED  # who owns what
    stage: TailExplanation | None = None
    # ranks that are there to serve layers, or to run the last, and were given none
    idle: tuple[str, ...] = ()
    moving: tuple[MovingState, ...] = ()  # state that agrees in each backward
    norms: tuple[SyncNorm, ...] = ()  # batch norms over the rows of all ranks
    # the same plan without its codecs, where it has some: seconds of a step, and bytes sent
    without_codecs: tuple[float, float] | None = None
    local: str = ""  # the local steps and their rule, where ranks step by themselves
    features: tuple[str, ...] = ()  # lines about features of training
