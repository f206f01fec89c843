"""What training loops do with a model of which hosts without rows hold layers."""

from __future__ import annotations

from typing import Any

import pytest
from one_process import Loop, adamw, built, sgd
from test_stage_loops import LOOPS, changing, scaled
from with_tail import Net, assert_same

ONE = {"body.*": "replicate", "tail.*": "pipeline:3"}
TWO = {"body.*": "replicate", "tail.1": "pipeline:3", "tail.[35]": "pipeline:4"}


QUICK = (changing, scaled)


@pytest.mark.parametrize(
    ("hosts", "optimizer"), [pytest.param(1, sgd, marks=pytest.mark.slow), (2, adamw)]
)
@pytest.mark.parametrize(
    "loop",
    [loop if loop in QUICK else pytest.param(loop, marks=pytest.mark.slow) for loop in LOOPS],
)
def test_what_loops_do(loop: Loop, optimizer: Any, hosts: int) -> None:
    pins = ONE if hosts == 1 else TWO
    assert_same(built(Net), loop, optimizer=optimizer, tail=hosts, pins=pins)
