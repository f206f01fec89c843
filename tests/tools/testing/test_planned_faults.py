"""Faults as data: each does what it says, to the rank it names, at the operation it names."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from shoal.comm.threads import Hub, ThreadComm, run
from shoal.contracts.comm import Comm
from shoal.core.errors import DeadlinePassed, PeerLost
from shoal_tools.testing.planned_faults import (
    Delay,
    Drop,
    FaultyComm,
    Kill,
    Killed,
    NetworkFault,
    RandomDelay,
)


def stream(faults: Sequence[NetworkFault], timeout_s: float = 20) -> None:
    """Rank 0 sends 1, 2, 3, 4 to rank 1, every other one on a second channel."""

    def work(comm: ThreadComm) -> None:
        faulty: Comm = FaultyComm(comm, faults)
        lanes = [faulty, faulty.channel("lane")]
        for number in range(4):
            tensor = torch.full((1,), float(number + 1))
            if comm.rank == 0:
                lanes[number % 2].send(tensor, to=1).wait()
            else:
                lanes[number % 2].receive(tensor.zero_(), source=0).wait()
                assert tensor.item() == number + 1

    run(2, work, timeout_s)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays that were asked for, in order; none is waited out."""
    seconds: list[float] = []
    monkeypatch.setattr("shoal_tools.testing.planned_faults.sleep", seconds.append)
    return seconds


def test_no_faults_change_nothing(slept: list[float]) -> None:
    stream([])
    stream([Delay(rank=2, seconds=1), Kill(rank=3, at=1)])  # of ranks that are not here
    assert not slept


def test_a_delay_holds_up_every_nth_operation_over_all_channels(slept: list[float]) -> None:
    faulty, late = FaultyComm(ThreadComm(), [Delay(rank=0, seconds=0.2, every=3)]), []
    lanes = [faulty, faulty.channel("lane")]
    for number in range(1, 8):
        lanes[number % 2].send(torch.empty(1), to=0)
        late.append(len(slept))
    assert late == [0, 0, 1, 1, 1, 2, 2]
    assert slept == [0.2, 0.2]


def test_a_delay_is_waited_out() -> None:
    start = time.monotonic()
    stream([Delay(rank=1, seconds=0.1)])
    assert time.monotonic() - start >= 0.4


def test_random_delays_repeat_by_seed_and_differ_by_rank(slept: list[float]) -> None:
    def delays(seed: int, rank: int) -> list[float]:
        slept.clear()
        faulty = FaultyComm(ThreadComm(rank, Hub(2)), [RandomDelay(0.1, seed)])
        for _ in range(5):
            faulty.send(torch.empty(1), to=0)
        return slept.copy()

    assert delays(seed=1, rank=0) == delays(seed=1, rank=0)
    assert delays(seed=1, rank=0) != delays(seed=2, rank=0)
    assert delays(seed=1, rank=0) != delays(seed=1, rank=1)
    assert all(0 <= seconds <= 0.1 for seconds in slept)


def test_kill_ends_its_rank_and_the_other_hears_who() -> None:
    heard: list[PeerLost] = []

    def work(comm: ThreadComm) -> None:
        faulty = FaultyComm(comm, [Kill(rank=1, at=3)])
        try:
            for _ in range(5):
                faulty.all_reduce(torch.ones(4))  # four operations of each rank
        except PeerLost as error:
            heard.append(error)
            raise

    with pytest.raises(Killed, match="rank 1 was killed at operation 3"):
        run(2, work)
    assert [error.rank for error in heard] == [1]


def test_the_killed_stay_dead_on_all_channels() -> None:
    faulty = FaultyComm(ThreadComm(), [Kill(rank=0, at=1)])
    lane = faulty.channel("lane")
    for comm in (faulty, lane, faulty):
        with pytest.raises(Killed):
            comm.send(torch.empty(1), to=0)


def test_a_drop_loses_all_that_follows() -> None:
    inner = ThreadComm(hub=Hub(timeout_s=0.05))
    faulty, landed = FaultyComm(inner, [Drop(rank=0, at=2)]), torch.zeros(1)
    for number in (1.0, 2.0, 3.0):
        faulty.send(torch.tensor([number]), to=0).wait()
    inner.receive(landed, source=0).wait()
    assert landed.item() == 1.0
    with pytest.raises(DeadlinePassed):
        inner.receive(landed, source=0).wait()


def test_after_a_drop_nothing_arrives() -> None:
    with pytest.raises(DeadlinePassed, match="rank 0 sent nothing to rank 1"):
        stream([Drop(rank=0, at=3)], timeout_s=0.2)
    stream([Drop(rank=0, at=5)])  # four messages were all
    stream([Drop(rank=1, at=1)])  # rank 1 sends nothing
