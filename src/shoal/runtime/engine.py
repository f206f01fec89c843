"""The engine: gradients travel while backward still runs.

It owns order, threads and errors; what it runs (`Transfer.run`) is straight-line and blocking. One
backward:

    1  begin    as backward enters the model, or else with its first gradient, a round opens and
                asks autograd to be called at the end
    2  ready    a transfer has everything: it is packed, and sent as soon as all before it in the
                plan's order are
    3  lanes    transfer i of its kind runs on lane i mod L, each lane a thread with a channel of
                its own, so the order of messages in a channel is the same on every rank, whatever
                the threads do. On a GPU all that is NCCL's has the first: NCCL's communicators,
                called in another order on each rank, may wait for one another
    4  finish   backward is over: what never got ready is packed as it is, lanes are waited for,
                gradients published

After `loss.backward()` every `.grad` is the global one: clipping, scalers, accumulation and reading
need no more. A transfer whose sums stay with their owners is not waited for: what follows it
(`later`) comes behind it on its lane, or, where servers are the owners, on one for the way back:
what goes to them and what comes from them do not share a link. Where memory is to be low, backward
waits before it fills another bucket for owners while two a lane are not summed yet. Guarded by
tests/runtime/test_engine.py: order under random delays, errors, no thread left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from threading import RLock
from time import perf_counter
from typing import final
from weakref import ref

import torch
from torch.autograd import Variable

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer, Transfer
from shoal.core.buckets import BUCKETS_A_LANE, Buckets
from shoal.core.errors import UsageError, WorldError
from shoal.core.trace import MAIN, Recorder
from shoal.runtime.lanes import Errand, Lane, after, now
from shoal.runtime.weights import Weight


def _nothing() -> None:
    return None


def _is_served(transfer: Transfer) -> bool:
    return isinstance(transfer, OwnedTransfer) and transfer.served


@final
class Engine:
    """Runs the transfers of one parallelised model, once in every backward."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        lanes: Sequence[Comm],
        served: Sequence[Comm] = (),
        back: Sequence[Comm] = (),
        buckets: Buckets | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Start the lanes.

        Args:
            transfers: in the order in which they are sent.
            lanes: channels among the workers, each for a lane.
            served: channels among all ranks, for transfers that servers take part in.
            back: channels for these transfers' way back; without any they come back as they went.
            buckets: the memory that the transfers' buckets have.
            device: where the model is, if that computes in streams.
        """
        self.steps = 0  # rounds finished
        self.began: Callable[[], None] = _nothing  # called as a round opens
        self.entered: Sequence[Callable[[], None]] = ()  # called as any backward enters the model
        self.transfers = tuple(transfers)
        self.buckets = buckets or Buckets()
        self.others: Sequence[Comm] = ()  # channels that the main thread itself waits for
        # whose share goes with all that the running backward sends
        self.weight: Weight | None = None
        self._called = False  # the model, since the last round
        self._lone: Weight | None = None  # of that call, as long as there is no other
        among_workers = [Lane(comm, f"lane {number}", device) for number, comm in enumerate(lanes)]
        with_servers = [Lane(comm, f"server lane {number}") for number, comm in enumerate(served)]
        from_servers = [
            Lane(comm, f"lane {number} from servers") for number, comm in enumerate(back)
        ]
        self.served_lanes = with_servers
        self._going = among_workers + with_servers
        self.lanes = self._going + from_servers
        by_nccl = {t for t in self.transfers if t.native} if device is not None else set()
        others = among_workers[1:] if by_nccl and len(among_workers) > 1 else among_workers
        ways = {False: cycle(others), True: cycle(with_servers)}
        self._lane = {
            t: among_workers[0] if t in by_nccl else next(ways[_is_served(t)])
            for t in self.transfers
        }
        self._lane_back = self._lane | dict(
            zip(filter(_is_served, self.transfers), cycle(from_servers), strict=False)
        )
        self._device = device
        # and since when: each on the stream that brought it
        self._ready: dict[Transfer, torch.Event | None] = {}
        self._sent: list[Errand] = []
        # the last errand of each transfer that is not waited for
        self._last: dict[Transfer, Errand] = {}
        self._changing_last = RLock()  # a checkpoint's thread may wait for parameters, too
        self._task: int | None = None  # autograd's number of the backward whose round is open
        # gives what that one calls at its end, while it runs
        self._at_end: Callable[[], object | None] = _nothing
        self._landing = RLock()  # autograd has a thread for each device
        self._failed = False
        self._accumulating = 0  # contexts inside one another
        self._unsent = False
        self._recorder: Recorder | None = None
        self._began_s = 0.0  # the running backward, by perf_counter
        for transfer in self.transfers:
            transfer.came, transfer.ready = self._came, self._announce
            if isinstance(transfer, OwnedTransfer):
                transfer.settle = partial(self._make_room, transfer)

    def called(self, weight: Weight, asks: bool) -> None:
        """The model is called, and what comes of it is to be weighed.

        If it is the only call until backward, its share goes with all that is sent (also by a rank
        on which backward does not come by way of the model), unless it `asks`. Else the ranks'
        counts are exchanged, beside forward.
        """
        if self._called or asks or not self._sends_what_comes:
            if self._lone is not None:
                self._lone.ask()
            self._lone = None
            weight.ask()
        else:
            self._lone = weight
        self._called = True

    @property
    def _sends_what_comes(self) -> bool:
        """Whether all that the next backward brings goes over lanes, and nothing else does."""
        return not (self._accumulating or self._unsent or self.others)

    def begin(self) -> None:
        """Open a round for the backward that is running. Called as it enters the model, once for
        each output.

        Raises:
            WorldError: the backward before this one ended half-way, so the ranks no longer agree on
                what was sent.
        """
        for each in self.entered:
            each()
        if self._accumulating:
            self._unsent = True
            return
        with self._landing:
            self._begin()

    def _begin(self) -> None:
        task = torch._C._current_graph_task_id()
        if self._task is None:
            self._task, self._began_s = task, perf_counter()
            self._weigh(self._lone if self._sends_what_comes else None)
            self._reached(f"backward {self.steps}")
            self.began()
            at_end = partial(self._finish)
            # only the backward holds it: gone when that has ended, however it did
            self._at_end = ref(at_end)
            Variable._execution_engine.queue_callback(at_end)
        elif self._task != task or self._failed:
            raise WorldError(
                "the backward before this one ended with an error after a part of its gradients "
                "was sent",
                do="end the job and start again from a checkpoint",
            )

    @contextmanager
    def recorded(self) -> Iterator[Recorder]:
        """Note what the lanes and the main thread do inside."""
        recorder = Recorder()
        self._record(recorder)
        try:
            yield recorder
        finally:
            self._record(None)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep the gradients of backwards inside on this rank; the next backward outside sends them
        with its own.
        """
        self._accumulate(+1)
        try:
            yield
        finally:
            self._accumulate(-1)

    def check_sent(self) -> None:
        """Raise UsageError where gradients would be taken for global ones that were never sent."""
        if self._unsent:
            raise UsageError(
                "gradients that were accumulated on this rank have not been sent",
                do="do the last backward before optimizer.step() outside optimizer.accumulate()",
            )

    def later(self, transfer: Transfer, work: Callable[[Comm], None], what: str) -> None:
        """Have a transfer's lane do `what`, behind all that it has to do. The same calls in order
        on every rank.
        """
        self._behind(transfer, self._lane_back[transfer], work, f"{what} {transfer.label}")

    def beside(
        self, transfer: Transfer, work: Callable[[Comm], None], what: str, back: bool
    ) -> Errand:
        """Have the lane of a transfer's way there, or `back`, do `what`, whatever the transfer
        itself is at.
        """
        return (self._lane_back if back else self._lane)[transfer].run(work, what)

    def exchange(self, transfer: Transfer) -> None:
        """Have a transfer's lane run it, behind all that it has to do: as `later`, but on its way
        there.
        """
        self._behind(transfer, self._lane[transfer], transfer.run, f"exchange {transfer.label}")

    def _behind(
        self, transfer: Transfer, lane: Lane, work: Callable[[Comm], None], what: str
    ) -> None:
        with self._changing_last:
            before = self._last.get(transfer)

            def behind(comm: Comm) -> None:
                if before is not None:
                    before.result()  # another lane may be at it; if it fails, so does this
                work(comm)

            self._last[transfer] = lane.run(behind, what)

    def settle(self, transfer: Transfer) -> None:
        """Wait until a transfer's lane is done with it; an error there is raised here."""
        errand = self._last.get(transfer)
        if errand is None:
            return
        begin_s = perf_counter()
        # an error here comes again at the next look
        errand.wait(f"step {self.steps}, {transfer.label}")
        self._note(f"wait for {errand.what}", begin_s)
        with self._changing_last:
            if self._last.get(transfer) is errand:
                del self._last[transfer]

    def is_busy(self, transfer: Transfer) -> bool:
        """Whether a lane has something to do with a transfer that nobody has waited for."""
        return transfer in self._last

    def check(self) -> None:
        """Raise the error of a transfer that has ended with one and that nobody has waited for."""
        for transfer, errand in list(self._last.items()):
            if errand.failed():
                self.settle(transfer)

    def _make_room(self, transfer: Transfer) -> None:
        """Wait until a transfer may fill its bucket: no lane works on it, and not too many buckets
        have memory.

        What is waited for was sent before, so every rank sends it without our doing; what was not
        sent yet is not waited for, even if there are too many then. Lanes, which all ranks wait
        for, open buckets without asking. Nor is it waited for where main threads meet in backward:
        one that has not used it sends it when backward is over.
        """
        self.settle(transfer)
        if not self.buckets.freed or self.others:
            return
        for errand, sent in zip(self._sent, self.transfers, strict=False):  # the oldest first
            if self.buckets.live < BUCKETS_A_LANE * len(self._going):
                break
            if isinstance(sent, OwnedTransfer):
                begin_s = perf_counter()
                errand.wait(f"step {self.steps}, {sent.label}")
                self._note("wait for room", begin_s)

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients are kept on this rank, or are going to be."""
        return bool(self._accumulating) or self._unsent

    @property
    def is_open(self) -> bool:
        """Whether a round is open: a backward runs, or has ended with an error."""
        return self._task is not None

    def close(self) -> None:
        """End the lanes' threads and give back their channels."""
        for lane in self.lanes:
            lane.close()

    def _record(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        for lane in self.lanes:
            lane.recorder = recorder
        for comm in self.others:
            comm.recorder = recorder

    def _note(self, what: str, begin_s: float) -> None:
        if self._recorder is not None:
            self._recorder.note(what, MAIN, begin_s)

    def _accumulate(self, deeper: int) -> None:
        self._accumulating += deeper
        for transfer in self.transfers:
            transfer.accumulating = bool(self._accumulating)

    def _reached(self, where: str) -> None:
        for lane in self.lanes[:1]:  # they share one comm's word
            lane.reached(where)

    def _weigh(self, weight: Weight | None) -> None:
        self.weight = weight
        for transfer in self.transfers:
            transfer.share = 1.0 if weight is None else weight.share

    def _came(self) -> None:
        """Open a round where backward came in by another way than the model's output, or the last
        one never ended.
        """
        with self._landing:
            if self._task is None or self._failed or self._at_end() is None:
                self.begin()

    def _announce(self, transfer: Transfer) -> None:
        if self._accumulating:
            self._unsent = True
            return
        with self._landing:
            self._came()
            self._ready[transfer] = now(self._device)
            self._send_in_order()

    def _send_in_order(self, everything: bool = False) -> None:
        while len(self._sent) < len(self.transfers):
            transfer = self.transfers[len(self._sent)]
            if not (everything or transfer in self._ready):
                return
            after(self._ready.get(transfer), self._device)
            transfer.pack()
            errand = self._lane[transfer].run(transfer.run, f"exchange {transfer.label}")
            self._sent.append(errand)
            if isinstance(transfer, OwnedTransfer):
                with self._changing_last:
                    self._last[transfer] = errand

    @torch.no_grad()
    def _finish(self) -> None:
        self._note("backward", self._began_s)
        waits_s = perf_counter()
        self._failed = True  # until all has gone well
        self._send_in_order(everything=True)
        for errand, transfer in zip(self._sent, self.transfers, strict=True):
            if not isinstance(transfer, OwnedTransfer):
                errand.wait(f"step {self.steps}, {transfer.label}")
            transfer.publish()
        self._note("wait for gradients", waits_s)
        self._sent.clear()
        self._ready.clear()
        self._task, self._failed, self._unsent = None, False, False
        self._weigh(None)
        self._called, self._lone = False, None
        self.steps += 1
        self._reached(f"after backward {self.steps - 1}")
