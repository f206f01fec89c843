"""One forward, one backward: the order in which stations compute, such that they keep little.

    rank 0   F0 F1 F2 .. .. B0 F3 B1 …         F: forward, B: backward of a micro-batch
    rank 1      F0 F1 .. B0 F2 B1 F3 …         a station goes back as soon as it can
    rank 2         F0 B0 F1 B1 F2 B2 …

Station s of S begins a forward only if it keeps fewer than S - s micro-batches. The loss is over
all rows of a rank, so a rank's rows in n parts go back together: then it is S - s + n - 1.

No deadlock: every rank makes the same order of all tasks of all ranks, by a small simulation. Each
task comes behind the tasks that it needs, and each rank does its own tasks in that order. Sends
never block. So look at the first task that is not done: all tasks that it needs are done, and its
rank has nothing else to do before it. It will be done. Messages from one rank to another are
received in the order in which they are sent, which this order tells, too.

Reference: Narayanan et al., "PipeDream", 2019, and "Memory-Efficient Pipeline-Parallel DNN
Training", 2021, section 3.2 (PipeDream-Flush).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, final

_FORWARD, _BACKWARD = 1, 2  # lengths of the tasks in the simulation


class Task(NamedTuple):
    """Forward or backward of a micro-batch at a station."""

    station: int
    micro: int
    is_back: bool


def most_in_flight(stations: int, station: int, parts: int) -> int:
    """Return the number of micro-batches of which a station keeps activations, at most.

    Args:
        stations: number of stations.
        station: the station.
        parts: parts of a rank's rows, at most.

    Examples:
        >>> [most_in_flight(4, station, 1) for station in range(4)]
        [4, 3, 2, 1]
    """
    return stations - station + parts - 1


@lru_cache(maxsize=64)
def one_forward_one_backward(holders: tuple[int, ...], brings: tuple[int, ...]) -> tuple[Task, ...]:
    """Return the order of all tasks of all ranks.

    Args:
        holders: the rank of each station.
        brings: the rank that brings the rows of each micro-batch.

    Examples:
        >>> order = one_forward_one_backward((0, 1), (0, 1))
        >>> ["FB"[task.is_back] + f"{task.micro}" for task in order if task.station == 0]
        ['F0', 'F1', 'B0', 'B1']
    """
    return tuple(_Simulation(holders, brings).run())


@final
class _Simulation:
    def __init__(self, holders: Sequence[int], brings: Sequence[int]) -> None:
        self._holders, self._brings = holders, brings
        self._stations, self._count = range(len(holders)), len(brings)
        self._parts = max(brings.count(rank) for rank in brings)
        # micro-batches that are through a station, and that have begun there: forward, backward
        self._through = [[0, 0] for _ in self._stations]
        self._begun = [[0, 0] for _ in self._stations]

    def run(self) -> list[Task]:
        """Let each rank begin a task whenever it can."""
        order: list[Task] = []
        ends: dict[int, tuple[int, Task]] = {}  # the running task of each rank, and its end
        now, total = 0, 2 * self._count * len(self._stations)
        while len(order) < total:
            for rank, (end, task) in [*ends.items()]:
                if end <= now:
                    self._through[task.station][task.is_back] += 1
                    del ends[rank]
            for rank in sorted({*self._holders} - {*ends}):
                if (begins := self._next(rank)) is not None:
                    order.append(begins)
                    self._begun[begins.station][begins.is_back] += 1
                    ends[rank] = now + (_BACKWARD if begins.is_back else _FORWARD), begins
            now += 1
        return order

    def _next(self, rank: int) -> Task | None:
        """Return the task that a rank begins now: a backward if there is one."""
        own = [station for station in self._stations if self._holders[station] == rank]
        back = [Task(s, self._begun[s][1], True) for s in own if self._can_go_back(s)]
        there = [Task(s, self._begun[s][0], False) for s in own if self._can_go_on(s)]
        return min(back or there, key=lambda task: (task.micro, -task.station), default=None)

    def _can_go_back(self, station: int) -> bool:
        """Return whether a backward can begin."""
        micro = self._begun[station][1]
        if micro == self._count:
            return False
        if station + 1 < len(self._stations):
            return self._through[station + 1][1] > micro
        rank = self._brings[micro]
        last = self._count - 1 - self._brings[::-1].index(rank)
        return self._through[station][0] > last  # the loss is over all rows of the rank

    def _can_go_on(self, station: int) -> bool:
        """Return whether a forward can begin."""
        micro, gone_back = self._begun[station][0], self._through[station][1]
        if micro == self._count:
            return False
        if micro - gone_back >= most_in_flight(len(self._stations), station, self._parts):
            return False
        return station == 0 or self._through[station - 1][0] > micro
