"""Orders to a host that holds layers: received ahead, and taken one at a time."""

from __future__ import annotations

from collections import deque
from functools import partial
from threading import Condition
from typing import final

from shoal.contracts.comm import Comm
from shoal.engine.lanes import Answering
from shoal.remote.channel import Channel
from shoal.remote.station_messages import StationOrder
from shoal.remote.verbs import End

_AHEAD = 4  # orders that are kept
_POLL_S = 0.5


@final
class Inbox:
    """Orders of the first rank that trains, not yet taken, and the ends of all of these ranks.

    Args:
        comm: the channel of orders.
        workers: number of ranks that train.
    """

    def __init__(self, comm: Comm, workers: int) -> None:
        self._comm = comm
        self._moved = Condition()
        self._orders: deque[StationOrder] = deque()
        self._answering = Answering()
        self._last = "the beginning"
        for worker in range(workers):
            receive = partial(_await_end, worker) if worker else self._receive
            self._answering.begin(worker, receive, comm)

    def next(self) -> StationOrder:
        """Return the next order.

        Raises:
            WorldError: a rank was lost.
        """
        with self._moved:
            while not self._orders:
                if not self._moved.wait(_POLL_S):
                    self._comm.check(f"after {self._last}")
                    self._answering.check()
            order = self._orders.popleft()
            self._moved.notify_all()
        self._last = type(order).__name__
        return order

    def finish(self) -> None:
        """Wait until all ranks that train have ended, and end the threads."""
        self._answering.finish(lambda: None)
        self._answering.close()

    def _receive(self, comm: Comm) -> None:
        channel = Channel[StationOrder](comm, 0, StationOrder)
        order: StationOrder | None = None
        while not isinstance(order, End):
            order = channel.next()  # batch 2: ahead of the work
            with self._moved:
                while len(self._orders) >= _AHEAD:
                    self._moved.wait()
                self._orders.append(order)
                self._moved.notify_all()


def _await_end(worker: int, comm: Comm) -> None:
    """Wait until a rank that sends no orders has ended."""
    Channel[End](comm, worker, End).next()
