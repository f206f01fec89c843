"""Local steps at servers: each has a slice of the global weights, and adds workers' differences.

    worker r, a lane                              server, a thread for each worker and lane
      every H steps  its difference of weights ──▶  GlobalSlice.push: added, as the bound says
                     the global weights        ◀──  as soon as this worker may go on

Without a bound a difference is added as it comes, and no worker waits. With a bound, differences of
a round of all workers are added at once, in the order of the ranks, and a worker that is further
ahead of the slowest waits. So a bound of 0 gives all workers the same bits. The bound is counted in
rounds.

A worker asks by Push, Read or Write (remote/verbs.py), so there are no orders of worker 0 but the
first. Guarded by tests/equivalence/test_geo.py. The bound: servers/ahead_workers.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never, final

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.engine.engine import Engine
from shoal.engine.lanes import Answering
from shoal.remote.channel import Channel
from shoal.remote.verbs import (
    Aspect,
    End,
    MakeStep,
    Norm,
    PartOrder,
    Pull,
    Push,
    Read,
    ScaleBy,
    Sum,
    Verb,
    Write,
    unasked,
)
from shoal.servers.ahead_workers import Clocks
from shoal.strategies.geo import GeoTransfer


def end(engine: Engine, transfers: Sequence[GeoTransfer], lanes: int) -> None:
    """Tell the servers that this worker has ended.

    Args:
        engine: runs the transfers.
        transfers: the model's, in the order in which servers know them.
        lanes: how many they go over.
    """
    told = [
        engine.routes.beside(transfer, transfer.farewell, "farewell to servers", back=False)
        for transfer in transfers[:lanes]
    ]
    for farewell in told:
        farewell.wait("the end of the program")


@final
class GlobalSlice:
    """A server's slice of one transfer's global weights.

    Args:
        values: the first weights; the tensor may be changed.
        workers: how many there are.
        bound: by how many rounds a worker may be ahead of the slowest; None for any number.
    """

    def __init__(self, values: Tensor, workers: int, bound: int | None) -> None:
        self._dtype = values.dtype
        # sums of many differences would be lost in 16 bits
        self._values = values.to(torch.float32) if values.itemsize < 4 else values
        self._clocks: Clocks[Tensor] = Clocks(workers, bound)

    @property
    def observed(self) -> Counter[int]:
        """Numbers of rounds that a worker was ahead when it was given the weights."""
        return self._clocks.observed

    def push(self, worker: int, difference: Tensor, check: Callable[[], None]) -> Tensor:
        """Take a worker's difference; the weights, as soon as it may go on.

        `check` is called while it waits.
        """
        with self._clocks.moved:
            for differences in self._clocks.step(worker, difference):
                self._add(differences)
            self._clocks.wait(worker, check)
            self._clocks.count(worker)
            return self._now()

    def put(self, values: Tensor) -> Tensor:
        """Have these weights; they come back."""
        with self._clocks.moved:
            self._values.copy_(values)
            return self._now()

    def look(self) -> Tensor:
        """The weights as they are."""
        with self._clocks.moved:
            return self._now()

    def leave(self, worker: int) -> None:
        """A worker has ended."""
        with self._clocks.moved:
            for differences in self._clocks.leave(worker):
                self._add(differences)

    def _add(self, differences: Sequence[Tensor]) -> None:
        total = differences[0].to(self._values.dtype)
        for other in differences[1:]:
            total += other
        self._values += total

    def _now(self) -> Tensor:
        return self._values.to(self._dtype, copy=True)


@final
class GeoModel:
    """A server's part of a model with workers that step by themselves.

    Args:
        slices: its slice of each transfer's weights.
        lanes: channels to and from the workers.
        staleness: the bound, in rounds; None for none.
    """

    def __init__(
        self, slices: Sequence[Tensor], lanes: Sequence[Comm], staleness: int | None
    ) -> None:
        workers = lanes[0].workers
        self._in_step = staleness == 0
        self._slices = [GlobalSlice(values.clone(), workers, staleness) for values in slices]
        self._answering = answering = Answering()
        self.check, self.finish, self.close = answering.check, answering.finish, answering.close
        for lane, comm in enumerate(lanes):
            on_lane = self._slices[lane :: len(lanes)]
            for worker in range(workers):
                answering.begin(worker, partial(self._answer, worker, on_lane), comm)

    def observed(self) -> Counter[int]:
        """Count, for each number of rounds, how often a worker was so far ahead of the slowest."""
        if self._in_step:
            return Counter()
        return sum((part.observed for part in self._slices), Counter())

    def _answer(self, worker: int, on_lane: Sequence[GlobalSlice], comm: Comm) -> None:
        check = partial(comm.check, "serving")
        channel = Channel[PartOrder | End](comm, worker, PartOrder | End)
        while not isinstance(order := channel.next(), End):
            channel.post_rows(_obey(order.verb, self._slices[order.part], worker, check))
            channel.settle()
        for part in on_lane:
            part.leave(worker)


def _obey(verb: Verb, part: GlobalSlice, worker: int, check: Callable[[], None]) -> Tensor:
    """Obey a worker, and return the weights as they are then."""
    match verb:
        case Push(None, difference):
            return part.push(worker, difference, check)
        case Read(Aspect.VALUES):
            return part.look()
        case Write(Aspect.VALUES):
            return part.put(verb.holds(Tensor))
        case Push() | Read() | Write() | Pull() | Sum() | MakeStep() | Norm() | ScaleBy():
            raise unasked(verb)
        case _:
            assert_never(verb)
