"""Lanes: threads that run blocking exchanges in order, each over a channel of its own.

The order of messages within a channel is the order of `run` calls. It is the same on every rank,
whatever the threads do. Each job costs one queue hop and one event.

On a GPU a lane computes on a stream of its own. So it waits for the work that was queued before its
job, and not for all that backward has queued since:

    main stream   ── backward of layer 9 ─●─ backward of layer 8 ─ … ───▶ wait ─ uses gradients ──
                                          ▼                                ▲
    lane's stream                         ── copy to the host, send, add ──●
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import final

import torch

from shoal.contracts.comm import Comm
from shoal.core.errors import WorldError
from shoal.core.trace import Recorder

_HAVE_STREAMS = ("cuda", "xpu")
_POLL_S = 0.5  # seconds between two looks of a waiting rank for a lost peer
_LOOK_S = 0.001  # seconds between two looks whether a device has finished


@final
class Errand:
    """Queued job of a lane: one exchange under way."""

    def __init__(
        self,
        work: Callable[[Comm], None],
        comm: Comm,
        purpose: str,
        device: torch.device | None = None,
        number: int | None = None,
    ) -> None:
        """Queue a job. It runs after the work that the calling thread has queued on its stream so
        far.

        It computes on `device`, which has streams. Its number comes from `Comm.queued`.
        """
        self.purpose = purpose
        self.number = comm.journal.queued(purpose, number)
        self._work = work
        self._comm = comm
        self._device = device
        self._process = os.getpid()
        self._queued = this_moment(device)
        self._computed: torch.Event | None = None
        self.ended = threading.Event()
        self._error: BaseException | None = None
        self._heard = False  # whether a thread was told of the error

    def run(self) -> None:
        """Do it, on the lane's thread; an error is kept for whoever waits."""
        self._comm.journal.runs(self.number, self.purpose)
        try:
            after(self._queued, self._device)
            self._work(self._comm)
            self._computed = this_moment(self._device)
        except BaseException as error:
            self._error = error
        self.ended.set()

    def give_up(self) -> None:
        """End the job undone, so that no thread waits for it."""
        self._error = WorldError("this rank has ended")
        self.ended.set()

    def result(self) -> None:
        """Block until it is done, and raise its own error.

        The wait is not reported, because the rank is waiting for something else.
        """
        self._check_process()
        self.ended.wait()
        if self._error is not None:
            self._heard = True
            raise self._error
        after(self._computed, self._device)

    def failed(self) -> bool:
        """Return whether it has ended with an error."""
        return self._error is not None

    def unheard(self) -> bool:
        """Return whether it has ended with an error that no thread was told of."""
        return self._error is not None and not self._heard

    def wait(self, where: str, meanwhile: Callable[[], object] | None = None) -> None:
        """Block until it is done. Raise its error as one that names the peer and `where`.

        `meanwhile` is called now and then.
        """
        self._check_process()
        if not self.ended.wait(_POLL_S):
            self._wait_long(where, meanwhile)
        if self._error is not None:
            self._heard = True
            raise self._comm.diagnose(self._error, where) from self._error.__cause__
        after(self._computed, self._device)

    def _wait_long(self, where: str, meanwhile: Callable[[], object] | None) -> None:
        while True:
            self._comm.check(where, self.number)
            if meanwhile is not None:
                meanwhile()
            if self.ended.wait(_POLL_S):
                break
        self._comm.reached(where)

    def _check_process(self) -> None:
        """Raise WorldError in a process that was forked meanwhile, because its lanes have no
        threads.
        """
        if not self.ended.is_set():
            _check_process(self._process)

    def finish(self, where: str) -> None:
        """Block until the device has finished, too, because NCCL's work is only queued there."""
        while self._computed is not None and not self._computed.query():
            self._comm.check(where)
            time.sleep(_LOOK_S)
        self._comm.reached(where)


def streaming(devices: Iterable[torch.device]) -> torch.device | None:
    """Return the first device that computes in streams, if any does."""
    return next((device for device in devices if device.type in _HAVE_STREAMS), None)


def this_moment(device: torch.device | None) -> torch.Event | None:
    """Record this moment of the calling thread's stream on a device."""
    return None if device is None else torch.accelerator.current_stream(device).record_event()


def after(moment: torch.Event | None, device: torch.device | None) -> None:
    """Make the calling thread's stream on a device wait for that moment."""
    if moment is not None:
        torch.accelerator.current_stream(device).wait_event(moment)


def _check_process(process: int) -> None:
    """Raise WorldError in any other process."""
    if os.getpid() != process:
        raise WorldError(
            "this process was forked from a rank, whose exchanges it takes no part in",
            do="read the parameters before it is forked, or start it by the spawn method",
        )


@final
class Lane:
    """Thread with a channel. It is a daemon, so a peer that hangs cannot hold up the exit."""

    def __init__(self, comm: Comm, name: str, device: torch.device | None = None) -> None:
        """Start the thread. `device` is the place where its jobs compute, if it has streams."""
        self.recorder: Recorder | None = None
        self._comm = comm
        self._name = name
        self._device = device
        self._closed = self._abandoned = False
        self._process = os.getpid()
        self._failed: Errand | None = None  # the first job that failed
        self._queue: SimpleQueue[Errand | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="shoal-lane", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[Comm], None], purpose: str, number: int | None = None) -> Errand:
        """Queue `work(comm)` after the lane's other jobs (WorldError once it is closed)."""
        if self._closed:
            raise WorldError(
                "the session that the model was parallelised in has ended",
                do="train within the session",
            )
        _check_process(self._process)
        errand = Errand(work, self._comm, purpose, self._device, number)
        self._queue.put(errand)
        return errand

    def expects(self, seconds: float) -> None:
        """What it exchanges is planned to take so long."""
        self._comm.journal.expects(seconds)

    @property
    def rank(self) -> int:
        """Number of this rank on the lane's channel."""
        return self._comm.rank

    def drain(self) -> None:
        """Wait until all queued jobs are done. Raise an error that no thread has heard."""
        if not self._closed:
            last = self.run(lambda comm: None, "the end")
            last.wait("the end of the program")
            last.finish("the end of the program")
            self.check("the end of the program")

    def check(self, where: str) -> None:
        """Raise the first error of a job, if no thread was told of it."""
        if self._failed is not None and self._failed.unheard():
            self._failed.wait(where)

    def reached(self, where: str) -> None:
        """Report this rank's position, for messages of other ranks that wait for it."""
        self._comm.reached(where)

    def abandon(self) -> None:
        """Let the thread end after its present job, because this rank ends with an error.

        A thread that still computes while the interpreter ends aborts the process ("terminate
        called …").
        """
        self._closed = self._abandoned = True
        self._queue.put(None)

    def close(self) -> None:
        """End the thread after its queued jobs, and close the channel."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout=1.0)
        self._comm.close()

    @torch.no_grad()  # each thread has a mode of its own
    def _serve(self) -> None:
        if self._device is not None:
            # each thread has a current stream of its own
            torch.accelerator.set_stream(torch.Stream(self._device))
        # a lane works on parameters that all other threads wait for
        with torch._C.DisableTorchFunctionSubclass():
            while (errand := self._queue.get()) is not None:
                if self._abandoned:
                    errand.give_up()
                    continue
                begin_s = time.perf_counter()
                errand.run()  # gradient 7
                if self._failed is None and errand.failed():
                    self._failed = errand
                if self.recorder is not None:
                    self.recorder.note(errand.purpose, self._name, begin_s)
                del errand  # do not hold its tensors while waiting for the next job


@final
class Answering:
    """Threads of a server. Each answers one worker over one channel until that worker has ended."""

    def __init__(self) -> None:
        self._threads: list[tuple[Lane, Errand]] = []

    def begin(self, worker: int, answer: Callable[[Comm], None], comm: Comm) -> None:
        """Answer a worker from now on."""
        lane = Lane(comm, f"worker {worker}")
        self._threads.append((lane, lane.run(answer, f"answer worker {worker}")))

    def check(self) -> None:
        """Raise the error that a thread has ended with."""
        for _, errand in self._threads:
            if errand.failed():
                errand.wait("serving")

    def finish(self, meanwhile: Callable[[], None]) -> None:
        """Wait until every worker has ended. `meanwhile` is called now and then."""
        for _, errand in self._threads:
            errand.wait("serving", meanwhile=meanwhile)

    def close(self) -> None:
        """End the threads."""
        for lane, _ in self._threads:
            lane.close()
