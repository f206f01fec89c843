"""The pace that is found is what was built: messages of a stated time, on links that lanes share or
do not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ClassVar

import pytest
import torch
from shaped import ShapedComm
from torch import Tensor

from shoal.comm.threads import ThreadComm, run
from shoal.contracts.comm import Comm, Pending
from shoal.contracts.exchange import Bucket, Exchange, SplitExchange
from shoal.core.cost import Pace, Price, Traffic
from shoal.core.facts import Link, Topology
from shoal.core.pieces import cut
from shoal.exchange.direct import Direct
from shoal.front.cluster import measured_cluster
from shoal.front.session_start import using
from shoal.profiling.paces import _on_link, probe_duplex, probe_moves, probe_paces, probe_pack
from shoal.servers.servers import serve

LINK = Link(ShapedComm.latency_s, ShapedComm.bytes_per_s)


@dataclass(frozen=True)
class Shift(Exchange):
    """Sends every element to the next rank `times` times and states it once."""

    times: int = 1
    name: ClassVar[str] = "shift"

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        sent = tuple(float(bucket.nbytes) for _ in topology.hosts)
        return Traffic(sent, sent, 1)

    def reduce(self, flat: Tensor, comm: ThreadComm) -> None:
        for _ in range(self.times):
            landed = torch.empty_like(flat)
            pending = comm.receive(landed, (comm.rank - 1) % comm.size)
            comm.send(flat, (comm.rank + 1) % comm.size).wait()
            pending.wait()

    def gather(self, flat: Tensor, comm: ThreadComm) -> None:
        assert len(cut(flat, comm.size)) == comm.size


class InChunks(Shift):
    """Sends a bucket in messages of at most 128 KB, and states so many."""

    name: ClassVar[str] = "in chunks"

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        sent = tuple(float(bucket.nbytes) for _ in topology.hosts)
        return Traffic(sent, sent, -(-bucket.nbytes // (1 << 17)))

    def reduce(self, flat: Tensor, comm: ThreadComm) -> None:
        for chunk in flat.split((1 << 17) // 4):
            super().reduce(chunk, comm)


class Silent(Shift):
    """Sends nothing and says so."""

    name: ClassVar[str] = "silent"

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        nothing = (0.0,) * topology.size
        return Traffic(nothing, nothing, 0)

    def reduce(self, flat: Tensor, comm: ThreadComm) -> None:
        raise AssertionError("there is nothing to measure")


class Busy(Shift):
    """Computes for 5 ms of processor time before it sends."""

    name: ClassVar[str] = "busy"

    def reduce(self, flat: Tensor, comm: ThreadComm) -> None:
        start = time.thread_time()
        while time.thread_time() - start < 5e-3:
            pass
        super().reduce(flat, comm)


def paces(*exchanges: Shift, lanes: int = 1) -> dict[str, Pace]:
    """Two ranks' paces, found equal; each lane has a link of its own."""

    def work(comm: ThreadComm) -> dict[str, Pace]:
        channels = [ShapedComm.of(comm.channel(f"lane {i}")) for i in range(lanes)]
        return probe_paces(comm, LINK, {e.name: e for e in exchanges}, lanes=channels)

    first, second = run(2, work)
    assert first == second
    return first


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.profiling.paces._BUDGET_S", 0.3)


@pytest.mark.parametrize("times", [1, 3])
def test_a_pace_follows_what_is_really_sent(times: int) -> None:
    """What else the machine does adds to it, but not always."""
    walls = []
    for _ in range(8):
        walls.append(paces(Shift(times))["shift"].wall)
        right_byte = walls[-1].byte_s == pytest.approx(times / LINK.bytes_per_s, rel=0.3)
        if right_byte and walls[-1].round_s == pytest.approx(times * LINK.latency_s, rel=0.5):
            return
    pytest.fail(f"{walls} for {times} × {LINK}")


def test_messages_of_a_large_bucket_are_counted_in_its_pace() -> None:
    """What else the machine does adds to it, but not always."""
    walls = []
    for _ in range(8):
        walls.append(paces(InChunks())["in chunks"].wall)
        right_byte = walls[-1].byte_s == pytest.approx(1 / LINK.bytes_per_s, rel=0.3)
        if right_byte and walls[-1].round_s == pytest.approx(LINK.latency_s, rel=0.5):
            return
    pytest.fail(f"{walls} for {LINK}")


def test_no_byte_is_cheaper_than_the_link_that_lanes_share() -> None:
    """An all-reduce on three lanes at 490 Mbit/s: the line had twice the link's rate."""
    link = Link(6e-4, 61.3e6)
    small, large = 3 * 98_304 / 6, 3 * 393_216 / 6  # bytes of one of six messages
    price = _on_link({small: 13.7e-3 / 6, large: 20.9e-3 / 6}, link)
    assert price.byte_s == pytest.approx(1 / link.bytes_per_s)
    assert 0.3e-3 < price.round_s < 1.5e-3


def test_lanes_that_are_faster_than_one_link_are_priced_as_measured() -> None:
    link = Link(1e-3, 1e7)
    price = _on_link({1e5: 1e-3 + 1e5 / 3e7, 1e6: 1e-3 + 1e6 / 3e7}, link)
    assert price.byte_s == pytest.approx(1 / 3e7)
    assert price.round_s == pytest.approx(1e-3)


def test_what_sends_nothing_costs_nothing() -> None:
    assert paces(Silent()) == {"silent": Pace(Price(0.0, 0.0), Price(0.0, 0.0))}


def test_lanes_run_at_once() -> None:
    """Each lane here has a link of its own, so three of them reach three times the rate at the same
    latency.

    What else the machine does adds to it, but not always.
    """
    walls = []
    for _ in range(8):
        walls.append(paces(Shift(), lanes=3)["shift"].wall)
        at_once = 1.5 < 1 / walls[-1].byte_s / LINK.bytes_per_s < 3.5
        if at_once and walls[-1].round_s == pytest.approx(LINK.latency_s, rel=1.0):
            return
    pytest.fail(f"{walls} for three lanes of {LINK}")


def test_processor_time_is_counted_for_all_ranks_of_a_process() -> None:
    cpu = paces(Busy())["busy"].cpu
    assert cpu.round_s == pytest.approx(2 * 5e-3, rel=0.5)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing takes 20 ms, and of moves without it only what a byte takes is known."""
    nothing = Pace(Price(0.0, 1 / LINK.bytes_per_s), Price(0.0, 0.0))
    monkeypatch.setattr(
        "shoal.profiling.paces.probe_paces", lambda *args, **kwargs: {"moves": nothing}
    )
    monkeypatch.setattr("shoal.profiling.paces.torch.mm", lambda *args, **kwargs: time.sleep(20e-3))


@pytest.mark.usefixtures("between")
def test_a_move_of_the_main_thread_is_priced_without_what_is_computed_between() -> None:
    """What else the machine does adds to it, but not always."""
    found = []
    for _ in range(8):
        first, second = run(
            2,
            lambda comm: probe_moves(
                comm, LINK, Direct(), lane=ShapedComm.of(comm.channel("lane"))
            ),
        )
        assert first == second
        found.append(first.wall)
        if first.wall.round_s == pytest.approx(LINK.latency_s, rel=0.5):
            return
    pytest.fail(f"{found} for {LINK}")


class Late(ShapedComm):
    """Ranks of which one, by turns, comes late to a move."""

    late_s = 20e-3
    sent = 0

    def send(self, tensor: Tensor, to: int) -> Pending:
        self.sent += 1
        if self.sent % 2 == self.rank:
            time.sleep(self.late_s)
        return super().send(tensor, to)


@pytest.mark.usefixtures("between")
def test_a_move_waits_for_whoever_comes_last() -> None:
    first, _ = run(
        2, lambda comm: probe_moves(comm, LINK, Direct(), lane=Late.of(comm.channel("lane")))
    )
    assert first.wall.round_s > Late.late_s / 2


@dataclass(frozen=True)
class Sleeping(SplitExchange):
    """Halves of ten milliseconds, beside one another or, with a lock, in turn."""

    name: ClassVar[str] = "sleeping"
    turns: AbstractContextManager[object] = field(default_factory=nullcontext)

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        raise NotImplementedError

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        with self.turns:
            time.sleep(10e-3)

    all_gather = reduce_scatter


@pytest.mark.parametrize(("in_turn", "kept"), [(False, 1.0), (True, 0.5)])
def test_it_is_found_what_directions_keep_of_their_rate(
    in_turn: bool, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else the machine does blurs it, but not always."""
    monkeypatch.setattr("shoal.profiling.paces._DUPLEX_S", 0.2)
    found = []
    for _ in range(8):
        locks = [Lock() for _ in range(4)]

        def work(comm: ThreadComm, locks: list[Any] = locks) -> float:
            exchange = Sleeping(locks[comm.rank]) if in_turn else Sleeping()
            return probe_duplex(comm, exchange, (0.0, 0.0, 0.5, 0.5), num_lanes=1, nbytes=64)

        ranks = run(4, work, servers=2)
        assert len(set(ranks)) == 1 and 0 < ranks[0] <= 1
        found.append(ranks[0])
        if ranks[0] == pytest.approx(kept, abs=0.1):
            return
    pytest.fail(f"{found} for {kept}")


def test_servers_take_part_in_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.profiling.paces._DUPLEX_S", 0.1)

    def work(comm: ThreadComm) -> float | None:
        if comm.rank >= comm.workers:
            serve(comm)
            return None
        with using(comm) as session:
            return measured_cluster(session).duplex

    first, second, *_ = run(4, work, servers=2)
    assert first == second and first is not None and 0 < first <= 1


def test_packing_is_priced_by_the_byte() -> None:
    first, second = run(2, probe_pack)
    assert first == second
    assert 0 < first < 1e-7


def test_the_librarys_own_halves_are_measured_on_gpus_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.profiling.paces._BUDGET_S", 0.01)

    def work(comm: ThreadComm) -> set[str]:
        with using(comm) as session:
            return set(measured_cluster(session).paces)

    first, second = run(2, work)
    assert first == second and "direct" in first and "collective" not in first
