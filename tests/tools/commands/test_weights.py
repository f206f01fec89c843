"""Weights that commands are given: files that hold none, and ranks that do not see the same."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import ShoalError, UsageError
from shoal.front.session_start import using
from shoal_tools.commands.weights import load_weights


def text(path: Path) -> None:
    path.write_text("import torch\n")


def whole_model(path: Path) -> None:
    torch.save(nn.Linear(2, 2), path)


def half(path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), path)
    path.write_bytes(path.read_bytes()[:200])


NO_WEIGHTS: dict[str, Callable[[Path], object]] = {
    "text": text,
    "empty": Path.touch,
    "a whole model": whole_model,
    "half": half,
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"weight": 1})),
    "a list": lambda path: torch.save([torch.ones(2)], path),
    "numbers": lambda path: torch.save({"weight": 1}, path),
    "a tensor": lambda path: torch.save(torch.ones(2), path),
}


@pytest.mark.parametrize("kind", NO_WEIGHTS)
def test_a_file_that_holds_no_weights(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "weights"
    NO_WEIGHTS[kind](path)
    with using(ThreadComm()), pytest.raises(UsageError, match=r"the file holds no weights"):
        load_weights(nn.Linear(2, 2), path)


@pytest.mark.parametrize("key", [None, "model", "state_dict"])
def test_weights_as_scripts_save_them(tmp_path: Path, key: str | None) -> None:
    saved, model = nn.Linear(2, 2), nn.Linear(2, 2)
    state = saved.state_dict()
    torch.save(state if key is None else {key: state, "epoch": 3}, tmp_path / "weights.pt")
    with using(ThreadComm()):
        load_weights(model, tmp_path / "weights.pt")
    assert torch.equal(model.weight, saved.weight)


@pytest.mark.timeout(20)
def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with using(ThreadComm()), pytest.raises(UsageError, match="no such checkpoint"):
            load_weights(nn.Linear(2, 2), path)


def test_a_file_that_one_rank_does_not_see(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "0.pt")

    def work(comm: ThreadComm) -> None:
        with using(comm), pytest.raises(ShoalError, match=r"weights cannot be read(.|\n)*1.pt"):
            load_weights(nn.Linear(2, 2), tmp_path / f"{comm.rank}.pt")

    run(2, work, timeout_s=20)


def test_the_newest_of_a_run_on_hosts_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        with using(ThreadComm()):
            model = nn.Linear(2, 2)
            nn.init.constant_(model.weight, rank)
            shoal.save(tmp_path / str(rank) / f"step-{rank:08d}", model=model)

    def work(comm: ThreadComm) -> None:
        model = nn.Linear(2, 2)
        with using(comm):
            load_weights(model, tmp_path / str(comm.rank))
        assert bool((model.weight == 1).all())

    run(2, work, timeout_s=20)
