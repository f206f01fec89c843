"""Blocking calls beside the thread that wants them: what they give, and an end that never waits."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.comm import blocking_calls
from shoal.comm.blocking_calls import OWN, Aside, may_block


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_calls, "_LOOK_S", 0.02)


def helpers() -> int:
    return sum(thread.name == f"{OWN}aside" for thread in threading.enumerate())


def test_a_call_gives_what_it_gives_and_raises_what_it_raises() -> None:
    beside, before = Aside(), helpers()
    for number in range(100):
        assert beside.run(lambda number=number: number * 2, lambda: None) == number * 2
    with pytest.raises(KeyError, match="boom"):
        beside.run(lambda: {}["boom"], lambda: None)
    assert helpers() == before + 1


def test_who_waits_for_a_call_that_never_ends_can_end_and_so_can_the_next() -> None:
    beside, never, looks = Aside(), threading.Event(), []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise RuntimeError("there is a verdict")

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="verdict"):
        beside.run(never.wait, look)
    assert 0.05 < time.monotonic() - began < 30
    assert beside.run(lambda: 7, lambda: None) == 7
    never.set()


def test_as_many_calls_as_there_are_threads_go_on_at_once() -> None:
    beside, together = Aside(), threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(beside.run, together.wait, lambda: None) for _ in range(4)]
        assert sorted(call.result(timeout=10) for call in calls) == [0, 1, 2, 3]


def test_a_call_may_block_on_the_library_s_own_threads_only() -> None:
    assert not may_block()
    assert Aside().run(may_block, lambda: None)
