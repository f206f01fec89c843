"""`shoal.launch`: ranks forked from a notebook's process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.core.errors import PeerLost, UsageError, WorldError
from shoal.front import launch

pytestmark = [pytest.mark.quick, pytest.mark.processes]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks take one thread, as the tests before have computed with several."""
    monkeypatch.setattr(launch, "bound_cores", lambda: 1)
    monkeypatch.setattr(launch, "found", lambda: None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class Odd(Exception):
    """An error that no pickle brings back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_results_come_in_the_order_of_ranks_and_tensors_with_them(tmp_path: Path) -> None:
    def ranked(word: str) -> Any:
        rank = int(os.environ["RANK"])
        time.sleep(0.2 * (2 - rank))
        (tmp_path / str(rank)).write_text(os.environ["SHOAL_TOKEN"])
        return word, rank, torch.full((2,), rank)

    found = shoal.launch(ranked, num_ranks=3, args=("x",))
    assert [(word, rank, tensor.tolist()) for word, rank, tensor in found] == [
        ("x", 0, [0, 0]),
        ("x", 1, [1, 1]),
        ("x", 2, [2, 2]),
    ]
    assert len({(tmp_path / str(rank)).read_text() for rank in range(3)}) == 1
    assert "RANK" not in os.environ and "SHOAL_TOKEN" not in os.environ


def test_an_error_is_raised_with_its_ranks_traceback() -> None:
    def deep(rank: int) -> None:
        raise KeyError(f"mine on {rank}")

    def failing() -> None:
        if (rank := int(os.environ["RANK"])) == 1:
            deep(rank)

    with pytest.raises(KeyError, match="mine on 1") as raised:
        shoal.launch(failing, 2)
    assert "in deep" in str(raised.value.__cause__)
    assert raised.value.__notes__ == ["It was raised on rank 1 of 2."]


def test_an_error_without_a_pickle_and_a_result_without_one() -> None:
    def failing() -> None:
        raise Odd(1, 2)

    with pytest.raises(WorldError, match="rank 0 failed: Odd: 1 and 2"):
        shoal.launch(failing, 1)
    with pytest.raises(Exception, match="pickle"):
        shoal.launch(threading.Lock, 1)


def test_a_killed_rank_is_named_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.2)

    def killed() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 was killed by SIGKILL"):
        shoal.launch(killed, 2)
    assert time.monotonic() - began < 60


def test_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.2)
    assert shoal.launch(sys.exit, 2) == [None, None]
    with pytest.raises(WorldError, match="SystemExit: 3"):
        shoal.launch(sys.exit, 1, (3,))


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def lasting() -> None:
        if os.fork() == 0:
            (tmp_path / f"child{os.getpid()}").touch()
            time.sleep(600)
        (tmp_path / f"rank{os.getpid()}").touch()
        time.sleep(600)

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        shoal.launch(lasting, 2)
    thread.join()
    for path in tmp_path.iterdir():
        status = Path("/proc", path.name.lstrip("abcdefghijklmnopqrstuvwxyz"), "status")
        assert not status.exists() or "State:\tZ" in status.read_text()


def test_what_cannot_be_forked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match="CUDA is in use in this process"):
        shoal.launch(int, 2)
    monkeypatch.setattr(launch, "found", lambda: object())
    with pytest.raises(UsageError, match=r"shoal.init\(\) was called in this process"):
        shoal.launch(int, 2)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="this process is a rank already"):
        shoal.launch(int, 2)
    for number in (0, -1, True, 1.5, "2"):
        with pytest.raises(UsageError, match="num_ranks is a number of ranks"):
            shoal.launch(int, number)  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_train_like_one_process() -> None:
    def trained() -> list[float]:
        world = shoal.init()
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn = torch.nn.MSELoss()
        x, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
        mine = slice(world.rank, None, world.size)
        shoal.parallelize(model, loss_fn, optimizer, sample=(x[mine], y[mine]))
        for _ in range(3):
            optimizer.zero_grad()
            loss_fn(model(x[mine]), y[mine]).backward()
            optimizer.step()
        return [float(value) for value in model.weight.detach().flatten()]

    two, one = shoal.launch(trained, 2), shoal.launch(trained, 1)
    assert two[0] == two[1]
    assert two[0] == pytest.approx(one[0], rel=0, abs=1e-10)


@pytest.mark.slow
def test_ranks_compute_though_this_process_has_used_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "bound_cores", lambda: 8)
    monkeypatch.setattr(launch, "quota_cores", lambda: 8)
    monkeypatch.setattr(launch, "_TRIED_S", 2.0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1 << 22).add_(1.0).sum()
        found = shoal.launch(lambda: float(torch.ones(1 << 22).add_(1.0).sum()), 2)
    finally:
        torch.set_num_threads(before)
    assert found == [float(2 << 22)] * 2
