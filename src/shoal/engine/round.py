"""Round of one backward that sends: from the model's calls before it to the gradients after it.

       called    the model is called: its count is this round's share, if it is the only call
    1  open      backward enters the model, or its first gradient is there; autograd is asked to
                 call at the end
    5  ready     a transfer has all its gradients: it is packed, and sent as soon as all before it
                 in the plan's order are sent
    12 finish    backward is over: transfers that were never ready are packed as they are, lanes are
                 waited for, and gradients are published

The numbers come from docs/ideas/walk-gradient.md, which follows one gradient all the way. If the
backward of a round ends half-way, the round stays the engine's last one, because the ranks no
longer agree on the gradients that were sent. Guarded by tests/engine/test_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from operator import attrgetter
from threading import RLock
from time import perf_counter
from typing import final
from weakref import ref

import torch
from torch.autograd import Variable

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Mark, OwnedTransfer, Round, Transfer
from shoal.core.buckets import BUCKETS_A_LANE, Buckets
from shoal.core.errors import WorldError
from shoal.core.no_operation import nothing
from shoal.engine.lanes import Errand, after, this_moment
from shoal.engine.routes import Routes
from shoal.engine.weights import Weight


@final
class _SendQueue:
    """Transfers of one backward, which are sent in the plan's order.

    Args:
        transfers: the transfers in that order.
        routes: the lanes that they go over.
    """

    def __init__(self, transfers: Sequence[Transfer], routes: Routes) -> None:
        self.transfers, self._routes = transfers, routes
        # ready transfers, each with the moment on the stream that computed its last gradient
        self.ready: dict[Transfer, torch.Event | None] = {}
        self.sent: list[Errand] = []  # jobs of the first transfers

    def send(self, backward: Round, everything: bool = False) -> None:
        """Pack and send ready transfers, as long as all before them are sent; or all that are
        left.
        """
        while len(self.sent) < len(self.transfers):
            transfer = self.transfers[len(self.sent)]
            if not (everything or transfer in self.ready):
                return
            after(self.ready.get(transfer), self._routes.device)
            transfer.pack(backward)
            self.sent.append(self._routes.send(transfer))


@final
class BackwardRound(Round):
    """Round of one model that is open, or that the next backward opens.

    Args:
        transfers: transfers that go as their gradients land, in the order in which they are sent.
        routes: the lanes that they go over.
        buckets: the memory of their buckets.
        main: the channels on which the main thread itself waits.
        accumulating: whether it begins within `accumulate`.
        latest: the weight of the model's last call before it.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        routes: Routes,
        buckets: Buckets,
        main: Sequence[Comm],
        accumulating: bool,
        latest: Weight | None = None,
    ) -> None:
        self.accumulating = accumulating
        self.unsent = False  # whether gradients were accumulated that no backward has sent yet
        # weight with a share that goes with everything that is sent
        self.weight: Weight | None = None
        self._queue = _SendQueue(transfers, routes)
        self._routes, self._buckets, self._main = routes, buckets, main
        self._called = False  # whether the model was called in this round
        self._lone: Weight | None = None  # weight of that call, as long as there is no other
        self.latest = latest  # weight of the last call, which may be before this round
        # base weight of each backward, by autograd's number
        self._base: dict[int, Weight | None] = {}
        self._task: int | None = None  # autograd's number of the backward, once it is open
        # returns the function that this backward calls at its end; None once gradients can no
        # longer land
        self.running: Callable[[], object | None] = nothing
        self._opening = RLock()  # guards opening, because autograd has a thread for each device
        self._began_s = 0.0  # time of its start, by perf_counter

    @property
    def share(self) -> float:
        return 1.0 if self.weight is None else self.weight.share

    @property
    def is_open(self) -> bool:
        """Whether a backward has opened it. That backward may have ended with an error."""
        return self._task is not None

    def take(self, transfers: Sequence[Transfer]) -> None:
        """Replace the transfers of a round that is not open yet."""
        self._queue.transfers = transfers

    def called(self, weight: Weight, asks: bool) -> None:
        """Note that the model is called, and that its gradients are to be weighed.

        Usually the model is called once per backward, and the share of this call goes with
        everything that is sent. This works even on a rank on which backward does not come through
        the model. If the call `asks`, or there are several, the ranks' counts are exchanged during
        forward.
        """
        if self._called or asks or not self._sends_all:
            if self._lone is not None:
                self._lone.asked()
            self._lone = None
            weight.asked()
            if weight.base is not None:
                weight.base.asked()
        else:
            self._lone = weight
        self._called = True
        self.latest = weight.base
        self._base.clear()

    @property
    def was_called(self) -> bool:
        """Whether a call of the model, or of a loss that weighs itself, was weighed in this
        round.
        """
        return self._called

    def base(self, entered: Weight | None = None) -> Weight | None:
        """Return the weight of all gradients of the running backward.

        That is the weight of the call by which it has `entered` the model first. Until then it is
        the weight of the last call: a parameter that has landed by then has only a penalty.
        """
        if self.weight is not None:
            return self.weight
        task = torch._C._current_graph_task_id()
        if entered is not None:
            self._base.setdefault(task, entered.base)
        return self._base.get(task, self.latest)

    def weighs(self, call: Weight | None = None) -> float | None:
        """Return the factor for a gradient of the running backward, or None.

        It is also None if the share goes with the gradients that are sent.
        """
        if self.weight is not None:
            return None
        base = self.base(call)
        return None if base is None else base.value()

    @property
    def goes_along(self) -> bool:
        """Whether the share is expected to go with the gradients that are sent."""
        return self._lone is not None or self.weight is not None

    @property
    def _sends_all(self) -> bool:
        """Whether all gradients of the next backward go over lanes, and nothing besides them."""
        return not (self.accumulating or self.unsent or self._main)

    def open(self, opened: Callable[[], None], finish: Callable[[], None]) -> None:
        """Open the round for the running backward, which calls `finish` at its end. If it is open
        already, this does nothing.

        Raises:
            WorldError: it was open for another backward, which ended half-way.
        """
        with self._opening:
            task = torch._C._current_graph_task_id()  # gradient 1
            if self._task is None:
                self._task, self._began_s = task, perf_counter()
                # without a call, the backward belongs to an earlier one: to its graph again, or to
                # values that it kept
                of_calls = self._lone if self._called else self.latest
                self.weight = of_calls if self._sends_all else None
                self._routes.reached(f"backward {self._routes.step}")
                opened()
                at_end = partial(finish)
                # only the backward holds it, so it is gone when that has ended in any way
                self.running = ref(at_end)
                Variable._execution_engine.queue_callback(at_end)
                for transfer in takewhile(attrgetter("at_once"), self._queue.transfers):
                    self.ready(transfer)
            elif self._task != task or self.running() is None:
                raise WorldError(
                    "the backward before this one ended with an error after a part of its "
                    "gradients was sent",
                    do="end the job and start again from a checkpoint",
                )

    def mark(self, transfer: Transfer) -> Mark | None:
        return self._routes.mark(transfer)

    def ready(self, transfer: Transfer) -> None:
        with self._opening:
            self._queue.ready[transfer] = this_moment(self._routes.device)  # gradient 5
            self._queue.send(self)

    def found_nan(self, parameter: str) -> None:
        self._routes.warn_of_nan(parameter)

    def make_room(self, transfer: Transfer) -> None:
        """Wait until a transfer may fill its bucket.

        Then no lane works on it, and not too many buckets have memory.

        It waits only for transfers that were sent before, because every rank sends these without
        further calls. It does not wait for others, even if too many buckets have memory then. Lanes
        open buckets without asking, because all ranks wait for lanes. There is no wait either if
        main threads meet in backward: a rank without gradients for a transfer sends it only when
        backward is over.
        """
        routes = self._routes
        routes.settle(transfer)
        if not self._buckets.freed or self._main:
            return
        queue = self._queue
        for errand, sent in zip(queue.sent, queue.transfers, strict=False):  # the oldest first
            if self._buckets.live < BUCKETS_A_LANE * len(routes.going):
                break
            if isinstance(sent, OwnedTransfer):
                routes.wait(errand, sent, "wait for room")

    def finish(self) -> None:
        """Send the transfers that were never ready, wait for all that need it, and publish."""
        routes, queue = self._routes, self._queue
        routes.note("backward", self._began_s)
        waits_s = perf_counter()
        self.running = nothing
        queue.send(self, everything=True)  # gradient 12
        for errand, transfer in zip(queue.sent, queue.transfers, strict=True):
            if not isinstance(transfer, OwnedTransfer):
                routes.wait(errand, transfer)
            transfer.publish()
        routes.note("wait for gradients", waits_s)
