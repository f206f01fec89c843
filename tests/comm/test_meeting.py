"""Where ranks come together: what answers there, and the way from there to the others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from shoal.comm import meeting as meeting_module
from shoal.comm.meeting import Roster, interface_towards, meet
from shoal.comm.roll_call import Arrival
from shoal.contracts.launcher import Meeting, Seat
from shoal.contracts.store import open_store
from shoal.core.errors import MissingRank, PeerLost, RanksDiffer, UsageError
from shoal.core.interfaces import own_addresses

pytestmark = pytest.mark.quick


@pytest.fixture
def seats() -> Iterator[list[Seat]]:
    """Those of two ranks, whose launcher holds the store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield seats_at(store.port)


def seats_at(port: int, holder: int | None = None) -> list[Seat]:
    return [
        Seat(f"h{rank}", holder=holder, meeting=Meeting(rank, 2, "127.0.0.1", port))
        for rank in range(2)
    ]


def outcomes(seats: list[Seat], timeout_s: float = 20.0) -> list[Roster | BaseException]:
    with ThreadPoolExecutor(len(seats)) as threads:
        futures = [threads.submit(meet, seat, timeout_s) for seat in seats]
        return [future.exception() or future.result() for future in futures]


def test_ranks_of_one_machine_meet_and_take_the_loopback(seats: list[Seat]) -> None:
    for rank, roster in enumerate(outcomes(seats)):
        assert isinstance(roster, Roster)
        assert (roster.rank, roster.topology.hosts) == (rank, ("h0", "h1"))
        assert roster.interface == "lo"
        assert roster.beside_store == (0, 1)
        assert len(set(roster.topology.processors)) == 1


def test_rank_0_may_hold_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rosters = outcomes(seats_at(port, holder=0))
    assert [roster.rank for roster in rosters if isinstance(roster, Roster)] == [0, 1]


def test_an_interface_that_the_user_names_is_taken(seats: list[Seat]) -> None:
    seats = [replace(seat, interface="lo") for seat in seats]
    interfaces = {c.interface for c in outcomes(seats) if isinstance(c, Roster)}
    assert interfaces == {"lo"}


def test_an_interface_that_one_host_lacks_is_told_at_once_on_all(seats: list[Seat]) -> None:
    seats[1] = replace(seats[1], interface="eth7")
    began = time.monotonic()
    heard, own = outcomes(seats)
    assert time.monotonic() - began < 5
    assert isinstance(heard, RanksDiffer)
    assert "rank 1 (host h1) cannot take part: GLOO_SOCKET_IFNAME names an" in str(heard)
    assert "eth7" in str(heard)
    assert isinstance(own, UsageError)
    assert "got: GLOO_SOCKET_IFNAME=eth7" in str(own)
    assert all(address.text in str(own) for address in own_addresses())


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10], ids=["silent", "a web server"]
)
def test_another_program_at_the_port_is_told_within_the_time(
    answer: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    connections = []

    def serve(server: socket.socket) -> None:
        while True:
            try:
                connections.append(server.accept()[0])
                connections[-1].sendall(answer)
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        began = time.monotonic()
        (error,) = outcomes(seats_at(port)[1:], timeout_s=0.5)
        assert time.monotonic() - began < 4
        for connection in connections:
            connection.close()
        server.shutdown(socket.SHUT_RDWR)
    assert isinstance(error, MissingRank | UsageError), repr(error)
    assert f"127.0.0.1:{port}" in str(error)
    assert "Traceback" not in capfd.readouterr().err


def test_a_store_that_goes_while_ranks_come_is_the_loss_of_who_held_it() -> None:
    holding = [open_store("127.0.0.1")]
    threading.Timer(0.3, holding.clear).start()
    (error,) = outcomes(seats_at(holding[0].port, holder=0)[1:])
    assert isinstance(error, PeerLost)
    assert "the store where ranks meet went away before all had come" in str(error)
    assert error.rank == 0


@pytest.mark.filterwarnings("default")
def test_unlike_releases_of_python_are_said_and_train(
    seats: list[Seat], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = Arrival.at

    def unlike(seat: Seat, rank: int, size: int, **found: object) -> Arrival:
        here = at(seat, rank, size, **found)
        return replace(here, versions=replace(here.versions, python=f"3.{11 + rank}.0"))

    monkeypatch.setattr(Arrival, "at", unlike)
    with pytest.warns(UserWarning, match=r"rank 0 \(host h0\): 3.11.0, rank 1 \(host h1\): 3.12.0"):
        rosters = outcomes(seats)
    assert all(isinstance(roster, Roster) for roster in rosters)


def at(rank: int, machine: str, address: str, *, beside: bool = False) -> Arrival:
    here = Arrival.at(Seat(machine), rank, 3)
    return replace(here, address=address, machine=machine, is_beside_store=beside)


OWN = {"127.0.0.1": "lo", "10.0.0.1": "eth1", "192.168.7.1": "eth0", "fd00::1": "eth2"}
TOWARDS = {"10.0.0.2": "10.0.0.1", "fd00::2": "fd00::1"}
FAR, FAR_6 = at(1, "b", "10.0.0.2"), at(1, "b", "fd00::2")


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (at(0, "a", "10.0.0.1"), [FAR], "eth1"),
        (at(0, "a", "127.0.0.1", beside=True), [FAR], "eth1"),
        (at(0, "a", "127.0.0.1", beside=True), [at(1, "a", "127.0.0.1", beside=True), FAR], "eth1"),
        (at(0, "a", "127.0.0.1", beside=True), [FAR_6], "eth2"),
        # its own name means the network that leads nowhere
        (at(0, "a", "192.168.7.1", beside=True), [FAR], "eth1"),
        (at(0, "a", "127.0.0.1", beside=True), [at(1, "a", "127.0.0.1", beside=True)], "lo"),
        (at(0, "a", "192.168.7.1", beside=True), [at(1, "a", "192.168.7.1", beside=True)], "eth0"),
        # through a tunnel both believe to be beside the store
        (at(0, "a", "127.0.0.1", beside=True), [at(1, "b", "127.0.0.1", beside=True)], None),
        # the program has joined the ranks itself
        (at(0, "a", ""), [at(1, "b", "")], None),
        # by an address that no interface shows
        (at(0, "a", "172.16.0.9"), [FAR], None),
    ],
)
def test_the_interface_is_that_which_leads_to_the_others(
    own: Arrival, others: list[Arrival], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_module, "interface_of", OWN.get)
    monkeypatch.setattr(meeting_module, "source_towards", TOWARDS.get)
    assert interface_towards(own, [own, *others]) == expected
