"""One backward that sends: from the calls of the model before it to the gradients behind it.

       called    the model is called: what it counts is this round's share, if it is the only call
    1  open      backward enters the model, or else its first gradient is there; autograd is asked
                 to call at the end
    5  ready     a transfer has everything: it is packed, and sent as soon as all before it in the
                 plan's order are
    12 finish    backward is over: what never got ready is packed as it is, lanes are waited for,
                 gradients published

The numbers are those of docs/ideas/walk-gradient.md, which follows one gradient all the way.
A round whose backward ended half-way stays the engine's last one: the ranks no longer agree on what
was sent. Guarded by tests/engine/test_engine.py.
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
from shoal.core.nothing import nothing
from shoal.engine.lanes import Errand, after, this_moment
from shoal.engine.routes import Routes
from shoal.engine.weights import Weight


@final
class _SendQueue:
    """The transfers of one backward, which are sent in the plan's order.

    Args:
        transfers: in that order.
        routes: the lanes that they go over.
    """

    def __init__(self, transfers: Sequence[Transfer], routes: Routes) -> None:
        self.transfers, self._routes = transfers, routes
        # and since when: each on the stream that brought it
        self.ready: dict[Transfer, torch.Event | None] = {}
        self.sent: list[Errand] = []  # of the first transfers

    def send(self, backward: Round, everything: bool = False) -> None:
        """Pack and send what is ready, as long as all before it are; or all that is left."""
        while len(self.sent) < len(self.transfers):
            transfer = self.transfers[len(self.sent)]
            if not (everything or transfer in self.ready):
                return
            after(self.ready.get(transfer), self._routes.device)
            transfer.pack(backward)
            self.sent.append(self._routes.send(transfer))


@final
class BackwardRound(Round):
    """The round of one model that is open, or that the next backward opens.

    Args:
        transfers: those that go as their gradients land, in the order in which they are sent.
        routes: the lanes that they go over.
        buckets: the memory that their buckets have.
        main: the channels that the main thread itself waits for.
        accumulating: whether it begins within `accumulate`.
        latest: the weight of the last call of the model before it.
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
        self.unsent = False  # gradients were accumulated that no backward has sent yet
        self.weight: Weight | None = None  # whose share goes with all that is sent
        self._queue = _SendQueue(transfers, routes)
        self._routes, self._buckets, self._main = routes, buckets, main
        self._called = False  # the model, in this round
        self._lone: Weight | None = None  # of that call, as long as there is no other
        self.latest = latest  # weight of the last call, also of one before this round
        self._base: dict[int, Weight | None] = {}  # of each backward, by autograd's number of it
        self._task: int | None = None  # autograd's number of the backward, once it is open
        # gives what that one calls at its end, as long as gradients may land; then None
        self.running: Callable[[], object | None] = nothing
        self._opening = RLock()  # autograd has a thread for each device
        self._began_s = 0.0  # by perf_counter

    @property
    def share(self) -> float:
        return 1.0 if self.weight is None else self.weight.share

    @property
    def is_open(self) -> bool:
        """Whether a backward has opened it; it may have ended with an error."""
        return self._task is not None

    def take(self, transfers: Sequence[Transfer]) -> None:
        """Before it opens: be the round of these transfers, in place of those it was to have."""
        self._queue.transfers = transfers

    def called(self, weight: Weight, asks: bool) -> None:
        """The model is called, and what comes of it is to be weighed.

        If it is the only call until backward, its share goes with all that is sent (also by a rank
        on which backward does not come by way of the model), unless it `asks`. Else the ranks'
        counts are exchanged, beside forward.
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
        """Whether a call of the model, or of a loss that weighs itself, was weighed in it."""
        return self._called

    def base(self, entered: Weight | None = None) -> Weight | None:
        """What all gradients of the running backward are weighed by.

        That is the weight of the call by whose output it has `entered` the model first. Until then
        it is that of the last call: a parameter that has landed already has but a penalty.
        """
        if self.weight is not None:
            return self.weight
        task = torch._C._current_graph_task_id()
        if entered is not None:
            self._base.setdefault(task, entered.base)
        return self._base.get(task, self.latest)

    def weighs(self, call: Weight | None = None) -> float | None:
        """What a gradient of the running backward is to be multiplied by, or None.

        None, too, where the share goes with what is sent.
        """
        if self.weight is not None:
            return None
        base = self.base(call)
        return None if base is None else base.value()

    @property
    def goes_along(self) -> bool:
        """Whether, as far as it is known, the share goes with what is sent."""
        return self._lone is not None or self.weight is not None

    @property
    def _sends_all(self) -> bool:
        """Whether all that the next backward brings goes over lanes, and nothing else does."""
        return not (self.accumulating or self.unsent or self._main)

    def open(self, opened: Callable[[], None], finish: Callable[[], None]) -> None:
        """Open it for the backward that is running, which has `finish` called at its end. Once it
        is open this does nothing.

        Raises:
            WorldError: it was open for another backward, which ended half-way.
        """
        with self._opening:
            task = torch._C._current_graph_task_id()  # gradient 1
            if self._task is None:
                self._task, self._began_s = task, perf_counter()
                # without a call it is of an earlier one: of its graph again, or of what it kept
                of_calls = self._lone if self._called else self.latest
                self.weight = of_calls if self._sends_all else None
                self._routes.reached(f"backward {self._routes.step}")
                opened()
                at_end = partial(finish)
                # only the backward holds it: gone when that has ended, however it did
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

        No lane works on it then, and not too many buckets have memory.

        What is waited for was sent before, so every rank sends it without our doing; what was not
        sent yet is not waited for, even if there are too many then. Lanes, which all ranks wait
        for, open buckets without asking. Nor is it waited for where main threads meet in backward:
        one that has not used it sends it when backward is over.
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
        """Send what never got ready, wait for what is to be waited for, and publish."""
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
