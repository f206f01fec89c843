"""Pulse of a rank: a small process next to it that shows whether the rank lives when beats stop.

A thread's beats stop while another thread of the rank keeps the interpreter's lock, or if the rank
gets no processor. So each rank has a child process that needs neither (pulse_child.py). Another
rank asks it only if beats are missing:

    runs, sleeps, waits for a device   the rank lives, and is waited for
    stopped                            lost, after as long without a beat as a silent rank
    no answer                          its host is away: lost as well
    the host refuses the connection    the process and its pulse have ended: lost at once

This costs 20 ms of another processor at the start, 10 MB, and nothing while all ranks beat. Guarded
by tests/comm/test_pulse.py.
"""

from __future__ import annotations

import hmac
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from shoal.comm import pulse_child

STOPPED = b"TtZX"
_ANSWER_S = 1.0


@dataclass(frozen=True)
class PulseAddress:
    """Address of a rank's pulse.

    Without a host, it is the store's host. Without a port, there is no pulse.
    """

    host: str = ""
    port: int = 0


@final
class Pulse:
    """Pulse of this rank.

    Args:
        host: this rank's address for the other ranks; a loopback address if all are on this host.
        token: the job's secret.
    """

    def __init__(self, host: str, token: str) -> None:
        self.port = 0
        self._child: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # without a pulse, a rank that does not beat is lost, as before
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
        """End the pulse: this rank reports its end itself."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()


@final
class Pulses:
    """Ways to the pulses of other ranks.

    Args:
        own: this rank's pulse.
        store_host: the store's host, for ranks on the same host.
        token: the job's secret.
    """

    def __init__(self, own: Pulse | None = None, store_host: str = "", token: str = "") -> None:
        self._own, self._store_host, self._token = own, store_host, token
        self.addresses: dict[int, PulseAddress] = {}

    def end(self) -> None:
        """End this rank's own pulse."""
        if self._own is not None:
            self._own.end()

    def lives(self, rank: int) -> bool:
        """Return whether a rank's process exists and is not stopped.

        This takes a second at most.
        """
        return bool(state := self.state(rank)) and state not in STOPPED

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank's process has ended: its host answers, but no socket listens any
        more.
        """
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
        """Return the letter of a process's state; empty if no answer comes."""
        address = self.addresses.get(rank, PulseAddress())
        if not address.port:
            return b""
        asked = os.urandom(pulse_child.ASKED_BYTES)
        try:
            with self._connection(address) as connection:
                connection.sendall(asked)
                answered = _answer(connection)
        except OSError:
            return b""
        state = answered[:1]
        signed = pulse_child.answer(asked, state, self._token)
        return state if hmac.compare_digest(answered, signed) else b""


def _answer(connection: socket.socket) -> bytes:
    """Read one answer. A peer that sends it byte by byte gets no more time for all of it."""
    answered, until = b"", time.monotonic() + _ANSWER_S
    while (missing := 1 + pulse_child.SIGNED_BYTES - len(answered)) > 0:
        connection.settimeout(max(1e-3, until - time.monotonic()))
        more = connection.recv(missing)
        if not more:
            break
        answered += more
    return answered
