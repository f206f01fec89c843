"""Who keeps the others waiting is named, with the likely cause; nobody else is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.cadence import Event
from shoal.contracts.comm import Comm
from shoal.core.facts import Cluster, Link, Topology
from shoal.engine.lanes import Lane
from shoal.engine.stragglers import (
    MainThreadClock,
    StepReport,
    Stragglers,
    links_are_late,
    longest_wait,
    slow_link,
    slow_ranks,
    window_of,
)
from shoal.front.session_start import using
from shoal_tools.testing.planned_faults import Delay, FaultyComm

USUAL = StepReport(0.2, 0.12, 0.01, 0.02, 0.0, 0.05)
HOSTS = Topology(("a", "b", "c"))


class Told(MainThreadClock):
    """Tells what a test says, a window after the other."""

    def __init__(self, windows: Sequence[StepReport]) -> None:
        super().__init__()
        self._windows = list(windows)

    @property
    def steps(self) -> int:
        return 500 if self._windows else 0

    def medians(self) -> list[float]:
        seen = self._windows.pop(0)
        return [seen.step_s, seen.own_s, seen.between_s, seen.queued, seen.pages]


class Engine:
    """As much of one as is listened to."""

    def __init__(self) -> None:
        self.routes = self

    def listen(self, event: Event, listener: Callable[[], None]) -> None:
        """Nothing happens."""

    def waited_s(self) -> float:
        return 0.0

    def waits(self) -> dict[str, float]:
        return {}


def named(
    windows: Sequence[Sequence[StepReport]],
    caplog: pytest.LogCaptureFixture,
    wrap: Callable[[Comm], Comm] = lambda comm: comm,
    usual: float = 1e8,
) -> list[str]:
    """What is logged where ranks tell these windows, each by rank."""

    def work(comm: ThreadComm) -> None:
        lane = Lane(wrap(comm.channel("lane")), "lane 0")
        clock = Told([window[comm.rank] for window in windows])
        engine: Any = Engine()
        expected_s = windows[0][0].expected_s
        stragglers = Stragglers(engine, lane, HOSTS, expected_s, usual, clock=clock)
        for _ in range(len(windows) + 1):
            stragglers.on_backward_end()
        lane.drain()
        lane.close()

    caplog.clear()
    run(len(windows[0]), work, timeout_s=20, hosts=HOSTS.hosts)
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_rank_that_computes_longer_is_named_once_with_its_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    busy = replace(USUAL, own_s=0.19, queued=0.4)
    (line,) = named([[USUAL, busy, USUAL]] * 4, caplog)
    assert "rank 1 (host b) takes 190 ms a step, the others 120 ms" in line
    assert "its processors are busy: 40% of the time" in line


def test_one_slow_window_names_nobody(caplog: pytest.LogCaptureFixture) -> None:
    slow = [USUAL, replace(USUAL, own_s=0.19), USUAL]
    assert named([slow, [USUAL] * 3, slow, [USUAL] * 3], caplog) == []
    assert len(named([slow, slow, [USUAL] * 3, slow, slow], caplog)) == 2  # it was over meanwhile


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"pages": 40.0, "queued": 0.9}, "it swaps: 40 pages a step come from disk"),
        ({"between_s": 0.15}, "150 ms of it pass between steps"),
        ({}, "a slower or throttled processor, or more rows"),
    ],
)
def test_the_likely_cause(change: dict[str, float], cause: str) -> None:
    slow = replace(USUAL, own_s=0.19, **change)
    (line,) = slow_ranks([USUAL, slow], Topology(("a", "b"))).values()
    assert cause in line


def test_what_costs_nobody_anything_is_not_named() -> None:
    little = replace(USUAL, own_s=0.02)
    assert slow_ranks([little, replace(little, own_s=0.04), little], HOSTS) == {}
    assert slow_ranks([USUAL, replace(USUAL, own_s=0.17), USUAL], HOSTS) == {}
    assert slow_ranks([USUAL], Topology(("a",))) == {}


def test_links_are_late_where_every_rank_waits() -> None:
    late = replace(USUAL, step_s=0.4)
    assert links_are_late([late, late])
    assert not links_are_late([late, replace(late, own_s=0.39)])  # that one computes
    assert not links_are_late([USUAL, USUAL])
    assert not links_are_late([replace(late, expected_s=0.2)] * 2)


def test_ranks_tell_every_three_seconds_or_five_backwards() -> None:
    assert [window_of(seconds) for seconds in (10.0, 0.2, 0.1, 1e-4, 0.0)] == [5, 15, 30, 500, 500]


def test_what_is_waited_for_longest_between_two_looks() -> None:
    before = {"bucket 1 (a)": 5.0, "bucket 2 (b)": 1.0}
    after = {"bucket 1 (a)": 5.5, "bucket 2 (b)": 3.0, "bucket 3 (c)": 0.25}
    assert longest_wait(before, after, 4) == ("bucket 2 (b)", 0.5)
    assert longest_wait({}, before, 10) == ("bucket 1 (a)", 0.5)
    assert longest_wait(before, before, 4) is None
    assert longest_wait({}, {}, 4) is None


def test_which_link_is_slow() -> None:
    one, two = Topology(("a", "b", "c", "d")), Topology(("a", "b"))
    assert slow_link([100, 100, 100, 100], 120, one) is None
    assert slow_link([100, 10, 10, 100], 120, one) == "of host b"
    assert slow_link([100, 10, 100, 100], 120, one) == "between hosts a and b"
    assert slow_link([10, 10], 120, two) == "between hosts b and a"
    assert slow_link([10, 10, 10, 10], 120, one) == "between hosts a, b, c, d"
    assert slow_link([100, 5, 100, 100], 120, Topology(("a", "a", "b", "b"))) is None


def test_a_slow_link_is_found_by_messages_between_neighbours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = replace(USUAL, step_s=0.4)

    def slow(comm: Comm) -> Comm:
        return FaultyComm(comm, [Delay(rank=1, seconds=0.1)])

    (line,) = named([[late] * 3] * 3, caplog, slow, usual=3e7)
    assert "the link of host b carries" in line and "240 Mbit/s when it was measured" in line
    assert "280 ms of a step of 400 ms for exchanges; 50 ms were predicted" in line
    assert named([[late] * 3] * 3, caplog, usual=3e6) == []  # links are as they were


@pytest.mark.slow
def test_in_training(caplog: pytest.LogCaptureFixture) -> None:
    class Sleeps(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds, self.last = seconds, nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(self.seconds)
            return self.last(x)

    def work(comm: ThreadComm) -> None:
        with using(comm, Cluster(HOSTS, Link(1e-4, 1e8), 1.0)):
            model, loss_fn = Sleeps(0.0), nn.CrossEntropyLoss()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            sample = torch.ones(2, 4) * (1 + comm.rank), torch.tensor([comm.rank, 1])
            shoal.parallelize(model, loss_fn, optimizer, sample=sample, pins={"*": "replicate"})
            model.seconds = 0.2 if comm.rank == 2 else 0.0
            for _ in range(40):
                optimizer.zero_grad()
                loss_fn(model(sample[0]), sample[1]).backward()
                optimizer.step()

    run(3, work, timeout_s=20, hosts=HOSTS.hosts)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [text for text in said if "rank 2 (host c) takes" in text] == said and said
