"""Reasons for a plan: plain data that the planner fills and a report prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.core.facts import MovingState, SyncNorm
from shoal.core.placement import BALANCED, Placement
from shoal.core.plan import Choice


@dataclass(frozen=True)
class Alternative:
    """Way to serve a layer: the bytes that it sends, and the time of the step with it."""

    choice: Choice
    sent_bytes: float  # bytes of the busiest rank
    link_s: float  # seconds of the link, and of the lane's own compute, if nothing else ran
    step_s: float  # predicted seconds of the step, with all other layers as planned
    refusal: str = ""  # reason why it cannot serve the layer; the numbers are then 0


@dataclass(frozen=True)
class LayerExplanation:
    """Choice for a layer, and its alternatives."""

    layer: str
    kind: str
    parameters: int
    rows: int
    backward_s: float
    chosen: Alternative
    others: tuple[Alternative, ...]
    reason: str
    flips: str  # rows K of a rank at which another strategy would send less, or ''
    forward_s: float = 0.0
    plain_bytes: float = 0.0  # bytes that an all-reduce of its gradients would send
    exact_bytes: float = 0.0  # bytes that the choice would send without its codec


@dataclass(frozen=True)
class StationExplanation:
    """Run of layers of a pipeline that a rank or a group holds. Seconds: for one rank's rows."""

    rank: str  # the rank and its host, or all ranks of the group
    layers: tuple[str, ...]
    parameter_bytes: float
    forward_s: float
    backward_s: float
    # bytes of each of these ranks to the neighbouring stations, for the rows of all ranks that
    # come through it, and within its group
    sent_bytes: float


@dataclass(frozen=True)
class PredictedStep:
    """Predicted step of a plan: its seconds by parts, and its bytes."""

    forward_s: float
    backward_s: float
    exposed_s: float  # seconds of communication that nothing hides
    optimizer_s: float
    sent_bytes: float  # bytes of the busiest rank
    stations: tuple[StationExplanation, ...] = ()  # stations of a pipeline, in the order of forward
    rival: tuple[str, float] | None = None  # a plan of another kind, and seconds of its step

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.forward_s + self.backward_s + self.exposed_s + self.optimizer_s


@dataclass(frozen=True)
class Explanation:
    """Layers of a plan, in the order in which their gradients come, and the predicted step by
    parts.
    """

    ranks: int
    rate_bytes_per_s: float
    latency_s: float
    bucket_bytes: int
    lanes: int
    step: PredictedStep
    layers: tuple[LayerExplanation, ...]
    placement: Placement = BALANCED  # owners of parameters
    # the end of the model on hosts of its own, in records of earlier releases
    stage: dict[str, Any] | None = None
    # servers or tail hosts that were given no layer
    idle: tuple[str, ...] = ()
    moving: tuple[MovingState, ...] = ()  # state that is made equal on all ranks in each backward
    norms: tuple[SyncNorm, ...] = ()  # batch norms over the rows of all ranks
    # seconds of a step and bytes sent for the same plan without its codecs, if it has any
    without_codecs: tuple[float, float] | None = None
    local: str = ""  # the local steps and their rule, if ranks step by themselves
    features: tuple[str, ...] = ()  # lines about features of training
