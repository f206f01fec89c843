"""A rank's pulse: a small process beside it, which tells whether it lives where it does not beat.

A thread's beats end while some other thread of the rank keeps the interpreter's lock, or the rank
gets no processor. So each rank has a child that needs neither (pulse_child.py). Another rank asks
it only where beats are missing:

    runs, sleeps, waits for a device   it lives, and is waited for
    stopped                            lost, after as long without a beat as a silent rank
    no answer                          its host is away: lost as well
    the host refuses the connection    the process has ended, and its pulse with it: lost at once

Costs 20 ms of another processor at the start, 10 MB, and nothing while all ranks beat. Guarded by
tests/comm/test_pulse.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from shoal.comm import pulse_child

STOPPED = b"TtZX"
_ANSWER_S = 1.0


@dataclass(frozen=True)
class PulseAddress:
    """Where a rank's pulse listens. No host: beside the store; no port: there is none."""

    host: str = ""
    port: int = 0


@final
class Pulse:
    """This rank's own.

    Args:
        host: its address among the ranks; a loopback one where all are on this host.
        token: the job's secret.
    """

    def __init__(self, host: str, token: str) -> None:
        self.port = 0
        self._child: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # there is none then: a rank without beats is lost, as without it
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, 0), family=family) as listener:
                number = listener.fileno()
                given = [pulse_child.__file__, str(number), str(os.getpid())]
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-S", *given],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(number,),
                    env={**os.environ, "SHOAL_TOKEN": token},
                )
                self.port = listener.getsockname()[1]

    def end(self) -> None:
        """End it: this rank tells by itself that it ends."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()


@final
class Pulses:
    """The ways to the pulses of other ranks.

    Args:
        own: this rank's.
        store_host: where the store is, for ranks beside it.
        token: the job's secret.
    """

    def __init__(self, own: Pulse | None = None, store_host: str = "", token: str = "") -> None:
        self._own, self._store_host, self._token = own, store_host, token
        self.addresses: dict[int, PulseAddress] = {}

    def end(self) -> None:
        """End this rank's own."""
        if self._own is not None:
            self._own.end()

    def lives(self, rank: int) -> bool:
        """Whether a rank's process is there, and not stopped; takes a second at most."""
        return bool(state := self.state(rank)) and state not in STOPPED

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended: its host is there, and nobody listens any more."""
        address = self.addresses.get(rank, PulseAddress())
        if not address.port:
            return False
        try:
            self._connection(address).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def _connection(self, address: PulseAddress) -> socket.socket:
        host = address.host or self._store_host
        return socket.create_connection((host, address.port), timeout=_ANSWER_S)

    def state(self, rank: int) -> bytes:
        """The letter of its process's state; nothing where nobody answers."""
        address = self.addresses.get(rank, PulseAddress())
        if not address.port:
            return b""
        asked = os.urandom(pulse_child.ASKED_BYTES)
        try:
            with self._connection(address) as connection:
                connection.sendall(asked)
                with connection.makefile("rb") as answers:
                    answered = answers.read(1 + pulse_child.SIGNED_BYTES)
        except OSError:
            return b""
        state = answered[:1]
        return state if answered == pulse_child.answer(asked, state, self._token) else b""
