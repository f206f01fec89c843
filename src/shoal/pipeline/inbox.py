"""Inbox: receives the messages of a schedule, from each rank in the order in which it sends them.

Few receives are under way at a time, so that no memory waits for micro-batches that are far off.
What a rank was sent before it sent something itself has come: the sender may forget it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import final

from shoal.contracts.comm import Comm
from shoal.pipeline.route import Coming, Outbox
from shoal.pipeline.schedule import Task

MakeComing = Callable[[Task], Coming | None]


@final
class Inbox:
    """Messages that come to this rank, each named by the task that needs it here.

    Args:
        comm: the ranks.
        outbox: this rank's messages to others.
        order: all tasks of all ranks, in order.
        holders: the rank of each station.
        make: begins to receive what a task needs; None if the forms are not known yet.
    """

    def __init__(
        self,
        comm: Comm,
        outbox: Outbox,
        order: Sequence[Task],
        holders: Sequence[int],
        make: MakeComing,
    ) -> None:
        self._comm, self._outbox, self._make = comm, outbox, make
        self._holders = holders
        self._places = {task: place for place, task in enumerate(order)}
        # tasks here that wait for messages of a rank, in the order in which it sends them
        self._ahead: dict[int, deque[Task]] = defaultdict(deque)
        for task in order:
            needing = self._needing(task)
            if needing is not None and holders[needing.station] == comm.rank:
                self._ahead[holders[task.station]].append(needing)
        self._coming: dict[Task, Coming] = {}
        # messages to a rank, and the place of the task that needs them there
        self._sent: dict[int, deque[tuple[int, Outbox]]] = defaultdict(deque)

    def _needing(self, task: Task) -> Task | None:
        """Return the task of another station that needs a task's results."""
        station = task.station + (-1 if task.is_back else 1)
        return task._replace(station=station) if 0 <= station < len(self._holders) else None

    def _source(self, task: Task) -> Task | None:
        """Return the task of another station whose results a task needs."""
        station = task.station + (1 if task.is_back else -1)
        return task._replace(station=station) if 0 <= station < len(self._holders) else None

    def expect(self, task: Task) -> None:
        """Begin to receive what a task needs, if its forms are known."""
        source = self._source(task)
        if source is None:
            return
        ahead = self._ahead[self._holders[source.station]]
        while task not in self._coming and ahead:
            made = self._make(ahead[0])
            if made is None:
                return
            self._coming[ahead.popleft()] = made

    def take(self, task: Task) -> Coming:
        """Return what a task needs, which is on its way."""
        self.expect(task)
        source = self._source(task)
        assert source is not None
        return self._coming.pop(task)

    def came(self, task: Task) -> None:
        """Forget what was sent before: what a task needs has come."""
        source = self._source(task)
        if source is None:
            return
        sent = self._sent[self._holders[source.station]]
        while sent and sent[0][0] < self._places[source]:
            sent.popleft()[1].finish()

    def sent(self, task: Task) -> None:
        """Note that this rank has sent the results of a task."""
        needing = self._needing(task)
        if needing is not None:
            sent = self._outbox.apart()
            self._sent[self._holders[needing.station]].append((self._places[needing], sent))

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[1].finish()
