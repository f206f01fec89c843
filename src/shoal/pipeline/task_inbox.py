"""Inbox: receives the messages of a schedule, from each rank in the order in which it sends them.

Few receives are under way at a time, so that no memory waits for micro-batches that are far off.
A message has come if its receiver has sent a later one. Then the sender may forget it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.pipeline.calls import Shape
from shoal.pipeline.route import Coming, Outbox
from shoal.pipeline.schedule import Task

MakeComing = Callable[[Task], Coming | None]


@final
class TaskInbox:
    """Messages that come to this rank, each named by the task that needs it here.

    Args:
        comm: the ranks.
        outbox: this rank's messages to others.
        order: all tasks of all ranks, in order.
        holders: the rank of each station.
        make: begins to receive the values for a task; None if the forms are not known yet.
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
        """Return the task of another station that gives the values for a task."""
        station = task.station + (1 if task.is_back else -1)
        return task._replace(station=station) if 0 <= station < len(self._holders) else None

    def expect(self, task: Task) -> None:
        """Begin to receive the values for a task, if their forms are known."""
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
        """Return the values for a task, which are on their way."""
        self.expect(task)
        source = self._source(task)
        assert source is not None
        return self._coming.pop(task)

    def note_arrival(self, task: Task) -> None:
        """Forget earlier messages to a rank: the values for a task have come from there."""
        source = self._source(task)
        if source is None:
            return
        sent = self._sent[self._holders[source.station]]
        while sent and sent[0][0] < self._places[source]:
            sent.popleft()[1].finish()

    def note_sending(self, task: Task) -> None:
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


Receive = Callable[[int, Sequence[Shape]], Coming]


@final
class ReturningGradients:
    """The gradients of one call's sent values.

    Without an inbox they come in a backward of all micro-batches, the last micro-batch first.

    Args:
        receive: begins to receive gradients of these forms for a station's values.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._shapes: dict[tuple[int, int], list[Shape]] = {}
        self._coming: dict[tuple[int, int], Coming] = {}
        self.inbox: TaskInbox | None = None  # receives them in the order of a schedule

    def note_values(self, station: int, micro: int, values: Sequence[Tensor]) -> None:
        """Note the values of a micro-batch that take a gradient."""
        self._shapes[station, micro] = [(tuple(value.shape), value.dtype) for value in values]

    def receive(self, station: int, micro: int) -> Coming | None:
        """Begin to receive the gradients of a micro-batch; None if nothing was sent yet."""
        shapes = self._shapes.get((station, micro))
        return None if shapes is None else self._receive(station, shapes)

    def take(self, station: int, micro: int) -> Sequence[Tensor]:
        """Wait for the gradients of a micro-batch."""
        if self.inbox is not None:
            return self.inbox.take(Task(station, micro, is_back=True)).wait()
        if not self._coming:  # the slopes of all losses have come by now
            for at in sorted(self._shapes, reverse=True):
                self._coming[at] = self._receive(at[0], self._shapes[at])
        return self._coming.pop((station, micro)).wait()
