"""What some work usually takes, on a core of one's own and on a shared one."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from shoal.profiling import timeline
from shoal.profiling.timeline import DeviceClock

pytestmark = pytest.mark.exact_times


class Shared:
    """A core that others have, too: of the time that passes a part is this thread's."""

    def __init__(self, *runs: tuple[float, float]) -> None:
        self.now_s = self.busy_s = 0.0
        self._runs = cycle(runs)  # seconds, and those that it had the core
        self.times = 0

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.busy_s

    def work(self) -> None:
        passed_s, busy_s = next(self._runs)
        self.now_s, self.busy_s = self.now_s + passed_s, self.busy_s + busy_s
        self.times += 1


def usual(core: Shared, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(timeline, "time", core)
    return DeviceClock(torch.device("cpu")).usual(core.work)


def test_alone_one_long_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Shared(*[(0.01, 0.01)] * 4, (0.014, 0.01))
    assert usual(core, monkeypatch) == pytest.approx(0.01)
    assert core.times == 1 + 5


def test_who_shares_a_core_takes_the_mean_of_some_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of three go on at once; the third waits for another's turn of 8 ms."""
    core = Shared((0.002, 0.002), (0.002, 0.002), (0.010, 0.002))
    assert usual(core, monkeypatch) == pytest.approx(0.014 / 3, rel=0.05)
    assert core.now_s > timeline._SHARED_S


def test_what_takes_long_is_run_twice_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Shared((0.2, 0.2))
    assert usual(core, monkeypatch) == pytest.approx(0.2)
    assert core.times == 1 + 2


def test_what_is_warm_is_not_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Shared((0.2, 0.2))
    monkeypatch.setattr(timeline, "time", core)
    assert DeviceClock(torch.device("cpu")).usual(core.work, warm=True) == pytest.approx(0.2)
    assert core.times == 2
