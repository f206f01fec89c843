"""What interrupts take is charged to the ranks that share a machine, and never twice."""

from __future__ import annotations

import time

import pytest

from shoal.profiling import processor
from shoal.profiling.processor import ProcessorTime

START = ProcessorTime(process_s=5.0, interrupts_s=10.0, busy_s=100.0)


@pytest.mark.parametrize(
    ("busy_s", "expected"),
    [
        (4.0, 1.0),  # all of it is the four processes': they are billed for the interrupts already
        (5.2, 1.3),  # interrupts in part on the processes' bills
        (9.0, 1.5),  # somebody else computes here too
    ],
)
def test_a_rank_bears_its_share_of_the_interrupts(busy_s: float, expected: float) -> None:
    end = ProcessorTime(process_s=6.0, interrupts_s=12.0, busy_s=100.0 + busy_s)
    assert end.since(START, sharing=4) == pytest.approx(expected)


def test_what_computes_is_counted() -> None:
    start, begin_s = ProcessorTime.now(), time.process_time()
    while time.process_time() - begin_s < 0.2:
        pass
    end = ProcessorTime.now()
    assert end.since(start, sharing=1) >= 0.2
    assert end.busy_s - start.busy_s >= 0.1  # ticks


def test_without_proc_the_process_alone_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(processor, "_STAT", processor.Path(str(tmp_path)) / "stat")
    assert ProcessorTime.now().busy_s == 0.0
