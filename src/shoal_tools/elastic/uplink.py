"""An agent's line to the meeting place: it calls again for as long as there is no answer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from typing import final

from shoal.core.errors import UsageError
from shoal_tools.elastic.messages import FromPlace, Hello, Message, Sign, from_place
from shoal_tools.elastic.place import SIGN_S
from shoal_tools.elastic.wire import AgentLine, AskedAnew

_Answer = tuple[AgentLine, str, str]  # a line, and the addresses of both sides
_AGAIN_S = 0.3  # between two calls
# without a sign of life of the meeting place: call again. Behind a pause of the network a new
# connection carries words sooner than an old one, which has come to wait for long
_SILENT_S = 3.0
_ANOTHER_TOKEN = 3  # refusals in a row, after which it is no chance


@final
class Uplink:
    """The connection of one agent, made again whenever it breaks.

    Args:
        name: of the meeting place, for messages.
        call: calls it; returns the line, this side's address and the other's.
        hello: makes the first words of a connection, from this side's address and the other's. It
            is called on the agent's own thread.
        say: prints a line.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], tuple[AgentLine, str, str]],
        hello: Callable[[str, str], Hello],
        say: Callable[[str], None],
    ) -> None:
        self.name, self._dial, self._hello, self._say = name, call, hello, say
        self._wire: AgentLine | None = None
        self._read: queue.SimpleQueue[FromPlace | _Answer | str] = queue.SimpleQueue()
        self._ended, self._refused = threading.Event(), 0
        self.away_s: float | None = time.monotonic()  # time since when nobody answers
        self._is_told = False  # the user knows that it is away

    def open(self) -> None:
        """Begin to call."""
        for work in (self._call, self._sign):
            threading.Thread(target=work, name="shoal line", daemon=True).start()

    def close(self) -> None:
        """Hang up."""
        self._ended.set()
        if self._wire is not None:
            self._wire.end()

    def send(self, message: Message) -> None:
        """Send a message; where nobody listens, the next hello has the same news."""
        if self._wire is not None:
            self._wire.send(message)

    def heard(self) -> list[FromPlace]:
        """Return all messages that have come, and say when the meeting place goes or comes."""
        found: list[FromPlace] = []
        with suppress(queue.Empty):
            while True:
                item = self._read.get_nowait()
                if isinstance(item, tuple):
                    self._answer(*item)
                elif isinstance(item, str):
                    self._broke(item)
                elif not isinstance(item, Sign):
                    found.append(item)
        return found

    def _answer(self, wire: AgentLine, own: str, other: str) -> None:
        wire.send(self._hello(own, other))
        self._wire, self.away_s = wire, None
        if self._is_told:
            self._is_told = False
            self._say(f"the meeting place at {self.name} is back")

    def _broke(self, how: str) -> None:
        self._wire = None
        if how == "token":
            raise UsageError(
                "the meeting place has another SHOAL_TOKEN",
                where=self.name,
                do="export the same SHOAL_TOKEN on every host, and for `shoal rendezvous`",
            )
        self.away_s = time.monotonic() if self.away_s is None else self.away_s
        if not self._is_told:
            self._is_told = True
            self._say(f"the meeting place at {self.name} does not answer: {how}; ranks go on")

    def _call(self) -> None:
        while not self._ended.is_set():
            try:
                wire, own, other = self._dial()
            except AuthenticationError:
                self._refused += 1
                self._read.put("token" if self._refused >= _ANOTHER_TOKEN else "it refused")
            except (OSError, EOFError) as error:
                self._read.put(str(error) or type(error).__name__)
            else:
                self._refused = 0
                self._listen(wire, own, other)
            self._ended.wait(_AGAIN_S)

    def _listen(self, wire: AgentLine, own: str, other: str) -> None:
        heard_s = time.monotonic()
        self._read.put((wire, own, other))

        def watch() -> None:
            while not (self._ended.wait(SIGN_S) or over.is_set()):
                if time.monotonic() - heard_s > _SILENT_S:
                    wire.end()

        over = threading.Event()
        threading.Thread(target=watch, name="shoal line watch", daemon=True).start()
        try:
            while True:
                message = from_place(wire.read())
                heard_s = time.monotonic()
                self._read.put(message)
        except Exception as error:  # any kind: the connection is of no more use
            if not isinstance(error, AskedAnew):
                self._read.put(str(error) or "it has hung up")
        finally:
            over.set()
            wire.close()

    def _sign(self) -> None:
        while not self._ended.wait(SIGN_S):
            self.send(Sign())
