"""Meeting of an examination's hosts: as ranks, as named peers, or alone.

    ranks   the launcher's environment names the store of the job; each host has one doctor, on its
            lowest rank
    peers   names on the command line, and one port on all hosts; no launcher is needed
    alone   one host reports on itself

A host that does not come is a finding, and the others go on without it.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import msgspec
from torch.distributed import Store, TCPStore

from shoal.contracts.launcher import Meeting, Seat
from shoal.contracts.store import open_store
from shoal.contracts.store_values import Values
from shoal.core.interfaces import is_loopback, own_addresses
from shoal_tools.doctor import forms
from shoal_tools.doctor.boards import Board, Circle, PeerBoard, StoreBoard
from shoal_tools.doctor.deadline import all_within, within
from shoal_tools.doctor.facts import Host, here, resolved
from shoal_tools.doctor.finding import Finding
from shoal_tools.doctor.line import UnprovedError
from shoal_tools.doctor.ports import listener_at
from shoal_tools.doctor.wire import (
    ANOTHER,
    NO_ANSWER,
    NO_ROUTE,
    TIMEOUT_S,
    Door,
    Responder,
    connects,
    get,
    put,
    reach,
)

PORT = 29490  # port of doctors that are named on the command line
SCOPE = "shoal-doctor"
_STORE_S = 8.0
_AGAIN_S = 0.2
_SLACK_S = 10.0  # seconds by which peers may be late
_HOST = "host"
OTHER_TOKEN = "another token"


@dataclass(frozen=True)
class Met:
    """Hosts that came, as one host knows them."""

    me: Host
    hosts: tuple[Host, ...]  # hosts in the order of ranks, one for each machine
    responder: Responder
    size: int  # number of hosts, or ranks, that were expected
    circle: Circle | None = None  # None if there is no other host to talk to
    board: Board | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def takes_part(self) -> bool:
        """Whether this process examines its host. Other ranks on it do not."""
        return any(host.id == self.me.id for host in self.hosts)

    @property
    def speaks(self) -> bool:
        """Whether people read this process's output: every peer's, and the first rank's."""
        return not isinstance(self.board, StoreBoard) or self.hosts[0].id == self.me.id


@dataclass(frozen=True)
class _Ready:
    """Message of a peer that has ended its search."""

    ready: bool = True


@dataclass(frozen=True)
class _Roll:
    """Ranks that came."""

    ranks: tuple[int, ...]


def alone(name: str, asked: str, secret: str) -> Met:
    """Meet with this host alone, without others to talk to."""
    responder = Responder((0,), secret, "127.0.0.1")
    me = here(responder.id, responder.ports[0], name=name, asked=asked, towards="", known=[name])
    return Met(me, (me,), responder, 1)


def among_ranks(seat: Seat, secret: str, wait_s: float, attempt: str = "0") -> Met:
    """Meet with the ranks of a job, by the launcher's variables.

    Args:
        seat: this rank's place from the launcher, with a `meeting`.
        secret: the job's token.
        wait_s: seconds to wait for ranks.
        attempt: the launcher's attempt: it may start ranks again and keep their store.
    """
    meeting = seat.meeting
    assert meeting is not None
    responder = Responder((0,), secret, "127.0.0.1" if is_loopback(meeting.address) else "")
    me = here(
        responder.id,
        responder.ports[0],
        rank=meeting.rank,
        name=seat.host,
        asked=seat.interface or "",
        towards=meeting.address,
        known=[seat.host, meeting.address],
    )
    store = _store(me, meeting, seat.holder == meeting.rank, wait_s)
    if isinstance(store, Finding):
        return Met(me, (me,), responder, meeting.size, findings=(store,))
    values = Values(store, secret, f"{SCOPE}/{seat.job}/{attempt}")
    try:
        return _call_others(me, meeting, values, responder, wait_s)
    except (OSError, RuntimeError) as error:  # the store does not answer, or has gone
        found = _no_store(me, meeting, str(error).splitlines()[0])
        return Met(me, (me,), responder, meeting.size, findings=(found,))


def among_peers(
    name: str, peers: Sequence[str], asked: str, secret: str, wait_s: float, port: int = PORT
) -> Met:
    """Meet with named hosts. Each host names the others, or all hosts get the same list.

    Args:
        name: the name of this host.
        peers: names or addresses of hosts.
        asked: interfaces that the user asks for (GLOO_SOCKET_IFNAME).
        secret: a token, if there is one.
        wait_s: seconds to wait for the other hosts' doctors.
        port: the doctors' port, the same on all hosts.
    """
    try:
        responder = Responder((port, 0), secret)
    except OSError as error:
        met = alone(name, asked, secret)
        taken = listener_at(port)
        finding = Finding(
            "ports",
            f"the doctor cannot listen at port {port}",
            where=name,
            got=f"process {taken.pid}: {taken.program}" if taken else str(error),
            mend=f"shoal doctor --port {port + 1} --peer {' --peer '.join(map(forms.host, peers))}",
            on="every host",
        )
        return replace(met, size=len(peers) + 1, findings=(finding,))
    others, typed = _others(name, peers)
    towards = next((addresses[0] for addresses in others.values()), "")
    me = here(
        responder.id,
        responder.ports[1],
        name=typed,
        asked=asked,
        towards=towards,
        known=[name, *peers],
    )
    search = _Search(me, responder, secret, port)
    search.run(others, wait_s)
    hosts = _distinct(sorted((me, *search.hosts.values()), key=lambda host: host.id))
    me = next(host for host in hosts if host.id == me.id)
    circle = Circle(search.board, me.id, [host.id for host in hosts if host is not me])
    size = len(set(peers) - {name, typed}) + 1
    circle.gather("ready", _Ready(), wait_s + _SLACK_S)  # some hosts search longer than others
    return Met(me, hosts, responder, size, circle, search.board, tuple(search.missing(others)))


def _others(name: str, peers: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], str]:
    """Return the peers that are other hosts, with their addresses; and the peers' name for this
    host.
    """
    own = {address.text for address in own_addresses()}
    known = resolved(peers)
    others, typed = {}, name
    for peer, addresses in known.items():
        if peer != name and addresses and not any(map(is_loopback, addresses)):
            if own & set(addresses):
                typed = peer
            else:
                others[peer] = addresses
    return others, typed


@final
class _Search:
    """Search for the doctors of peers, until all are found or the time is over."""

    def __init__(self, me: Host, responder: Responder, secret: str, port: int) -> None:
        self.board = PeerBoard(responder, secret)
        self.hosts = dict[str, Host]()  # found hosts, by the names on the command line
        self._outcomes = dict[str, str]()  # outcome of the last attempt at each peer
        self._me, self._responder, self._secret, self._port = me, responder, secret, port
        self._text = msgspec.json.encode(me).decode()

    def run(self, others: Mapping[str, Sequence[str]], wait_s: float) -> None:
        """Find these peers by their addresses."""
        self._responder.outbox[_HOST] = self._text
        deadline = time.monotonic() + wait_s
        while pending := [peer for peer in others if peer not in self.hosts]:
            doors = [Door(address, self._port) for peer in pending for address in others[peer]]
            self._responder.knock(doors)
            came = {peer: self._came(others[peer]) for peer in pending}
            self._try(pending, others)
            for peer, host in came.items():
                if host is not None:  # it reaches this host, but this host does not reach it
                    self.hosts.setdefault(peer, host)
            if time.monotonic() > deadline:
                return
            time.sleep(_AGAIN_S)

    def missing(self, others: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
        """Yield a finding for each peer that was not found."""
        for peer, addresses in others.items():
            if peer not in self.hosts:
                outcome = self._outcomes.get(peer, NO_ANSWER)
                heard = set(addresses) & self._responder.heard
                yield _no_doctor(self._me, peer, addresses[0], self._port, outcome, bool(heard))

    def _try(self, pending: Sequence[str], others: Mapping[str, Sequence[str]]) -> None:
        attempts = {
            (peer, address): partial(self._ask, Door(address, self._port))
            for peer in pending
            for address in others[peer]
        }
        for (peer, _), answer in all_within(2 * TIMEOUT_S, attempts).items():
            if isinstance(answer, Host):
                self.hosts.setdefault(peer, answer)
            elif self._outcomes.get(peer) != OTHER_TOKEN:  # it may have ended since
                self._outcomes[peer] = answer

    def _ask(self, door: Door) -> Host | str:
        """Return the host with the doctor that answers there, or the reason of the failure."""
        outcome, _ = reach(door, "")
        if outcome:
            return outcome
        try:
            host = msgspec.json.decode(get(door, self._secret, _HOST), type=Host)
            put(door, self._secret, f"{self._me.id}/{_HOST}", self._text)
        except UnprovedError:
            return OTHER_TOKEN
        except TimeoutError:
            return NO_ANSWER
        except (OSError, msgspec.MsgspecError):
            return ANOTHER
        self.board.doors[host.id] = door
        return host

    def _came(self, addresses: Sequence[str]) -> Host | None:
        """Return the host at these addresses, if it has found this one first."""
        for key, text in list(self._responder.inbox.items()):
            if key.endswith(f"/{_HOST}"):
                with suppress(msgspec.MsgspecError):
                    host = msgspec.json.decode(text, type=Host)
                    if {address.text for address in host.addresses} & set(addresses):
                        return host
        return None


def _call_others(
    me: Host, meeting: Meeting, values: Values, responder: Responder, wait_s: float
) -> Met:
    """Wait for the other ranks, and agree with them on the ranks that came."""
    board = StoreBoard(values, str(meeting.rank))
    board.post(_HOST, me)
    ranks, deadline = [str(rank) for rank in range(meeting.size)], time.monotonic() + wait_s
    while len(came := board.read(ranks, _HOST, Host)) < meeting.size:
        if time.monotonic() > deadline:
            break
        time.sleep(_AGAIN_S)
    roll = within(_STORE_S, lambda: values.agree("roll", _Roll(tuple(sorted(map(int, came))))))
    if set(roll.ranks) - set(map(int, came)):
        came |= board.read(ranks, _HOST, Host)
    present = [came[str(rank)] for rank in roll.ranks if str(rank) in came]
    findings = [_no_rank(me, rank, meeting.size) for rank in range(meeting.size)]
    findings = [each for rank, each in enumerate(findings) if rank not in roll.ranks]
    first_on = {host.machine: host for host in reversed(present)}
    hosts = _distinct(sorted(first_on.values(), key=lambda host: host.rank))
    me = next((host for host in hosts if host.id == me.id), me)
    others = [host.id for host in hosts if host.id != me.id]
    board = StoreBoard(values, me.id)
    size = max(len(hosts), len(first_on) + len(findings))
    return Met(me, hosts, responder, size, Circle(board, me.id, others), board, tuple(findings))


def _store(me: Host, meeting: Meeting, hold: bool, wait_s: float) -> Store | Finding:
    """Return the store of the job, or a finding why there is none."""
    address, port = meeting.address, meeting.port
    if hold:
        try:
            return within(_STORE_S, partial(open_store, address, port))
        except (OSError, RuntimeError) as error:
            return _cannot_hold(me, address, port, error)
    deadline, outcome = time.monotonic() + wait_s, NO_ANSWER
    while outcome:
        outcomes = [connects(Door(each, port)) for each in resolved([address])[address]]
        outcome = "" if "" in outcomes else (outcomes or [NO_ROUTE])[0]
        if outcome and time.monotonic() > deadline:
            return _no_store(me, meeting, outcome)
        time.sleep(_AGAIN_S if outcome else 0)
    timeout = datetime.timedelta(seconds=_STORE_S / 2)
    connect = partial(TCPStore, address, port, is_master=False, timeout=timeout)
    try:
        store = within(_STORE_S, lambda: connect(wait_for_workers=False))
        within(_STORE_S / 2, lambda: Values(store, "", SCOPE).seen("anything"))
    except (OSError, RuntimeError):
        return Finding(
            "ports",
            f"port {port}, where the ranks are to meet, belongs to another program",
            where=address,
            got="it accepts connections, and does not answer as a store of ranks does",
            mend=f"export MASTER_PORT={port + 1}",
            on="every host",
        )
    return store


def _cannot_hold(me: Host, address: str, port: int, error: Exception) -> Finding:
    taken = listener_at(port)
    if taken is None and not isinstance(error, OSError):
        return Finding(
            "names",
            f"{address} is not an address of the host of rank 0, where the ranks are to meet",
            where=me.name,
            got=str(error).splitlines()[0][:200],
            mend=f"export MASTER_ADDR={forms.address(me.announced)}",
            on="every host",
        )
    return Finding(
        "ports",
        f"port {port}, where the ranks are to meet, is taken",
        where=me.name,
        got=f"process {taken.pid}: {taken.program}" if taken else str(error).splitlines()[0][:200],
        mend=f"export MASTER_PORT={port + 1}",
        on="every host",
    )


def _no_store(me: Host, meeting: Meeting, outcome: str) -> Finding:
    """Return the finding that the ranks' meeting place cannot be reached."""
    address, port = meeting.address, meeting.port
    where, what = f"{me.name} → {address}", f"{me.name} does not reach the ranks' meeting place"
    got = f"{address}:{port}: {outcome}"
    if outcome == NO_ROUTE:
        return Finding("firewall", what, where, got, _route_to(me, address), me.name)
    if outcome == NO_ANSWER:
        return Finding("firewall", what, where, got, _open(me, port), f"the host of {address}")
    got += "; the host is there, and nobody listens"
    return Finding("start", what, where, got, "shoal doctor", f"the host of {address}, as rank 0")


def _route_to(me: Host, address: str) -> str:
    """Return the command that adds a route to another host."""
    device = next((each.interface for each in me.outer), "eth0")
    return f"ip route add {forms.host(address)} dev {forms.interface(device)}"


def _no_doctor(me: Host, peer: str, address: str, port: int, outcome: str, heard: bool) -> Finding:
    """Return the finding that a peer was not found."""
    where, got = f"{me.name} → {peer}", f"{address}:{port}: {outcome}"
    if outcome == NO_ANSWER:
        what = f"{me.name} does not reach {peer}: it is down, or a firewall drops what comes"
        if heard:
            what = f"what {me.name} sends to {peer} does not come: a firewall drops it"
            got += f"; the other way, what {peer} sends comes"
        return Finding("firewall", what, where, got, _open(me, port), peer)
    if outcome == NO_ROUTE:
        what = f"no route leads from {me.name} to {peer}"
        return Finding("firewall", what, where, got, _route_to(me, address), me.name)
    if outcome == OTHER_TOKEN:
        what = f"{peer} has another SHOAL_TOKEN than {me.name}, or a stranger answers there"
        return Finding("start", what, where, got, "export SHOAL_TOKEN=…", "every host, alike")
    if outcome == ANOTHER:
        what = f"another program has port {port} on {peer}"
        return Finding("ports", what, where, got, f"shoal doctor --port {port + 1}", "every host")
    what = f"no doctor listens on {peer}"
    return Finding("start", what, where, got, f"shoal doctor --peer {forms.host(me.name)}", peer)


def _no_rank(me: Host, rank: int, size: int) -> Finding:
    return Finding(
        "start",
        f"rank {rank} of {size} did not come",
        where=f"rank {rank}",
        got=f"nothing came from it, as {me.name} sees it",
        mend="shoal doctor",
        on=f"the host of rank {rank}",
    )


def _open(me: Host, port: int) -> str:
    """Return the command that opens a port, on a host that is assumed to be like this one."""
    if "ufw" in me.firewall.tools:
        return f"ufw allow {port}/tcp"
    if "firewall-cmd" in me.firewall.tools:
        return f"firewall-cmd --add-port={port}/tcp"
    return f"iptables -I INPUT -p tcp --dport {port} -j ACCEPT"


def _distinct(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Number the hosts in their order, and add addresses to equal names."""
    counts = Counter(host.name for host in hosts)
    return tuple(
        replace(
            host,
            rank=number,
            name=host.name if counts[host.name] == 1 else f"{host.name} ({host.announced})",
        )
        for number, host in enumerate(hosts)
    )
