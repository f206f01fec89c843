"""Foresight about a model on imagined hosts: the question, and the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shoal.core.plan import Plan

COMPUTE, LINK, STRAGGLERS, OWNERS = "compute", "link", "stragglers", "owners"
BUBBLE = "bubble"  # ranks of a pipeline wait for their neighbours
_LIMITS = 0.05  # the part of a step above which a term limits it


@dataclass(frozen=True)
class Network:
    """Network between imagined hosts.

    Args:
        bytes_per_s: rate of a host's link, each way; None: as measured.
        latency_s: latency of a message; None: as measured.
        oversubscription: ratio of the rates of all hosts' links together to the rate between their
            switches. All traffic is assumed to cross it.
        cores_per_rank: cores of each rank; None: as measured.
    """

    bytes_per_s: float | None = None
    latency_s: float | None = None
    oversubscription: float = 1.0
    cores_per_rank: float | None = None


@dataclass(frozen=True)
class Question:
    """Question about a model on imagined hosts.

    Args:
        network: the network that joins the hosts.
        straggler: the standard deviation of a host's step times, as a part of the step.
        strong: whether all hosts together have the measured rows of one host, instead of each host
            having as many.
        codecs: codecs that plans may use.
        how: further arguments of `plan_for`, such as pins.
    """

    network: Network = Network()
    straggler: float = 0.02
    strong: bool = False
    codecs: tuple[str, ...] = ()
    how: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Scale:
    """Time of a step on a number of hosts, and its causes."""

    hosts: int
    step_s: float  # seconds of the median step
    p95_s: float
    times: float  # rows a second, in multiples of one host's
    limits: Mapping[str, float]  # seconds of the median step, by cause
    plan: Plan
    ddp_s: float | None = None  # seconds of a step if all layers use an all-reduce, as in DDP

    @property
    def efficiency(self) -> float:
        """Speed-up per host."""
        return self.times / self.hosts

    @property
    def limit(self) -> str:
        """The part besides compute that takes most of the step; "compute" if none takes a 20th."""
        beside = {name: seconds for name, seconds in self.limits.items() if name != COMPUTE}
        most = max(beside, key=lambda name: beside[name], default=COMPUTE)
        return most if beside.get(most, 0.0) >= _LIMITS * self.step_s else COMPUTE

    @property
    def is_beyond(self) -> bool:
        """Whether the hosts do more, in the rounded figures, than as many single hosts."""
        return round(self.times, 2) > self.hosts

    @property
    def ways(self) -> dict[str, int]:
        """Number of layers that are served in each way, most first."""
        return dict(Counter(choice.way_anywhere for choice in self.plan.choices).most_common())

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all ranks that go through a pipeline; 0 if there is none."""
        return self.hosts * self.plan.micro_batches if BUBBLE in self.limits else 0


@dataclass(frozen=True)
class Help:
    """Gain of a change: a factor of the rows a second."""

    change: str
    gain: float


@dataclass(frozen=True)
class Flip:
    """Layer that is served in another way from this number of hosts on."""

    hosts: int
    layer: str
    before: str
    way: str


@dataclass(frozen=True)
class Foresight:
    """Answer: a scale for each number of hosts, and the most helpful changes at the last one."""

    question: Question
    alone_s: float  # seconds of a step on one host
    scales: tuple[Scale, ...]
    helps: tuple[Help, ...]  # the best first

    def flips(self) -> list[Flip]:
        """Return the layers that change their way, with the number of hosts."""
        planned = [scale for scale in self.scales if scale.plan.choices]
        return [
            Flip(after.hosts, one.layer, one.way_anywhere, other.way_anywhere)
            for before, after in pairwise(planned)
            for one, other in zip(before.plan.choices, after.plan.choices, strict=True)
            if one.way_anywhere != other.way_anywhere
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        question = self.question
        return {
            "alone_s": self.alone_s,
            "strong": question.strong,
            "straggler": question.straggler,
            "network": dict(vars(question.network)),
            "codecs": list(question.codecs),
            "hosts": [
                {
                    "hosts": scale.hosts,
                    "step_s": scale.step_s,
                    "p95_s": scale.p95_s,
                    "times_one_host": scale.times,
                    "efficiency": scale.efficiency,
                    "limit": scale.limit,
                    "seconds": dict(scale.limits),
                    "ways": scale.ways,
                    **({"micro_batches": scale.micro_batches} if scale.micro_batches else {}),
                    "bucket_bytes": scale.plan.bucket_bytes,
                    "ddp_s": scale.ddp_s,
                }
                for scale in self.scales
            ],
            "flips": [dict(vars(flip)) for flip in self.flips()],
            "helps": [dict(vars(help)) for help in self.helps],
        }
