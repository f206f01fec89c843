"""The seven points of contract.py, over every host whose trainer is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from contract import GLOBAL_BATCH, HOSTS, ROWS, TASKS
from starting import on_ranks

STEPS = -(-ROWS // GLOBAL_BATCH)  # in an epoch
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=HOSTS)
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a host in one process and on two ranks."""
    if importlib.util.find_spec(HOSTS[request.param]) is None:
        pytest.skip(f"{HOSTS[request.param]} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    return on_ranks("ranks.py", request.param, folder=folder)


@pytest.mark.parametrize("task", TASKS)
def test_weights_are_those_of_one_process(records: Any, task: str) -> None:
    """Points 1, 5 and 6: whatever the plan, also accumulated, clipped and resumed."""
    expected = records[1, 0][task]["weights"]
    for rank in (0, 1):
        weights = records[2, rank][task]["weights"]
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, atol=1e-10, rtol=0)


@pytest.mark.parametrize("task", ["sliced", "factor", "head", "pipeline"])
def test_the_plan_is_the_one_that_was_asked_for(records: Any, task: str) -> None:
    assert task in records[2, 0][task]["strategies"]


def test_the_first_batch_parallelises(records: Any) -> None:
    """Point 2."""
    for rank in (0, 1):
        assert records[2, rank]["auto"]["ordinary"] == [True] + [False] * (2 * STEPS - 1)


def test_one_rank_writes(records: Any) -> None:
    """Point 3: the weights of the resumed run show that all ranks took part."""
    assert records[2, 0]["resumed"]["files"]
    assert not records[2, 1]["resumed"]["files"]


@pytest.mark.parametrize("task", ["auto", "resumed", "sharded"])
def test_every_row_comes_once_an_epoch(records: Any, task: str) -> None:
    """Points 4 and 7: also if the loader was sharded before, and if training went on anew."""
    of_ranks = [records[2, rank][task]["rows"] for rank in (0, 1)]
    assert len(of_ranks[0]) == len(of_ranks[1]) == 2 * STEPS
    steps = [sorted(first + second) for first, second in zip(*of_ranks, strict=True)]
    assert steps == [sorted(batch) for batch in records[1, 0][task]["rows"]]


def test_a_window_sends_once(records: Any) -> None:
    """Point 5: inside of a window ranks have gradients of their own, and at its end the mean."""
    first, second = (records[2, rank]["accumulated"]["grads"] for rank in (0, 1))
    alike = [abs(a - b) < 1e-12 for a, b in zip(first, second, strict=True)]
    a_pass = [number % 2 == 1 or number == STEPS - 1 for number in range(STEPS)]
    assert alike == a_pass * 2


def test_a_second_wrap_is_refused(records: Any) -> None:
    """Point 7: in one clear line."""
    first, *rest = records[2, 0]["twice"].splitlines()
    assert "already" in first
    assert any("do this" in line for line in rest)
