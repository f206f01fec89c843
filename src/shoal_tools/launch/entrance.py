"""The entrance of a tool's port: callers without a proof are bounded.

Whoever reaches a port can open connections and say nothing. Each caller gets a thread, which asks
for a proof that he knows the job's token. Until that proof has come he keeps his place only while
nobody needs it:

    too many callers    the first one to come is put out
    too late            he is put out
    no file is left     half of them are put out, and the entrance goes on

So strangers keep nobody out for longer than it takes to prove oneself. Guarded by
tests/tools/launch/test_entrance.py.

Cost: a thread a caller, and nothing while nobody calls.
"""

from __future__ import annotations

import errno
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

# errors of one accept, after which the next one may succeed
_PASSES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_PAUSE_S = 0.05


@final
class Entrance:
    """Listeners with their callers, from `open` to `close`.

    Args:
        listeners: sockets that listen.
        serve: is called with each connection, on a thread of its own. It asks for a proof, and
            then calls `admit`. The connection is closed when it returns.
        most: callers without a proof at a time.
        most_s: seconds that a caller without a proof has.
        name: of its threads.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        serve: Callable[[socket.socket], None],
        most: int,
        most_s: float,
        name: str,
    ) -> None:
        self._listeners, self._serve = tuple(listeners), serve
        self._most, self._most_s, self._name = most, most_s, name
        self._callers: dict[socket.socket, float] = {}  # when each came, the first one first
        self._changing = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of callers without a proof."""
        return len(self._callers)

    def open(self) -> None:
        """Begin to accept."""
        for listener in self._listeners:
            listener.setblocking(False)
            self._start(self._accept, listener)

    def close(self) -> None:
        """Stop listening, and put out all callers without a proof."""
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # this wakes the thread that waits on it
            listener.close()
        self._put_out(self.waiting)

    def admit(self, caller: socket.socket) -> bool:
        """Let a caller stay after his proof; False if he has been put out already."""
        with self._changing:
            return self._callers.pop(caller, None) is not None

    def _accept(self, listener: socket.socket) -> None:
        poll = select.poll()
        try:
            poll.register(listener, select.POLLIN)
        except ValueError:  # closed already
            return
        while True:
            poll.poll(1e3 * self._most_s if self._callers else None)
            self._put_out(0, late_s=self._most_s)
            try:
                caller, _ = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno not in _PASSES:
                    return  # closed
                self._put_out((self.waiting + 1) // 2)
                time.sleep(_PAUSE_S)
                continue
            self._add(caller)

    def _add(self, caller: socket.socket) -> None:
        self._put_out(self.waiting + 1 - self._most)
        with self._changing:
            self._callers[caller] = time.monotonic()
        try:
            self._start(self._call, caller)
        except RuntimeError:  # no more threads
            self._leave(caller)

    def _call(self, caller: socket.socket) -> None:
        try:
            self._serve(caller)
        finally:
            self._leave(caller)

    def _leave(self, caller: socket.socket) -> None:
        self.admit(caller)
        caller.close()

    def _put_out(self, first: int, late_s: float = math.inf) -> None:
        """End the first connections, so many of them, and all that are late."""
        before = time.monotonic() - late_s
        with self._changing:
            for place, (caller, since) in enumerate(list(self._callers.items())):
                if place >= first and since >= before:
                    break
                del self._callers[caller]
                with suppress(OSError):
                    caller.shutdown(socket.SHUT_RDWR)  # this wakes its thread, which closes it

    def _start(self, work: Callable[[socket.socket], None], connection: socket.socket) -> None:
        threading.Thread(target=work, args=(connection,), name=self._name, daemon=True).start()
