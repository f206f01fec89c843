"""The link that is found is the link that was built: a rank's way that takes a stated latency and rate."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from shoal.comm.threads import Hub, ThreadComm, run
from shoal.core.contracts import Bucket, Exchange, Pending, cut
from shoal.core.cost import Traffic
from shoal.core.facts import Link, Topology
from shoal.profiling.links import probe_link, probe_shares


class ShapedComm(ThreadComm):
    """Ranks as threads whose every receive takes `latency_s` + bytes / `bytes_per_s`."""

    latency_s, bytes_per_s = 2e-3, 50e6

    def __init__(self, rank: int, hub: Hub, name: str = "world") -> None:
        super().__init__(rank, hub, name)

    @classmethod
    def of(cls, comm: ThreadComm) -> ShapedComm:
        return cls(comm.rank, comm.hub, comm.name + " shaped")

    def receive(self, tensor: Tensor, source: int) -> Pending:
        return Slow(super().receive(tensor, source), self.latency_s + tensor.nbytes / self.bytes_per_s)


@dataclass
class Slow:
    pending: Pending
    seconds: float

    def wait(self) -> None:
        end = time.perf_counter() + self.seconds
        self.pending.wait()
        time.sleep(max(0.0, end - time.perf_counter()))


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


class Silent(Shift):
    """Sends nothing and says so."""

    name: ClassVar[str] = "silent"

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        nothing = (0.0,) * topology.size
        return Traffic(nothing, nothing, 0)

    def reduce(self, flat: Tensor, comm: ThreadComm) -> None:
        raise AssertionError("there is nothing to measure")


def test_latency_and_rate_of_a_known_link() -> None:
    links = run(3, lambda comm: probe_link(ShapedComm.of(comm), budget_s=1.0))
    assert links[0] == links[1] == links[2]
    assert links[0].latency_s == pytest.approx(2e-3, rel=0.5)
    assert links[0].bytes_per_s == pytest.approx(50e6, rel=0.3)
    assert 0 < links[0].cpu_s_per_byte < 1e-6


def test_a_slow_link_is_measured_without_its_largest_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShapedComm, "bytes_per_s", 1e6)  # 4 MB would take 4 s
    start = time.perf_counter()
    links = run(2, lambda comm: probe_link(ShapedComm.of(comm), budget_s=0.7))
    assert time.perf_counter() - start < 2.0
    assert links[0].bytes_per_s == pytest.approx(1e6, rel=0.3)


def test_threads_are_quick_and_rank_one_alone_has_no_limit() -> None:
    first, second = run(2, lambda comm: probe_link(comm, budget_s=0.5))
    assert first == second
    assert 0 <= first.latency_s < 0.1 and first.bytes_per_s > 1e6
    assert probe_link(ThreadComm()) == Link(0.0, math.inf)
    assert probe_shares(ThreadComm(), Link(0.0, math.inf), {"silent": Silent()}, lanes=[ThreadComm()]) == {"silent": 1}


def test_shares_follow_what_is_really_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.profiling.links._SHARE_BUDGET_S", 0.3)
    link = Link(ShapedComm.latency_s, ShapedComm.bytes_per_s)
    exchanges = {"once": Shift(), "thrice": Shift(times=3), "silent": Silent()}

    def work(comm: ThreadComm) -> dict[str, float]:
        lane = ShapedComm.of(comm.channel("lane"))
        return probe_shares(comm, link, exchanges, lanes=[lane], nbytes=1 << 20)

    first, second = run(2, work)
    assert first == second
    assert first["once"] == pytest.approx(1.0, rel=0.3)
    assert first["thrice"] == pytest.approx(1 / 3, rel=0.3)
    assert first["silent"] == 1.0


def test_lanes_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane here has a link of its own, so three of them reach three times the rate."""
    monkeypatch.setattr("shoal.profiling.links._SHARE_BUDGET_S", 0.3)
    link = Link(ShapedComm.latency_s, ShapedComm.bytes_per_s)

    def work(comm: ThreadComm) -> dict[str, float]:
        lanes = [ShapedComm.of(comm.channel(f"lane {i}")) for i in range(3)]
        return probe_shares(comm, link, {"shift": Shift()}, lanes=lanes, nbytes=1 << 18)

    assert 1.5 < run(2, work)[0]["shift"] < 3.5
