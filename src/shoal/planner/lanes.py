"""The lanes and the link of one rank during a predicted step: what is sent and computed there, and until when.

A lane does one job after the other. A job is parts of some seconds each, were it alone with what they take:

    lane 0   |─ compute ─|▒▒▒▒▒ link ▒▒▒▒▒|·latency·|─ compute ─|  its next job …
    lane 1            |▒▒▒▒▒▒▒▒▒▒▒▒▒▒ link ▒▒▒▒▒▒▒▒▒▒|·latency·|      whoever is on the link has an even share of it

So with the processor, where a rank has less than two cores: what lanes take of it there while the main thread computes,
the main thread owes (`pay`); while it waits (`finish`, `wait`) it has nothing to lose. Costs some microseconds a part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import IntEnum
from math import inf
from typing import NamedTuple, final

from shoal.core.cost import Pace, Traffic
from shoal.core.facts import Cluster

_OVER_S = 1e-12  # what is left of a part that is over, for rounding


class Takes(IntEnum):
    """What a part of a job takes."""

    LINK = 0
    PROCESSOR = 1
    TIME = 2  # and nothing else


class Part(NamedTuple):
    """Seconds of a job, were it alone with what it takes there."""

    takes: Takes
    seconds: float
    owed_s: float = 0.0  # what the main thread loses by it


@final
class Job:
    """What a lane does at one go."""

    __slots__ = ("begun_s", "end_s", "left_s", "parts", "ready_s", "sent_s", "takes")

    def __init__(self, ready_s: float, parts: Iterable[Part]) -> None:
        self.ready_s = ready_s  # not before
        self.sent_s = self.end_s = inf  # its last byte is through; it is over
        self.parts = deque(parts)  # those to come, with the one under way
        self.takes, self.left_s, self.begun_s = Takes.TIME, 0.0, 0.0  # the one under way


@final
class Lanes:
    """Runs jobs on lanes that share a link and a processor, event by event."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.stolen = min(1.0, max(0.0, 2.0 - cluster.cores_per_rank))  # part of lane compute that main threads feel
        self._cores = min(1.0, cluster.cores_per_rank)
        self._lanes: list[deque[Job]] = [deque() for _ in range(number)]
        self._main: deque[Job] = deque()  # what the main thread itself sends and waits for
        self._every = (*self._lanes, self._main)
        self._now_s = self._owed_s = 0.0
        self._waits_since_s = inf  # the main thread,
        self._free_s = 0.0  # and what of its waiting has gone to lanes

    def add(self, index: int, ready_s: float, *parts: Part) -> Job:
        """Queue a job on the lane of site `index`."""
        return self._queue(Job(ready_s, parts), self._lanes[index % len(self._lanes)])

    def wait(self, clock: float, pace: Pace, traffic: Traffic) -> float:
        """Have the main thread at its `clock` send and wait for traffic, on the link beside lanes: the new clock."""
        job = self._queue(Job(clock, self.exchange(pace, traffic)), self._main)
        self.finish([job])
        return job.end_s

    def exchange(self, pace: Pace, traffic: Traffic) -> tuple[Part, Part]:
        """Traffic as parts of a job."""
        sent = Part(Takes.LINK, traffic.worst * pace.wall.byte_s, self.stolen_s(pace, traffic))
        return sent, Part(Takes.TIME, traffic.rounds * pace.wall.round_s)

    def compute(self, seconds: float) -> Part:
        """Compute as a part of a job."""
        return Part(Takes.PROCESSOR, seconds, self.stolen * seconds)

    def stolen_s(self, pace: Pace, traffic: Traffic) -> float:
        """Seconds of the main thread that the processor time of some traffic takes."""
        return self.stolen * pace.cpu.of(traffic) / self._cores

    def pay(self, clock: float) -> float:
        """Run the lanes beside the main thread up to its `clock`, which what it owes them pushes on: the new clock."""
        clock += self._owed()
        while self._ended_by(clock):
            clock += self._owed()
        return clock

    def finish(self, jobs: Iterable[Job]) -> None:
        """Have the main thread, at the clock that it has paid for, wait until these are over."""
        self._waits_since_s, self._free_s = self._now_s, 0.0
        for job in jobs:
            while job.end_s == inf:
                self._ended_by(inf)
        self._waits_since_s = inf

    def _owed(self) -> float:
        owed_s, self._owed_s = self._owed_s, 0.0
        return owed_s

    def _ended_by(self, limit_s: float) -> bool:
        """Run until the next part ends, but not beyond the limit; whether one has ended."""
        busy = [(lane[0], lane) for lane in self._every if lane]
        if not busy:
            self._now_s = limit_s
            return False
        sharing = [0, 0, 0]
        for job, _ in busy:
            sharing[job.takes] += 1
        slower = (sharing[Takes.LINK], sharing[Takes.PROCESSOR] if self.stolen else 1, 1)
        end_s = self._now_s + min([job.left_s * slower[job.takes] for job, _ in busy])
        until_s = min(end_s, limit_s)
        passed_s, self._now_s = until_s - self._now_s, until_s
        for job, lane in busy:
            job.left_s -= passed_s / slower[job.takes]
            if job.left_s <= _OVER_S:
                self._end_part(lane)
        return end_s <= limit_s

    def _end_part(self, lane: deque[Job]) -> None:
        job = lane[0]
        ended = job.parts.popleft()
        self._owed_s += ended.owed_s
        waits_since_s = max(job.begun_s, self._waits_since_s)
        if self._now_s > waits_since_s:
            beside_s = ended.owed_s * (self._now_s - waits_since_s) / (self._now_s - job.begun_s)
            free_s = min(beside_s, self._now_s - self._waits_since_s - self._free_s)
            self._free_s += free_s
            self._owed_s -= free_s
        if ended.takes is Takes.LINK:
            job.sent_s = self._now_s
        if job.parts:
            job.takes, job.left_s, _ = job.parts[0]
            job.begun_s = self._now_s
            return
        job.end_s = self._now_s
        lane.popleft()
        if lane:
            self._begin(lane)

    def _queue(self, job: Job, lane: deque[Job]) -> Job:
        lane.append(job)
        if len(lane) == 1:
            self._begin(lane)
        return job

    def _begin(self, lane: deque[Job]) -> None:
        job = lane[0]
        job.parts.appendleft(Part(Takes.TIME, max(0.0, job.ready_s - self._now_s)))
        job.takes, job.left_s, job.begun_s = Takes.TIME, job.parts[0].seconds, self._now_s
