"""What a gradient costs as it lands is measured by landing some."""

from __future__ import annotations

import time

import pytest
import torch

from shoal.comm.threads import ThreadComm, run
from shoal.strategies import landing
from shoal.strategies.landing_pace import probe_landing

CPU = torch.device("cpu")


def test_all_ranks_have_the_slowest_ones() -> None:
    (one, other) = run(2, lambda comm: probe_landing(comm, CPU))
    assert one == other > 0


def test_it_is_what_the_hook_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = landing.Landing.bring

    def slowly(*args: object) -> None:
        begin_s = time.thread_time()
        while time.thread_time() - begin_s < 0.001:
            pass
        before(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(landing.Landing, "bring", slowly)
    assert 0.001 < probe_landing(ThreadComm(), CPU) < 0.1
