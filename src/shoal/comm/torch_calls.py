"""Calls into torch.distributed, and the handles of messages under way.

A thread that waits here for another rank looks at the verdict every half second, and reports where
it waits. Errors come out as the verdict.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar, final

import torch.distributed as dist
from torch import Tensor

from shoal.comm.blocking_calls import Aside, may_block
from shoal.comm.heartbeat import Heartbeat
from shoal.comm.wait_places import ChannelRecord

T = TypeVar("T")
# words of gloo, stores and NCCL if a limit has passed
_LIMIT_PASSED = (
    "timed out waiting",
    "timed out connecting",
    "timed out: no rank wrote",
    "wait timeout after",
    "collective operation timeout",
)
_FOREVER = datetime.timedelta(days=1000)


@final
class Inside:
    """Calls into torch.distributed, with errors that name the lost rank.

    `with` stands around calls that do not block. It is a class and not a generator, because it
    stands around every message. `run` makes calls that block.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        timeout_s: float,
        aside: Aside,
        record: ChannelRecord | None,
        *,
        idle: bool = False,
    ) -> None:
        self.idle = idle  # whether the wait for a message has no limit
        self.journal = heartbeat.journal
        self._heartbeat, self._aside = heartbeat, aside
        self._timeout_s, self._record = timeout_s, record

    def __enter__(self) -> None:
        self._heartbeat.busy.add(threading.get_ident())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._heartbeat.busy.discard(threading.get_ident())
        if isinstance(error, RuntimeError):
            reason = str(error).splitlines()[0]
            overdue_s = self._timeout_s if is_timeout(error) else None
            raise self._heartbeat.judge(reason, overdue_s) from None

    def run(self, call: Callable[[], T], *, in_time: float | None = None) -> T:
        """Make a call that waits for other ranks.

        Args:
            call: the call.
            in_time: limit in seconds; None if the call has a limit of its own.
        """
        return self.beside(partial(self._enter, call), in_time=in_time)

    def beside(self, call: Callable[[], T], *, in_time: float | None = None) -> T:
        """Make a blocking call on another thread, while this thread looks at the verdict.

        The library's own threads make such calls themselves, because no thread waits for them
        without a limit.
        """
        if may_block():
            return call()
        began, looks, record = time.monotonic(), 0, self._record

        def look() -> None:
            nonlocal looks
            looks += 1
            self._heartbeat.check("" if record is None else record.purpose, record)
            if in_time is not None and time.monotonic() - began > in_time:
                raise self._heartbeat.judge("no connections", in_time)

        result = self._aside.run(call, look)
        if looks:
            self._heartbeat.reached(self._heartbeat.at)
        return result

    def _enter(self, call: Callable[[], T]) -> T:
        with self:
            return call()


@final
class WorkHandle:
    """Work handle of torch.distributed."""

    def __init__(self, work: dist.Work, inside: Inside) -> None:
        self._work, self._inside = work, inside

    def wait(self) -> None:
        self._inside.run(self.done)

    def done(self) -> None:
        """Wait on this thread."""
        if self._inside.idle:
            self._work.wait(_FOREVER)
        else:
            self._work.wait()
        self._inside.journal.messages += 1

    def land(self) -> None:
        """Do nothing: no work is left."""


@final
class ReceiveViaHost:
    """Receive at the host of a tensor that belongs on a device."""

    def __init__(self, work: WorkHandle, received: Tensor, wanted: Tensor) -> None:
        self._work, self._received, self._wanted = work, received, wanted
        self.done = work.done

    def wait(self) -> None:
        self._work.wait()
        self.land()

    def land(self) -> None:
        """Copy the received values to the device, once they are here."""
        # no wait for the device: the copy is queued, and later uses of `wanted` are queued after it
        self._wanted.copy_(self._received, non_blocking=True)


def is_timeout(error: RuntimeError) -> bool:
    """Return whether an error of torch.distributed says that the limit of the wait itself has
    passed.

    It does not if the kernel gave a connection up ("Connection timed out", where a network loses
    large packets), or if another rank's limit has passed, which closed the connection.
    """
    text = str(error).lower()
    return any(words in text for words in _LIMIT_PASSED)
