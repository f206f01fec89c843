"""Lines of JSON between two doctors, signed by both once they have shown their numbers.

    key      HMAC(the job's token; "shoal doctor", both sides' random numbers, the responder's id)
    line     HMAC(key; the side that speaks, the line's number, text) and the text

Each side has chosen one of the numbers, so lines of another connection do not pass in this one. A
line that comes twice, in another order, or back to its own side does not pass either.

Cost: 80 bytes and some microseconds for each line. Guarded by tests/tools/doctor/test_line.py.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from typing import Any, TypeVar, final

import msgspec

T = TypeVar("T")

DOMAIN = b"shoal doctor\0"  # the first word under a signature, which no other protocol has
_MOST_LINE = 1 << 18
_MOST_UNPROVED = 1 << 10  # bytes of a line from a side without a proof
_PROOF = 64  # hexadecimal digits


class UnprovedError(ConnectionError):
    """Error about a line without the right signature: another token, or a stranger."""


def new_number() -> str:
    """Return a random number that was never used before."""
    return secrets.token_hex(16)


def datagram(secret: str, id: str) -> bytes:
    """Return an id with a signature, which fits into one datagram."""
    told = DOMAIN + b"datagram\0" + id.encode(errors="replace")
    return id.encode(errors="replace") + hmac.digest(secret.encode(), told, "sha256")


def datagram_id(secret: str, data: bytes) -> str | None:
    """Return the id in a datagram; None if the signature is another one."""
    id = data[:-32].decode(errors="replace")
    return id if hmac.compare_digest(data, datagram(secret, id)) else None


@final
class Line:
    """Connection that carries lines of JSON, and gives up after its time."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self.connection = connection
        self.timeout_s = timeout_s
        self.rest = b""
        self._key: bytes | None = None
        self._names = b"", b""  # names of this side, and of the other
        self._said = self._heard = 0  # number of signed lines
        connection.settimeout(timeout_s)

    def sign(self, key: bytes, names: tuple[bytes, bytes]) -> None:
        """Sign and check all lines from now on.

        Args:
            key: the key of this connection.
            names: names of this side and the other one, which must differ.
        """
        self._key, self._names = key, names

    def say(self, value: Any) -> None:
        """Send a value."""
        text = msgspec.json.encode(value)
        if self._key is not None:
            text = self._proof(self._names[0], self._said, text) + text
            self._said += 1
        self.connection.sendall(text + b"\n")

    def hear(self, kind: type[T]) -> T:
        """Return the next value.

        Raises:
            UnprovedError: its signature is wrong.
            OSError: it did not come in time, or is not of this kind.
        """
        text = self._line()
        if self._key is not None:
            proof, text = text[:_PROOF], text[_PROOF:]
            if not hmac.compare_digest(proof, self._proof(self._names[1], self._heard, text)):
                raise UnprovedError(f"no {kind.__name__} with the right signature")
            self._heard += 1
        try:
            return msgspec.json.decode(text, type=kind)
        except Exception as error:  # a stranger's bytes may raise any error
            raise ConnectionError(f"no {kind.__name__}: {error}") from None

    def _line(self) -> bytes:
        deadline = time.monotonic() + self.timeout_s
        most = _MOST_LINE if self._heard else _MOST_UNPROVED
        while b"\n" not in self.rest:
            data = self.connection.recv(1 << 16)
            self.rest += data
            if not data or (len(self.rest) > most and b"\n" not in self.rest):
                raise ConnectionError("the connection ended within a message")
            if time.monotonic() > deadline:
                raise TimeoutError
        text, _, self.rest = self.rest.partition(b"\n")
        return text

    def _proof(self, name: bytes, number: int, text: bytes) -> bytes:
        told = b"%b\0%d\0%b" % (name, number, text)
        assert self._key is not None
        return hmac.new(self._key, told, "sha256").hexdigest().encode()
