"""The lanes, link and processor of a rank in a predicted step: their work, and when it ends.

A lane does one job after the other. A job has parts. Each part lasts some seconds if it has its
processor and link alone:

    lane 0   |─ compute ─|▒▒▒▒▒ link ▒▒▒▒▒|·latency·|─ compute ─|  its next job …
    lane 1            |▒▒▒▒▒▒▒▒▒▒▒▒▒▒ link ▒▒▒▒▒▒▒▒▒▒|·latency·|  all on the link share it by the
                                                                  rates that they could use alone

Messages to servers use one direction of the link, messages from them the other. All others use
both. If a token bucket shapes the link, the unused part of a pause passes afterwards for next to
nothing. The processor is shared likewise, and the main thread takes it too while it computes: a
thread that wants more than an even share slows down, and so does a lane that sends. A rank has as
many processors as cores. If it has less than one, it has the part of a core that its main thread
had in the profile. The cost is some microseconds a part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NamedTuple, final

from shoal.core.cost import Direction, Phase
from shoal.core.facts import Cluster

_QUICK = 10.0  # times as fast a burst passes, if the processor can send it so fast
_OVER_S = 1e-12  # seconds that rounding may leave of a part that is over


class JobPart(NamedTuple):
    """A part of a lane's job, with the seconds that it lasts alone on processor and link."""

    seconds: float
    processor: float = 0.0  # part of a processor that it takes meanwhile, at most 1
    link: int = 0  # the directions of the link that it takes
    share: float = 1.0  # part of the link that it takes: less than 1 if the processor limits it


@final
class LaneJob:
    """A queued job of one lane: parts that follow one another."""

    __slots__ = ("after", "end_s", "left_s", "part", "parts", "ready_s", "sent_s", "taken")

    def __init__(
        self, ready_s: float, parts: Iterable[JobPart], after: LaneJob | None = None
    ) -> None:
        self.ready_s = ready_s  # the job does not begin before
        self.after = after  # the job begins only after this one, which may be another lane's
        self.sent_s = self.end_s = inf  # moments when its last byte is through, and when it is over
        self.parts = deque(parts)  # parts that have not begun
        self.begin(JobPart(0.0))

    def begin(self, part: JobPart) -> None:
        """Begin this part."""
        self.part, self.left_s = part, part.seconds
        self.taken = part[1:]  # the processor and link that it takes


@final
class Speeds:
    """Parts of jobs on one cluster, and their speeds when they run at once.

    Computed results are kept.
    """

    def __init__(self, cluster: Cluster) -> None:
        # one processor is the share of a main thread in the profile
        self.processors = max(1.0, cluster.cores_per_rank)
        self._duplex = cluster.duplex
        self._known: dict[Any, tuple[list[float], float, float]] = {}
        self._core_part = cluster.core_part
        self._parts: dict[tuple[int, float], tuple[Phase, tuple[JobPart, ...]]] = {}

    def of(
        self, taken: tuple[tuple[float, int, float], ...], computes: bool, bursts: bool
    ) -> tuple[list[float], float, float]:
        """Return each part's speed, the used share of the link, and the main thread's speed.

        Args:
            taken: for each part its share of a processor, its directions of the link, and its share
                of these.
            computes: whether the main thread computes.
            bursts: whether something is left of a burst.
        """
        key = taken, computes, bursts
        if key not in self._known:
            self._known[key] = self._worked_out(taken, computes, bursts)
        return self._known[key]

    def parts(self, phase: Phase, first_s: float) -> tuple[JobPart, ...]:
        """Return a phase as the parts of a job that first computes for `first_s`."""
        key = id(phase), first_s  # the phase is kept, too, so that no other phase can get its id
        if key not in self._parts:
            self._parts[key] = phase, self._parts_of(phase, first_s)
        return self._parts[key][1]

    def _parts_of(self, phase: Phase, first_s: float) -> tuple[JobPart, ...]:
        pace, rounds = phase.pace, phase.traffic.rounds
        nbytes = (
            phase.traffic.worst if phase.shown == 1 else phase.traffic.scaled(phase.shown).worst
        )
        busy_byte_s = pace.cpu.byte_s / self._core_part
        busy_s = rounds * pace.cpu.round_s / self._core_part
        byte_s = max(pace.wall.byte_s, busy_byte_s)
        sent = JobPart(0.0, link=phase.direction)
        if byte_s:
            shares = busy_byte_s / byte_s, phase.direction, pace.wall.byte_s / byte_s
            sent = JobPart(nbytes * byte_s, *shares)
        return tuple(
            part
            for part in (
                JobPart(first_s + phase.before_s, processor=1.0),
                sent,
                JobPart(busy_s, processor=1.0),
                JobPart(max(0.0, rounds * pace.wall.round_s - busy_s)),
                JobPart(phase.after_s, processor=1.0),
            )
            if part.seconds or part is sent
        )

    def _worked_out(
        self, taken: tuple[tuple[float, int, float], ...], computes: bool, bursts: bool
    ) -> tuple[list[float], float, float]:
        shares = self._shares(taken, _QUICK if bursts else 1.0)
        wanted = [processor * shares[link] for processor, link, _ in taken]
        level = self._level([*wanted, 1.0] if computes else wanted)
        speeds = [
            shares[link] * (level / want if want > level else 1.0)
            for (_, link, _), want in zip(taken, wanted, strict=True)
        ]
        used = max(
            sum(
                speed * share
                for (_, link, share), speed in zip(taken, speeds, strict=True)
                if link & way
            )
            for way in (Direction.OUT, Direction.IN)
        )
        return speeds, used, min(1.0, level)

    def _shares(self, taken: Sequence[tuple[float, int, float]], quick: float) -> tuple[float, ...]:
        """Return a job's speed on the link, by its directions, if the running jobs take these."""
        links = [link for _, link, _ in taken]
        there, back = (
            sum(share for _, link, share in taken if link & way)
            for way in (Direction.OUT, Direction.IN)
        )
        kept = quick * (self._duplex if Direction.OUT in links and Direction.IN in links else 1.0)
        return 1.0, kept / max(there, 1), kept / max(back, 1), quick / max(there, back, 1)

    def _level(self, wanted: Sequence[float]) -> float:
        """Return the largest processor share of any job, so that the rest is divided evenly."""
        left, level = self.processors, inf
        if sum(wanted) <= left:
            return level
        for index, want in enumerate(sorted(wanted)):
            level = left / (len(wanted) - index)
            if want > level:
                break
            left -= want
        return level


@final
class Lanes:
    """Runs jobs on lanes that share a link and a processor, event by event."""

    def __init__(self, cluster: Cluster, number: int, speeds: Speeds, burst_s: float = 0.0) -> None:
        """Make so many lanes each way, on a link with so many seconds left of a burst."""
        self._speeds = speeds
        self.turn = cluster.turn
        directions = tuple(Direction) if cluster.servers else (Direction.BOTH,)
        self._lanes: dict[Direction, list[deque[LaneJob]]] = {
            direction: [deque() for _ in range(number)] for direction in directions
        }
        self.burst_s, self._most_burst_s = burst_s, cluster.link.burst_s
        self._main: deque[LaneJob] = deque()  # sends of the main thread itself, for which it waits
        self._every = (*(lane for lanes in self._lanes.values() for lane in lanes), self._main)
        self.now_s = 0.0  # the time up to which jobs have run
        # moments, with the share of the link that is used from then on: 1 is its whole rate
        self.used: list[tuple[float, float]] = []

    def add(
        self,
        index: int,
        ready_s: float,
        *parts: JobPart,
        direction: Direction = Direction.BOTH,
        after: LaneJob | None = None,
    ) -> LaneJob:
        """Queue a job on the lane for site `index` in this direction."""
        lanes = self._lanes[direction]
        return self._queue(LaneJob(ready_s, parts, after), lanes[index % len(lanes)])

    def named(self, index: int, direction: Direction) -> tuple[str, str]:
        """Return the names of the lanes for a site's gradients, and for its parameters."""
        number = index % len(self._lanes[direction])
        if direction is Direction.BOTH:
            return (f"lane {number}",) * 2
        return f"server lane {number}", f"lane {number} from servers"

    def wait(self, clock: float, phase: Phase, beside_s: float = 0.0) -> float:
        """Send a phase from the main thread at its `clock`, compute meanwhile, and wait.

        Returns:
            The new clock.
        """
        job = self._queue(LaneJob(clock, self.parts(phase)), self._main)
        if beside_s:
            self.pay(clock + beside_s)
        self.finish([job])
        return max(job.end_s, self.now_s)

    def parts(self, phase: Phase, first_s: float = 0.0) -> tuple[JobPart, ...]:
        """Return a phase as the parts of a job that first computes for `first_s`."""
        return self._speeds.parts(phase, first_s)

    def pay(self, clock: float) -> float:
        """Run lanes while the main thread computes up to `clock`. Return its clock after that."""
        left_s = clock - self.now_s
        while left_s > _OVER_S:
            left_s -= self._advance(left_s)
        return self.now_s

    def finish(self, jobs: Iterable[LaneJob]) -> None:
        """Let the main thread, with its compute already run, wait until these jobs are over."""
        for job in jobs:
            while job.end_s == inf:
                self._advance(0.0)

    def _advance(self, main_s: float) -> float:
        """Run until the next part ends, or the main thread has computed for so long.

        Return the seconds that its compute would have taken alone.
        """
        lanes = [lane for lane in self._every if lane]
        if not lanes:
            self._pass(main_s, 0.0)
            return main_s
        busy = [lane[0] for lane in lanes]
        taken = tuple([job.taken for job in busy])
        speeds, used, main_speed = self._speeds.of(taken, main_s > 0, self.burst_s > 0)
        passed_s = main_s / main_speed if main_s else inf
        for job, speed in zip(busy, speeds, strict=True):
            if (own_s := job.left_s / speed) < passed_s:
                passed_s = own_s
        if self.burst_s and used > 1:
            passed_s = min(passed_s, self.burst_s / (used - 1))
        self._pass(passed_s, used)
        ended = False
        for job, speed in zip(busy, speeds, strict=True):
            job.left_s -= passed_s * speed
            ended = ended or job.left_s <= _OVER_S
        if ended:
            for job, lane in zip(busy, lanes, strict=True):
                if job.left_s <= _OVER_S:
                    self._end_part(lane)
        return passed_s * main_speed

    def _pass(self, seconds: float, used: float) -> None:
        """Let time pass while so much of the link is used. 1 is all of it without bursts."""
        if seconds and used != (self.used[-1][1] if self.used else 0.0):
            self.used.append((self.now_s, used))
        self.now_s += seconds
        left_s = self.burst_s + (1 - used) * seconds
        self.burst_s = min(left_s, self._most_burst_s) if left_s > _OVER_S else 0.0

    def _end_part(self, lane: deque[LaneJob]) -> None:
        job = lane[0]
        if job.part.link:
            job.sent_s = self.now_s
        if job.parts:
            job.begin(job.parts.popleft())
            return
        job.end_s = self.now_s
        job.sent_s = min(job.sent_s, job.end_s)  # a job may have had nothing to send
        lane.popleft()
        if lane:
            self._begin(lane)
        for other in self._every:
            if other and other[0].after is job:
                self._begin(other)

    def _queue(self, job: LaneJob, lane: deque[LaneJob]) -> LaneJob:
        lane.append(job)
        if len(lane) == 1:
            self._begin(lane)
        return job

    def _begin(self, lane: deque[LaneJob]) -> None:
        job = lane[0]
        waits = job.after is not None and job.after.end_s == inf
        job.begin(JobPart(inf if waits else max(0.0, job.ready_s - self.now_s)))
