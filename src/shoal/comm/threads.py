"""Ranks as threads of one process: for tests, and with one rank, for a single process.

        rank 0                    the hub                     rank 1
    send(tensor, to=1) ──copy──▶ mailbox (channel, 0, 1) ──copy──▶ receive(tensor, source=0).wait()

There is one mailbox for each channel, source and destination. A message costs two copies and one
wake-up, and no bytes leave the process. When a rank fails the hub is aborted. Then every other rank
that waits, or communicates later, hears at once which rank failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Condition, Lock, Thread, current_thread
from time import monotonic
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from shoal.comm.wait_places import Apart, ChannelNotes, Journal, RankPlace, apart, missed, unlike
from shoal.contracts.comm import Comm, Pending
from shoal.contracts.plain import packed, unpacked
from shoal.core.errors import DeadlinePassed, PeerLost, RanksDiffer, ShoalError, WorldError
from shoal.core.facts import Topology
from shoal.core.host_copies import to_host
from shoal.core.side_threads import is_side_thread

T = TypeVar("T")
_LOOK_S = 0.5  # seconds between two looks of a waiting thread


@dataclass
class _Mailbox:
    """Messages between two ranks on a channel: the n-th receive gets the n-th message."""

    arrived: Condition
    sent: int = 0
    posted: int = 0
    messages: dict[int, Any] = field(default_factory=dict)


class Hub:
    """Hub that the ranks of one process share: the mailboxes, and the rank that failed first.

    `hosts[rank]` is the host that each rank counts as its own. By default each rank has a host of
    its own. The last `servers` ranks are servers, or the last `tail` run the end of the model.
    """

    def __init__(
        self,
        size: int = 1,
        timeout_s: float = 60.0,
        hosts: Sequence[str] | None = None,
        servers: int = 0,
        tail: int = 0,
    ) -> None:
        self.size = size
        self.topology = Topology(
            tuple(hosts or (f"thread{rank}" for rank in range(size))), servers, tail
        )
        self.timeout_s = timeout_s
        self.journals = [Journal() for _ in range(size)]
        self.lost: int | None = None  # the rank that failed first
        self.failure: BaseException | None = None
        self._apart: Apart | None = None  # finding of the last look
        self._in_vain: Apart | None = None  # the same finding twice: it is certain
        self._lock = Lock()
        self._boxes: dict[tuple[str, int, int], _Mailbox] = {}

    def put(self, channel: str, source: int, to: int, message: Any) -> None:
        """Leave a message for the receiver, to which it belongs from now on."""
        with self._lock:
            if to == self.lost:
                self.check(f"channel {channel}")
            box = self._box(channel, source, to)
            box.messages[box.sent] = message
            box.sent += 1
            box.arrived.notify_all()

    def post(self, channel: str, source: int, to: int) -> int:
        """Ask for the next message. Return its number; `take` of this number waits for it."""
        with self._lock:
            box = self._box(channel, source, to)
            box.posted += 1
            return box.posted - 1

    def take(
        self,
        channel: str,
        source: int,
        to: int,
        number: int,
        timeout_s: float | None,
        look: Callable[[], object] = lambda: None,
    ) -> Any:
        """Return the message of that number, once it is there, or raise PeerLost or DeadlinePassed.

        `look` is called every half second until then.
        """
        until = math.inf if timeout_s is None else monotonic() + timeout_s
        with self._lock:
            box = self._box(channel, source, to)

            def is_over() -> bool:
                return self.lost is not None or number in box.messages

            while not box.arrived.wait_for(is_over, max(0.0, min(_LOOK_S, until - monotonic()))):
                if monotonic() >= until:
                    break
                self._lock.release()
                try:
                    look()
                finally:
                    self._lock.acquire()
            if number in box.messages:  # even if its rank has left since
                return box.messages.pop(number)
            self.check(f"channel {channel}")
            raise DeadlinePassed(
                f"rank {source} sent nothing to rank {to} within {timeout_s or math.inf:g} s",
                where=f"rank {to}, channel {channel}",
                do="let every rank make the same calls in the same order, or raise the time-out",
                rank=source,
            )

    def abort(self, rank: int, failure: BaseException) -> None:
        """Tell all ranks that wait or come later that `rank` has failed.

        The first failure stands. But a RanksDiffer on another rank, which names `rank` as the
        reason, may come before its cause; then the cause stands.
        """
        with self._lock:
            named = isinstance(self.failure, RanksDiffer) and self.failure.rank == rank
            if self.lost is None or (named and not isinstance(failure, RanksDiffer | PeerLost)):
                self.failure, self.lost = failure, rank
            for box in self._boxes.values():
                box.arrived.notify_all()

    def look(self, where: str) -> None:
        """Raise RanksDiffer if ranks wait for one another in vain, and did at the look before."""
        places = self._places()
        for rank in places:
            self.journals[rank].asked |= missed(rank, places)
        for summons in filter(None, [journal.summons() for journal in self.journals]):
            for journal in self.journals:
                journal.heed(summons)
        before, self._apart = self._apart, apart(places)
        if self._apart is not None and before == self._apart:
            self._in_vain = self._apart
            raise self._apart.error(where)

    def found(self) -> Apart | None:
        """Find ranks that do different things, for a rank that has noticed some."""
        return unlike(self._places())

    def _places(self) -> dict[int, RankPlace]:
        return {rank: self.journals[rank].place() for rank in range(self.topology.workers)}

    def check(self, where: str) -> None:
        """Raise PeerLost if a rank has failed, or RanksDiffer if it failed with that error."""
        if self._in_vain is not None:
            raise self._in_vain.error(where)
        if isinstance(self.failure, RanksDiffer):
            apart = self.found()
            raise self.failure.struck(where) if apart is None else apart.error(where)
        if self.lost is not None:
            raise PeerLost(
                f"rank {self.lost} was lost: {type(self.failure).__name__}",
                where=where,
                do=f"read the first error of rank {self.lost}",
                rank=self.lost,
            )

    def forget(self, channel: str, to: int) -> None:
        """Drop a rank's incoming mailboxes of one channel."""
        with self._lock:
            for source in range(self.size):
                self._boxes.pop((channel, source, to), None)

    def _box(self, *key: Any) -> _Mailbox:
        if key not in self._boxes:
            self._boxes[key] = _Mailbox(Condition(self._lock))
        return self._boxes[key]


@final
class ThreadComm(Comm):
    """One rank of a hub. `ThreadComm()` is alone in its world.

    `send` copies, so its wait returns at once. The wait of `receive` blocks until the message is
    there.
    """

    def __init__(
        self,
        rank: int = 0,
        hub: Hub | None = None,
        name: str = "world",
        topology: Topology | None = None,
        idle: bool = False,
        seats: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.hub = hub or Hub()
        self.topology = topology or self.hub.topology
        self.size = self.topology.size
        self.name = name
        self.timeout_s = None if idle else self.hub.timeout_s
        # the hub's ranks that this channel has
        self._seats = tuple(range(self.size) if seats is None else seats)
        self._channels = 0
        self._journal = self.hub.journals[self._seat]
        self._record = self._journal.note_opening(name, self._seats, numbered=not idle)
        self.journal = ChannelNotes(self._record, self._journal)

    @property
    def _seat(self) -> int:
        return self._seats[self.rank]

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Copy `tensor` into the mailbox; it must be contiguous, as for gloo."""
        assert tensor.is_contiguous()
        # a GPU's tensor goes through the host, as between processes: the receiver computes on
        # another stream
        at_host = tensor.detach().clone() if tensor.device.type == "cpu" else to_host(tensor)
        self.hub.put(self.name, self._seat, self._seats[to], at_host)
        return DONE

    def receive(self, tensor: Tensor, source: int) -> Pending:
        """Take the next message from `source`; the wait copies it into `tensor`."""
        number = self.hub.post(self.name, self._seats[source], self._seat)
        return _Receive(self, tensor, source, number)

    def channel(self, name: str, *, idle: bool = False) -> ThreadComm:
        """Open a new channel, even if the name was used before."""
        self._channels += 1
        name = f"{self.name}/{name}#{self._channels}"
        return ThreadComm(self.rank, self.hub, name, self.topology, idle, self._seats)

    def group(self, ranks: Sequence[int]) -> ThreadComm:
        """Open a channel of these ranks only."""
        name = f"{self.name}/{len(ranks)} from {ranks[0]} to {ranks[-1]}"
        seats, topology = [self._seats[rank] for rank in ranks], self.topology.among(ranks)
        return ThreadComm(ranks.index(self.rank), self.hub, name, topology, seats=seats)

    def gather_objects(self, value: Any, purpose: str, *kinds: type) -> list[Any]:
        """Every rank's value, packed as between processes: no two ranks share an object."""
        self.journal.begins(purpose)
        (parcel, records), ranks = packed(value, kinds), range(self.size)
        for seat in self._seats:
            self.hub.put(self.name, self._seat, seat, (purpose, parcel))
        numbers = [self.hub.post(self.name, seat, self._seat) for seat in self._seats]
        told = [self.take(source, numbers[source]) for source in ranks]
        for rank, theirs in enumerate(told):
            theirs = theirs if isinstance(theirs, tuple) else ("", theirs)
            if theirs[0] != purpose:
                raise self.unlike(rank, theirs[0], purpose)
        return [unpacked(parcel, records) for _, parcel in told]

    def take(self, source: int, number: int) -> Any:
        """Wait for a message. The main thread checks meanwhile whether ranks wait in vain."""
        is_lane = current_thread().name.startswith("shoal-")
        looked = False

        def look() -> None:
            nonlocal looked
            looked = True
            self.check(self._record.purpose)

        look_or_not = look if not is_lane else lambda: None
        seats = self._seats[source], self._seat
        message = self.hub.take(self.name, *seats, number, self.timeout_s, look_or_not)
        if looked:
            self.reached(self._record.purpose)
        return message

    def close(self) -> None:
        """Drop messages that were not fetched."""
        self._journal.closed(self._record)
        self.hub.forget(self.name, self._seat)

    def reached(self, where: str) -> None:
        """Note that the main thread no longer waits."""
        if not is_side_thread():
            self._journal.wait = None

    def check(self, where: str, number: int | None = None) -> None:
        """Raise PeerLost if a rank has failed, and RanksDiffer if ranks wait in vain."""
        self.hub.check(f"{where}, channel {self.name}")
        if is_side_thread():
            return
        self._journal.waits(self._record, number, where)
        self.hub.look(f"rank {self._seat} at {where}")
        if self._journal.asked:
            self._journal.answer()

    def hear(self, *, again: bool = True) -> None:
        """Raise the error that ended the other ranks' work, if one has failed."""
        self.hub.check(f"rank {self._seat}")

    def unlike(self, rank: int, theirs: str, own: str) -> ShoalError:
        """Return the error for a rank that reports a different purpose from this one's."""
        error = self.explain(super().unlike(rank, theirs, own))
        self._record.told()
        return error

    def explain(self, error: ShoalError) -> ShoalError:
        """Replace an error that knows of some ranks by one that knows the places of all."""
        found = self.hub.found()
        return error if found is None else found.error(error.where)

    def leave(self, error: BaseException | None) -> None:
        """Leave the hub.

        With an error, all other ranks hear of it as if this rank's work had raised it.
        """
        if error is not None and self.hub.size > 1:
            self.hub.abort(self._seat, error)

    def diagnose(self, error: BaseException, where: str) -> BaseException:
        """Return the same error with the place where it occurred, unless it is this rank's own."""
        if isinstance(error, RanksDiffer):
            return self.explain(error)
        if not isinstance(error, WorldError):
            return error
        return type(error)(
            error.what, where=f"{where} ({error.where})", do=error.do, rank=error.rank
        )


class Done:
    """Send that needs no waiting."""

    def wait(self) -> None:
        """Return."""


DONE = Done()


@dataclass(frozen=True)
class _Receive:
    comm: ThreadComm
    tensor: Tensor
    source: int
    number: int

    def wait(self) -> None:
        comm, expected = self.comm, self.tensor.detach().view(-1)
        got = comm.take(self.source, self.number)
        if not isinstance(got, Tensor) or (got.numel(), got.dtype) != (
            expected.numel(),
            expected.dtype,
        ):
            raise comm.explain(
                RanksDiffer(
                    f"rank {self.source} sent something else than rank {comm.rank} receives",
                    where=f"rank {comm.rank}, channel {comm.name}",
                    got=f"{got.numel()} × {got.dtype}"
                    if isinstance(got, Tensor)
                    else "a Python object",
                    expected=f"{expected.numel()} × {expected.dtype}",
                    do="let every rank make the same calls in the same order",
                    rank=self.source,
                )
            )
        expected.copy_(got.view(-1), non_blocking=True)


def run(
    ranks: int,
    work: Callable[[ThreadComm], T],
    timeout_s: float = 60.0,
    hosts: Sequence[str] | None = None,
    servers: int = 0,
    tail: int = 0,
) -> list[T]:
    """Run `work(comm)` once for each rank, on a thread with a context of its own.

    Args:
        ranks: number of ranks.
        work: the function that each rank runs.
        timeout_s: seconds that a receive may wait, and that other ranks may take to end after one
            failed.
        hosts: the host that each rank counts as its own; by default each has one of its own.
        servers: number of servers, the last ranks.
        tail: number of ranks, the last ones, that run the end of the model.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        BaseException: the error of the rank that failed first, not the errors that followed from
            it.

    Examples:
        >>> run(3, lambda comm: comm.gather_objects(comm.rank, "ranks"))
        [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    hub = Hub(ranks, timeout_s, hosts, servers, tail)
    results: dict[int, T] = {}
    ended: SimpleQueue[int] = SimpleQueue()
    failed: list[int] = []

    def serve(rank: int) -> None:
        try:
            # a GPU has one thread for the backwards of all ranks, which would wait for one another
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = Context().run(work, ThreadComm(rank, hub))
        except BaseException as error:
            failed.append(rank)
            hub.abort(rank, error)
        finally:
            ended.put(rank)

    threads = {
        rank: Thread(target=serve, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(ranks)
    }
    for thread in threads.values():
        thread.start()
    try:
        while threads:
            threads.pop(ended.get(timeout=timeout_s if hub.failure else None)).join()
    except Empty:
        assert hub.failure is not None
        hub.failure.add_note(f"ranks {sorted(threads)} had not ended {timeout_s:g} s later")
    if failed:
        assert hub.failure is not None
        hub.failure.add_note(f"on rank {hub.lost} of {ranks}")
        raise hub.failure
    return [results[rank] for rank in range(ranks)]
