"""Orders that a launcher sends to all hosts of a job: signals, and signs that it is alive.

    Ctrl-C, SIGTERM   go to all agents, which pass them on. A second one ends all now
    a failure         SIGTERM after a job's grace, then SIGKILL

Cost: a few bytes a host each 5 s.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Mapping
from typing import final

from shoal_tools.launch.connection import BEAT_S, Connection
from shoal_tools.launch.processes import KILL_AFTER_S, Interrupts

_LEAVE_S = 2.0  # time for the far end to say its last, beyond a job's grace


@final
class HostOrders:
    """The orders of one launch.

    Args:
        interrupts: signals that this process has received.
        grace_s: seconds for ranks to save and end.
    """

    def __init__(self, interrupts: Interrupts, grace_s: float) -> None:
        self._interrupts, self._grace_s = interrupts, grace_s
        self._ending: list[tuple[float, int]] = []  # signals that are due: (when, signal)
        self._obeyed = 0  # how many interrupts have been acted on
        self._beat_s = time.monotonic()
        self._give_up_s = math.inf
        self.is_ending = False

    def turn(self, alive: Mapping[Connection, str]) -> bool:
        """Send all that is due to hosts, by their names; return False once they do not obey."""
        self._obey(alive)
        now = time.monotonic()
        if now > self._beat_s:
            self._beat_s = now + BEAT_S
            for connection in alive:
                connection.order(beat=1)
        while self._ending and self._ending[0][0] <= now:
            _, number = self._ending.pop(0)
            if alive:
                say(f"sending {signal.Signals(number).name} to {', '.join(alive.values())}")
            self._send(alive, number)
            if not self._ending:  # a host that does not obey is left to its own end
                self._give_up_s = now + _LEAVE_S
        return now <= self._give_up_s

    def end_after(self, delay_s: float, number: int) -> None:
        """Send a signal then, and kill all a little later."""
        at = time.monotonic() + delay_s
        self.is_ending = True
        self._ending = [(at, number), (at + KILL_AFTER_S, signal.SIGKILL)]

    def _obey(self, alive: Mapping[Connection, str]) -> None:
        """Pass an interrupt on; a second one ends all now."""
        if len(self._interrupts.received) <= self._obeyed:
            return
        again, number = self._obeyed > 0, self._interrupts.received[-1]
        self._obeyed = len(self._interrupts.received)
        if again:
            self.end_after(0.0, signal.SIGKILL)
            return
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        say(
            f"{name}: ranks on {', '.join(alive.values())} may save and end within "
            f"{self._grace_s:g} s; {name} again ends them now"
        )
        self._send(alive, number)
        self.is_ending = True
        self._ending = [(time.monotonic() + self._grace_s, signal.SIGKILL)]

    def _send(self, alive: Mapping[Connection, str], number: int) -> None:
        for connection in alive:
            connection.order(signal=int(number))


def say(message: str) -> None:
    """Print a line of the launcher."""
    print(f"shoal: {message}", file=sys.stderr, flush=True)
