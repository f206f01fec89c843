"""What passes between two hosts: plain TCP, small requests, and a time-out on every wait.

    caller                         responder, on every host
      │ ── connect ──────────────────▶ │   1  how this ends says most of what there is to say
      │ ◀───────── id, nonce ───────── │   2  is it the host that was meant?
      │ ── request, proof ───────────▶ │   3  signed with the job's token, if there is one
      │ ◀── what was asked for ──────▶ │   4  a clock's reading, or bytes in one direction

Requests travel in segments of 500 bytes, which pass everywhere; only what measures the network uses
full ones. So hosts go on talking across a link on which full packets are lost.

Cost: a thread a connection, at most 64 at a time. A request moves a megabyte or two seconds' worth.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, final

import msgspec

from shoal_tools.doctor.deadline import all_within

T = TypeVar("T")

SEGMENT = 500  # bytes of a TCP segment that every network passes
TIMEOUT_S = 2.5  # of one attempt: TCP asks again after 1 s, and once more after 3 s
_REQUEST_S = 3.0
_MOST_LINE = 1 << 18
_MOST_BYTES = 1 << 20
_MOST_S = 2.0
_MOST_CALLERS = 64
_PINGS = 15
_BLOCK = 1 << 15  # that is to pass whole: some tens of full packets
_CHUNK = memoryview(bytes(1 << 18))
_WARM_UP = 0.3  # the share of a measurement in which TCP finds its pace
_HEADERS = {False: 40, True: 60}  # of IPv4 and IPv6 with TCP
_SIZES = (8000, 4000, 1500, 1492, 1472, 1450, 1420, 1400, 1360, 1280, 1000, 576)  # of packets
_KNOCKS, _KNOCK_S = 3, 0.3

NO_ANSWER, REFUSED, NO_ROUTE, FORBIDDEN = "no answer", "refused", "no route", "forbidden"
ANOTHER = "another host answers"


@dataclass(frozen=True)
class Door:
    """Where a responder listens."""

    address: str
    port: int

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.address


@dataclass(frozen=True)
class _Greeting:
    id: str
    nonce: str


@dataclass(frozen=True)
class _PeerRequest:
    kind: Literal["ping", "take", "give", "fill", "drain", "put", "get"]
    amount: float = 0.0  # bytes, or seconds
    key: str = ""
    value: str = ""


@dataclass(frozen=True)
class _Proved:
    request: str
    proof: str


@final
class Line:
    """A connection that carries lines of JSON, and gives up after its time."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self.connection = connection
        self.timeout_s = timeout_s
        self.rest = b""
        connection.settimeout(timeout_s)

    def say(self, value: Any) -> None:
        self.connection.sendall(msgspec.json.encode(value) + b"\n")

    def hear(self, kind: type[T]) -> T:
        """The next value.

        Raises:
            OSError: it did not come in time, or is none of this kind.
        """
        deadline = time.monotonic() + self.timeout_s
        while b"\n" not in self.rest:
            data = self.connection.recv(1 << 16)
            self.rest += data
            if not data or len(self.rest) > _MOST_LINE:
                raise ConnectionError("the connection ended within a message")
            if time.monotonic() > deadline:
                raise TimeoutError
        text, _, self.rest = self.rest.partition(b"\n")
        try:
            return msgspec.json.decode(text, type=kind)
        except Exception as error:  # of whatever kind: a stranger's bytes
            raise ConnectionError(f"no {kind.__name__}: {error}") from None


@final
class Responder:
    """Answers other doctors, until it is closed.

    Args:
        ports: to listen at; 0 is any that is free.
        secret: what requests are proved with.
        address: to listen at; all of this host's by default.

    Raises:
        OSError: a port is taken.
    """

    def __init__(self, ports: tuple[int, ...], secret: str, address: str = "") -> None:
        self.id = secrets.token_hex(8)
        self.outbox: dict[str, str] = {}  # for others to get
        self.inbox: dict[str, str] = {}  # what others have put
        self.heard: set[str] = set()  # ids, or addresses, whose datagrams have come
        self._secret = secret
        self._callers = threading.Semaphore(_MOST_CALLERS)
        self._servers = [_server(address, port) for port in ports]
        self.ports = tuple(int(server.getsockname()[1]) for server in self._servers)
        self._datagrams = _datagrams(address, self.ports[0])
        for work, listening in (
            (self._accept, self._servers),
            (self._listen, [self._datagrams]),
        ):
            for each in listening:
                threading.Thread(
                    target=work, args=(each,), name="shoal-doctor-responder", daemon=True
                ).start()

    def close(self) -> None:
        """Stop answering."""
        for each in (*self._servers, self._datagrams):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def knock(self, doors: list[Door]) -> None:
        """Send datagrams to other responders, which need no connection; returns at once."""

        def send() -> None:
            for _ in range(_KNOCKS):
                for door in doors:
                    with suppress(OSError):
                        self._datagrams.sendto(self.id.encode(), self._place(door))
                time.sleep(_KNOCK_S)

        threading.Thread(target=send, name="shoal-doctor-knock", daemon=True).start()

    def _place(self, door: Door) -> tuple[str, int]:
        """Where a datagram goes: a socket for both kinds takes IPv4 addresses as IPv6 ones."""
        both = self._datagrams.family == socket.AF_INET6 and not door.is_ipv6
        return f"::ffff:{door.address}" if both else door.address, door.port

    def _listen(self, datagrams: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                data, place = datagrams.recvfrom(64)
                if not place:
                    return  # closed
                if len(self.heard) < 10_000:
                    self.heard |= {data.decode(errors="replace"), plain(place[0])}

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    time.sleep(0.05)
                    continue
                return  # closed
            if self._callers.acquire(blocking=False):
                threading.Thread(
                    target=self._serve, args=(connection,), name="shoal-doctor-call", daemon=True
                ).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                line = Line(connection, _REQUEST_S)
                greeting = _Greeting(self.id, secrets.token_hex(8))
                line.say(greeting)  # 2
                proved = line.hear(_Proved)
                proof = _proof(self._secret, greeting, proved.request)
                if hmac.compare_digest(proof.encode(), proved.proof.encode()):
                    request = msgspec.json.decode(proved.request, type=_PeerRequest)
                    self._answer(line, request)
        except msgspec.MsgspecError:
            pass  # a stranger's
        finally:
            self._callers.release()

    def _answer(self, line: Line, request: _PeerRequest) -> None:
        size, seconds = min(int(request.amount), _MOST_BYTES), min(request.amount, _MOST_S)
        if request.kind == "ping":
            for _ in range(_PINGS):
                line.hear(int)
                line.say(time.time())
        elif request.kind == "take":
            _take(line, size)
            line.say("all")
        elif request.kind == "give":
            line.connection.sendall(bytes(size))
            line.hear(str)
        elif request.kind == "fill":
            line.say(_rate_in(line.connection, seconds))
            with suppress(OSError):
                line.hear(str)  # the caller has what it wants, and closes
        elif request.kind == "drain":
            _pour(line, seconds)
        elif request.kind == "put" and len(self.inbox) < 10_000:
            self.inbox[request.key] = request.value
            line.say("all")
        elif request.kind == "get":
            line.say(self.outbox.get(request.key, ""))


def reach(door: Door, wanted: str, timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
    """How a connection to a responder ends: "" where it is there; and the own address it takes.

    Args:
        door: where it listens.
        wanted: its id; "" for any.
        timeout_s: to wait at most.
    """
    try:
        connection = _connected(door, timeout_s, SEGMENT)
    except OSError as error:
        return outcome(error), ""
    with connection:
        source = plain(connection.getsockname()[0])
        try:
            greeting = Line(connection, timeout_s).hear(_Greeting)
        except OSError:
            return ANOTHER, source  # something listens there, and does not talk like a doctor
        return ("" if wanted in ("", greeting.id) else ANOTHER), source


def connects(door: Door, timeout_s: float = TIMEOUT_S) -> str:
    """How a connection to anybody's port ends: "" where it is made."""
    try:
        _connected(door, timeout_s, SEGMENT).close()
    except OSError as error:
        return outcome(error)
    return ""


def latency(door: Door, secret: str) -> tuple[float, float]:
    """Seconds to the responder and back, the median; and how far its clock is ahead of this one.

    Raises:
        OSError: it does not answer.
    """
    trips, aheads = [], []
    with _called(door, _PeerRequest("ping"), secret) as call:
        for number in range(_PINGS):
            began, clock = time.perf_counter(), time.time()
            call.line.say(number)
            theirs = call.line.hear(float)
            trips.append(time.perf_counter() - began)
            aheads.append(theirs - clock - trips[-1] / 2)
    return statistics.median(trips), aheads[trips.index(min(trips))]


def largest(door: Door, secret: str, outward: bool, mtu: int) -> int | None:
    """The largest packet that passes, in bytes; None where the largest that hosts send does.

    Args:
        door: where the responder listens.
        secret: that requests are proved with.
        outward: towards it, or else from it.
        mtu: the largest packet that this host sends.

    Raises:
        OSError: the responder does not answer; it is 0 bytes where it does, and nothing passes.
    """
    if _passes(door, secret, outward, None):
        return None

    def one(size: int) -> Callable[[], bool]:
        return lambda: _passes(door, secret, outward, size - _HEADERS[door.is_ipv6])

    sizes = [size for size in _SIZES if size < mtu]
    found = all_within(TIMEOUT_S, {size: one(size) for size in sizes})
    return max((size for size, passes in found.items() if passes), default=0)


def rate(door: Door, secret: str, outward: bool, seconds: float) -> float:
    """Bytes per second that a connection carries.

    Args:
        door: where the responder listens.
        secret: that requests are proved with.
        outward: towards it, or else from it.
        seconds: to measure.

    Raises:
        OSError: the responder does not answer.
    """
    request = _PeerRequest("fill" if outward else "drain", seconds)
    with _called(door, request, secret, segment=None) as call:
        if outward:
            return _pour(call.line, seconds) or 0.0
        return _rate_in(call.line.connection, seconds)


def put(door: Door, secret: str, key: str, value: str) -> None:
    """Leave a value with a responder (OSError where it does not answer)."""
    with _called(door, _PeerRequest("put", key=key, value=value), secret) as call:
        call.line.hear(str)


def get(door: Door, secret: str, key: str) -> str:
    """A value that a responder has, or "" (OSError where it does not answer)."""
    with _called(door, _PeerRequest("get", key=key), secret) as call:
        return call.line.hear(str)


def outcome(error: OSError) -> str:
    """How a connection failed, in two words."""
    if isinstance(error, TimeoutError):
        return NO_ANSWER
    if isinstance(error, ConnectionRefusedError):
        return REFUSED
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL):
        return NO_ROUTE
    if error.errno in (errno.EPERM, errno.EACCES):
        return FORBIDDEN
    return error.strerror or str(error) or type(error).__name__


def plain(address: str) -> str:
    """An IPv4 address as such, where a socket for both kinds tells it as an IPv6 one."""
    return address.removeprefix("::ffff:")


@final
class _called:
    """A connection on which a request was made."""

    def __init__(
        self, door: Door, request: _PeerRequest, secret: str, segment: int | None = SEGMENT
    ) -> None:
        self.line = Line(_connected(door, TIMEOUT_S, segment), TIMEOUT_S)
        try:
            greeting = self.line.hear(_Greeting)
            text = msgspec.json.encode(request).decode()
            self.line.say(_Proved(text, _proof(secret, greeting, text)))  # 3
        except BaseException:
            self.line.connection.close()
            raise

    def __enter__(self) -> _called:
        return self

    def __exit__(self, *error: object) -> None:
        self.line.connection.close()


def _connected(door: Door, timeout_s: float, segment: int | None) -> socket.socket:
    for place in _places(door):
        family = socket.AF_INET6 if door.is_ipv6 else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            if segment is not None:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.connect(place)  # 1
        except BaseException:
            connection.close()
            raise
        return connection
    raise OSError(errno.EADDRNOTAVAIL, f"no address: {door.address}")


def _places(door: Door) -> list[Any]:
    try:
        numeric = socket.AI_NUMERICHOST
        found = socket.getaddrinfo(door.address, door.port, type=socket.SOCK_STREAM, flags=numeric)
    except OSError:
        return []
    return [place for *_, place in found]


def _server(address: str, port: int) -> socket.socket:
    if address or not socket.has_dualstack_ipv6():
        return socket.create_server((address, port))
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)


def _datagrams(address: str, port: int) -> socket.socket:
    """A socket for datagrams of both kinds, at the same number as the responder's first port."""
    both = not address and socket.has_dualstack_ipv6()
    datagrams = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_DGRAM)
    if both:
        datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    with suppress(OSError):  # taken: nobody's datagrams are heard, which is not said of anybody
        datagrams.bind((address, port))
    return datagrams


def _proof(secret: str, greeting: _Greeting, request: str) -> str:
    return hmac.new(secret.encode(), f"{greeting.nonce}{request}".encode(), "sha256").hexdigest()


def _passes(door: Door, secret: str, outward: bool, segment: int | None) -> bool:
    request = _PeerRequest("take" if outward else "give", _BLOCK)
    with _called(door, request, secret, segment) as call:
        try:
            if outward:
                call.line.connection.sendall(bytes(_BLOCK))
                call.line.hear(str)
            else:
                _take(call.line, _BLOCK)
                call.line.say("all")
        except TimeoutError:
            return False
    return True


def _take(line: Line, size: int) -> None:
    """Receive as many bytes, in time (OSError)."""
    deadline = time.monotonic() + line.timeout_s
    taken, line.rest = len(line.rest), b""
    while taken < size:
        data = line.connection.recv(1 << 16)
        taken += len(data)
        if not data:
            raise ConnectionError("the connection ended")
        if time.monotonic() > deadline:
            raise TimeoutError


def _pour(line: Line, seconds: float) -> float | None:
    """Send until the other side has measured enough: says what, or ends the connection."""
    deadline, poll = time.monotonic() + seconds + TIMEOUT_S, select.poll()
    connection = line.connection
    connection.setblocking(False)
    poll.register(connection, select.POLLIN | select.POLLOUT)
    with suppress(ConnectionError, BlockingIOError):
        while time.monotonic() < deadline:
            for _, events in poll.poll(500):
                if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    connection.settimeout(TIMEOUT_S)
                    return line.hear(float)
                with suppress(BlockingIOError):
                    connection.send(_CHUNK)
    return None


def _rate_in(connection: socket.socket, seconds: float) -> float:
    """Bytes per second that come in, when TCP has found its pace."""
    buffer = bytearray(1 << 18)
    connection.settimeout(seconds + 1.0)
    count, first_s, last_s = 0, 0.0, 0.0
    began = time.perf_counter()
    with suppress(TimeoutError):
        while (now := time.perf_counter()) - began < seconds:
            received = connection.recv_into(buffer)
            now = time.perf_counter()
            if not received:
                break
            if now - began < _WARM_UP * seconds:
                continue
            if not first_s:
                first_s = now
            else:
                count, last_s = count + received, now
    return count / (last_s - first_s) if last_s > first_s else 0.0
