"""A tail host's messages from its workers: received ahead, taken one from each worker at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from threading import Condition
from typing import final

from shoal.contracts.comm import Comm
from shoal.core.errors import DeadlinePassed, RanksDiffer
from shoal.engine.lanes import Answering
from shoal.remote.channel import Channel
from shoal.remote.station_messages import AnyStationOrder
from shoal.remote.tail_messages import TailDone

_AHEAD = 4  # messages of a worker that are kept
_POLL_S = 0.5
_SOONER = 0.75  # of the time-out: before a worker that waits for the answer gives up


@final
class Inbox:
    """Messages of workers that nobody has taken yet."""

    def __init__(self, comm: Comm, workers: Sequence[int], timeout_s: float | None) -> None:
        self._comm = comm
        self._timeout_s = None if timeout_s is None else _SOONER * timeout_s
        self._moved = Condition()
        self._boxes: dict[int, deque[AnyStationOrder]] = {worker: deque() for worker in workers}
        self._answering = Answering()
        self._last = "the beginning"
        for worker in workers:
            self._answering.begin(worker, partial(self._receive, worker), comm)

    def next(self) -> dict[int, AnyStationOrder]:
        """The next message of every worker, all of them of the same kind.

        Raises:
            DeadlinePassed: some have written, and one has not for as long as a receive may wait.
            RanksDiffer: workers ask for different things.
        """
        since = None
        with self._moved:
            while missing := [worker for worker, box in self._boxes.items() if not box]:
                there = {worker: box[0] for worker, box in self._boxes.items() if box}
                if there and since is None:
                    since = time.monotonic()
                late_s = 0.0 if since is None else time.monotonic() - since
                if there and self._timeout_s is not None and late_s > self._timeout_s:
                    key = next(iter(there.values())).key
                    raise DeadlinePassed(
                        f"{key} has not come from rank {missing[0]} within {self._timeout_s:g} s",
                        where=f"tail host, rank {self._comm.rank}, after {self._last}",
                        got=f"it has come from {', '.join(f'rank {worker}' for worker in there)}",
                        do="let every worker make the same calls in the same order, or raise the "
                        "time-out",
                        rank=missing[0],
                    )
                left_s = _POLL_S if self._timeout_s is None else self._timeout_s - late_s
                if not self._moved.wait(max(0.01, min(_POLL_S, left_s))):
                    self._comm.check(f"after {self._last}")
                    self._answering.check()
            messages = {worker: box.popleft() for worker, box in self._boxes.items()}
            self._moved.notify_all()
        # batch 3: all messages are about the same
        first, *_ = messages.values()
        for worker, message in messages.items():
            if message.key != first.key:
                raise RanksDiffer(
                    f"rank {worker} is at {message.key} where rank {next(iter(messages))} is at "
                    f"{first.key}",
                    where=f"tail host, rank {self._comm.rank}, after {self._last}",
                    do="where tail hosts run the end of the model, call it (also to evaluate), its "
                    "loss, backward, "
                    "step and state_dict on every worker alike",
                    rank=worker,
                )
        self._last = first.key
        return messages

    def finish(self) -> None:
        """Wait until every worker's thread has ended, and end it."""
        self._answering.finish(lambda: None)
        self._answering.close()

    def _receive(self, worker: int, comm: Comm) -> None:
        channel = Channel[AnyStationOrder](comm, worker, AnyStationOrder)
        message: AnyStationOrder | None = None
        while not isinstance(message, TailDone):
            message = channel.next()  # batch 2: ahead of the work
            with self._moved:
                while len(self._boxes[worker]) >= _AHEAD:
                    self._moved.wait()
                self._boxes[worker].append(message)
                self._moved.notify_all()
