"""Wire between two hosts: plain TCP, small requests, and a time-out on every wait.

    caller                         responder, on every host
      │ ── connect ──────────────────▶ │   1  the way in which this ends already tells most
      │ ◀──────── id, number ───────── │   2  shows whether it is the right host
      │ ── number, proof, request ───▶ │   3  signed with the job's token, if there is one,
      │ ◀────────── proof ──────────── │   4  and so are all answers (line.py)
      │ ◀───────── answer ───────────▶ │   5  a clock's reading, or bytes in one direction

Requests travel in segments of 500 bytes, which pass everywhere. Only measurements of the network
use full segments. So hosts can still talk across a link that loses full packets.

Cost: one thread for each connection, at most 64 requests at a time. A request moves a megabyte, or
the data of two seconds. If there are 128 callers without a proof, the oldest is disconnected.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, final

import msgspec

from shoal_tools.doctor.bulk import pour, rate_in, take
from shoal_tools.doctor.deadline import all_within
from shoal_tools.doctor.line import (
    DOMAIN,
    Line,
    UnprovedError,
    datagram,
    datagram_id,
    new_number,
)
from shoal_tools.launch.entrance import Entrance

SEGMENT = 500  # bytes of a TCP segment that every network passes
TIMEOUT_S = 2.5  # seconds of one attempt: TCP asks again after 1 s, and once more after 3 s
_REQUEST_S = 3.0
_MOST_BYTES = 1 << 20
_MOST_S = 2.0
_MOST_CALLERS, _MOST_UNPROVED = 64, 128
_TRIES = 3  # calls, because one may be disconnected among strangers
_PINGS = 15
_BLOCK = 1 << 15  # bytes that must all pass: some tens of full packets
_HEADERS = {False: 40, True: 60}  # header bytes of IPv4 and IPv6 with TCP
_SIZES = (8000, 4000, 1500, 1492, 1472, 1450, 1420, 1400, 1360, 1280, 1000, 576)  # sizes of packets
_KNOCKS, _KNOCK_S = 3, 0.3

NO_ANSWER, REFUSED, NO_ROUTE, FORBIDDEN = "no answer", "refused", "no route", "forbidden"
ANOTHER, UNPROVED = "another host answers", "the answer is not signed with the token"
_CALLER, _RESPONDER = b"caller", b"responder"


@dataclass(frozen=True)
class Door:
    """Address and port at which a responder listens."""

    address: str
    port: int

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.address


@dataclass(frozen=True)
class _Greeting:
    """First words of a responder."""

    id: str
    number: str


@dataclass(frozen=True)
class _CallersNumber:
    """First words of a caller."""

    number: str


@dataclass(frozen=True)
class _PeerRequest:
    kind: Literal["reach", "ping", "take", "give", "fill", "drain", "put", "get"]
    amount: float = 0.0  # bytes, or seconds
    key: str = ""
    value: str = ""


@final
class Responder:
    """Responder that answers other doctors, until it is closed.

    Args:
        ports: ports to listen at; 0 is any free port.
        secret: the secret that proves requests.
        address: the address to listen at; by default all of this host's.

    Raises:
        OSError: a port is taken.
    """

    def __init__(self, ports: tuple[int, ...], secret: str, address: str = "") -> None:
        self.id = secrets.token_hex(8)
        self.outbox: dict[str, str] = {}  # values for others to get
        self.inbox: dict[str, str] = {}  # values that others have put
        self.heard: set[str] = set()  # ids, or addresses, of hosts with datagrams that have come
        self._secret = secret
        self._callers = threading.Semaphore(_MOST_CALLERS)
        servers = [_server(address, port) for port in ports]
        self.ports = tuple(int(server.getsockname()[1]) for server in servers)
        self._datagrams = _datagrams(address, self.ports[0])
        name = "shoal-doctor-responder"
        self._entrance = Entrance(servers, self._serve, _MOST_UNPROVED, _REQUEST_S, name)
        self._entrance.open()
        threading.Thread(target=self._listen, name=name, daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._entrance.close()
        with suppress(OSError):
            self._datagrams.shutdown(socket.SHUT_RDWR)
        self._datagrams.close()

    def knock(self, doors: list[Door]) -> None:
        """Send datagrams to other responders, which need no connection. This returns at once."""
        said = datagram(self._secret, self.id)

        def send() -> None:
            for _ in range(_KNOCKS):
                for door in doors:
                    with suppress(OSError):
                        self._datagrams.sendto(said, self._place(door))
                time.sleep(_KNOCK_S)

        threading.Thread(target=send, name="shoal-doctor-knock", daemon=True).start()

    def _place(self, door: Door) -> tuple[str, int]:
        """Return the address for a datagram: a socket for both kinds takes IPv4 addresses as IPv6
        ones.
        """
        both = self._datagrams.family == socket.AF_INET6 and not door.is_ipv6
        return f"::ffff:{door.address}" if both else door.address, door.port

    def _listen(self) -> None:
        with suppress(OSError):  # the socket is closed
            while True:
                data, place = self._datagrams.recvfrom(256)
                if not place:
                    return  # the socket is closed
                id = datagram_id(self._secret, data)
                if id is not None and len(self.heard) < 10_000:
                    self.heard |= {id, plain(place[0])}

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):  # strangers may come, and callers may leave
            line = Line(connection, _REQUEST_S)
            greeting = _Greeting(self.id, new_number())
            line.say(greeting)  # 2
            opening = line.hear(_CallersNumber)
            line.sign(_key(self._secret, greeting, opening), (_RESPONDER, _CALLER))
            try:
                line.hear(str)
            except UnprovedError:
                line.say("")  # tells a caller with another token that it need not try again
                # closing with unread bytes would cancel that message
                while connection.recv(1 << 16):
                    pass
                return
            if self._entrance.admit(connection) and self._callers.acquire(blocking=False):
                try:
                    line.say("proved")  # 4
                    self._answer(line, line.hear(_PeerRequest))  # 5
                finally:
                    self._callers.release()

    def _answer(self, line: Line, request: _PeerRequest) -> None:
        size, seconds = min(int(request.amount), _MOST_BYTES), min(request.amount, _MOST_S)
        if request.kind == "ping":
            for _ in range(_PINGS):
                line.hear(int)
                line.say(time.time())
        elif request.kind == "take":
            take(line, size)
            line.say("all")
        elif request.kind == "give":
            line.connection.sendall(bytes(size))
            line.hear(str)
        elif request.kind == "fill":
            line.say(rate_in(line.connection, seconds))
            with suppress(OSError):
                line.hear(str)  # the caller has its result, and closes
        elif request.kind == "drain":
            pour(line, seconds)
        elif request.kind == "put" and len(self.inbox) < 10_000:
            self.inbox[request.key] = request.value
            line.say("all")
        elif request.kind == "get":
            line.say(self.outbox.get(request.key, ""))


def reach(
    door: Door, wanted: str, timeout_s: float = TIMEOUT_S, secret: str | None = None
) -> tuple[str, str]:
    """Return the outcome of a connection to a responder, "" if it is there; and the own address
    used.

    Args:
        door: the responder's door.
        wanted: the responder's id; "" for any.
        timeout_s: seconds to wait at most.
        secret: the secret that it has to prove; None: any side that gives this id is accepted.
    """
    source = ""
    for _ in range(_TRIES):
        try:
            connection = _connect(door, timeout_s, SEGMENT)
        except OSError as error:
            return outcome(error), source
        with connection:
            source = plain(connection.getsockname()[0])
            try:
                _, id = _open(connection, _PeerRequest("reach"), secret, timeout_s)
                return ("" if wanted in ("", id) else ANOTHER), source
            except UnprovedError:
                return UNPROVED, source
            except TimeoutError:
                break
            except OSError:  # disconnected among strangers, or not a doctor
                continue
    return ANOTHER, source


def connects(door: Door, timeout_s: float = TIMEOUT_S) -> str:
    """Return the outcome of a connection to any port: "" if it is made."""
    try:
        _connect(door, timeout_s, SEGMENT).close()
    except OSError as error:
        return outcome(error)
    return ""


def latency(door: Door, secret: str) -> tuple[float, float]:
    """Return the median seconds to the responder and back, and the seconds that its clock is ahead.

    Raises:
        OSError: it does not answer.
    """
    trips, aheads = [], []
    with _Call(door, _PeerRequest("ping"), secret) as call:
        for number in range(_PINGS):
            began, clock = time.perf_counter(), time.time()
            call.line.say(number)
            theirs = call.line.hear(float)
            trips.append(time.perf_counter() - began)
            aheads.append(theirs - clock - trips[-1] / 2)
    return statistics.median(trips), aheads[trips.index(min(trips))]


def largest(door: Door, secret: str, outward: bool, mtu: int) -> int | None:
    """Return the largest packet that passes, in bytes; None if the largest that hosts send does.

    Args:
        door: the responder's door.
        secret: the secret that proves requests.
        outward: whether packets go towards the responder, not from it.
        mtu: the largest packet that this host sends.

    Raises:
        OSError: the responder does not answer. If it does and no packet passes, the result is 0.
    """
    if _passes(door, secret, outward, None):
        return None

    def one(size: int) -> Callable[[], bool]:
        return lambda: _passes(door, secret, outward, size - _HEADERS[door.is_ipv6])

    sizes = [size for size in _SIZES if size < mtu]
    found = all_within(TIMEOUT_S, {size: one(size) for size in sizes})
    return max((size for size, passes in found.items() if passes), default=0)


def rate(door: Door, secret: str, outward: bool, seconds: float) -> float:
    """Return the bytes per second that a connection carries.

    Args:
        door: the responder's door.
        secret: the secret that proves requests.
        outward: whether bytes go towards the responder, not from it.
        seconds: duration of the measurement.

    Raises:
        OSError: the responder does not answer.
    """
    request = _PeerRequest("fill" if outward else "drain", seconds)
    with _Call(door, request, secret, segment=None) as call:
        if outward:
            return pour(call.line, seconds) or 0.0
        return rate_in(call.line.connection, seconds)


def put(door: Door, secret: str, key: str, value: str) -> None:
    """Leave a value with a responder (OSError if it does not answer)."""
    with _Call(door, _PeerRequest("put", key=key, value=value), secret) as call:
        call.line.hear(str)


def get(door: Door, secret: str, key: str) -> str:
    """Return a value that a responder has, or "" (OSError if it does not answer)."""
    with _Call(door, _PeerRequest("get", key=key), secret) as call:
        return call.line.hear(str)


def outcome(error: OSError) -> str:
    """Describe the failure of a connection in two words."""
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
    """Return an IPv4 address in its own form, if a socket for both kinds has written it as an IPv6
    one.
    """
    return address.removeprefix("::ffff:")


@final
class _Call:
    """Connection with a request, on which both sides have proved that they know a secret.

    Args:
        door: the responder's door.
        request: the request to make.
        secret: the secret to prove.
        segment: bytes of a TCP segment; None for full ones.
    """

    def __init__(
        self, door: Door, request: _PeerRequest, secret: str, segment: int | None = SEGMENT
    ) -> None:
        for left in reversed(range(_TRIES)):
            connection = _connect(door, TIMEOUT_S, segment)
            try:
                self.line, _ = _open(connection, request, secret, TIMEOUT_S)
                return
            except OSError as error:
                connection.close()
                if not left or isinstance(error, UnprovedError | TimeoutError):
                    raise

    def __enter__(self) -> _Call:
        return self

    def __exit__(self, *error: object) -> None:
        self.line.connection.close()


def _open(
    connection: socket.socket, request: _PeerRequest, secret: str | None, timeout_s: float
) -> tuple[Line, str]:
    """Receive a responder's id. With a secret, also make a request that both sides prove.

    Returns:
        The connection, and the responder's id.
    """
    line = Line(connection, timeout_s)
    greeting = line.hear(_Greeting)
    if secret is not None:
        opening = _CallersNumber(new_number())
        line.say(opening)
        line.sign(_key(secret, greeting, opening), (_CALLER, _RESPONDER))
        line.say("")
        line.say(request)  # 3
        line.hear(str)
    return line, greeting.id


def _key(secret: str, greeting: _Greeting, opening: _CallersNumber) -> bytes:
    """Return the key of one connection, in which each side has chosen a number."""
    told = msgspec.json.encode((greeting.id, greeting.number, opening.number))
    return hmac.new(secret.encode(), DOMAIN + told, "sha256").digest()


def _connect(door: Door, timeout_s: float, segment: int | None) -> socket.socket:
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
    """Open a socket for datagrams of both kinds, at the number of the responder's first port."""
    both = not address and socket.has_dualstack_ipv6()
    datagrams = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_DGRAM)
    if both:
        datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    # the port is taken: then no datagrams are heard, which is no sign against any host
    with suppress(OSError):
        datagrams.bind((address, port))
    return datagrams


def _passes(door: Door, secret: str, outward: bool, segment: int | None) -> bool:
    request = _PeerRequest("take" if outward else "give", _BLOCK)
    with _Call(door, request, secret, segment) as call:
        try:
            if outward:
                call.line.connection.sendall(bytes(_BLOCK))
                call.line.hear(str)
            else:
                take(call.line, _BLOCK)
                call.line.say("all")
        except TimeoutError:
            return False
    return True
