"""`shoal train --checkpoint`, `shoal test` and `shoal features` on a tiny recipe."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from command_line import RECIPE, prepare, shoal
from shoal.front.recipe import load


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


def weights(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"step-{steps:08d}" / "model.safetensors")


def test_training_goes_on_by_itself_and_leaves_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert shoal("train", RECIPE, "--epochs", 2, "--checkpoint", whole) == [0]
    capsys.readouterr()
    train = ("train", RECIPE, "--epochs", 2, "--checkpoint", parts)
    assert shoal(*train, "--steps", 5) == [0]  # of 12 in an epoch
    assert shoal(*train) == [0]
    assert "weights: " in capsys.readouterr().out
    assert "goes on from" in caplog.text
    expected, got = weights(whole, 24), weights(parts, 24)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert shoal(*train, ranks=2) == [0, 0]
    assert "the run in that folder is complete already" in capsys.readouterr().out


def test_a_run_tests_alike_on_any_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal("train", RECIPE, "--steps", 12, "--checkpoint", tmp_path / "run") == [0]
    capsys.readouterr()
    said = set()
    newest = tmp_path / "run" / "step-00000012"
    for where in (tmp_path / "run", newest, newest / "model.safetensors"):
        for ranks in (1, 3):
            assert shoal("test", RECIPE, "--weights", where, ranks=ranks) == [0] * ranks
            said.add(capsys.readouterr().out)
    (line,) = said
    assert re.fullmatch(r"48 rows: loss 0\.\d{4}, accuracy \d+\.\d\d%\n", line)
    model = load(RECIPE).model()
    torch.save(model.state_dict(), tmp_path / "fresh.pt")
    assert shoal("test", RECIPE, "--weights", tmp_path / "fresh.pt") == [0]
    assert capsys.readouterr().out != line


@pytest.mark.parametrize("ranks", [1, 3])
def test_features_of_each_row_come_once_with_its_number(tmp_path: Path, ranks: int) -> None:
    model = load(RECIPE).model()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    out = tmp_path / "x.parquet"
    command = ("features", RECIPE, "--layers", "1,2", "-o", out, "--data", "train")
    assert shoal(*command, "--weights", tmp_path / "weights.pt", ranks=ranks) == [0] * ranks
    table = pyarrow.parquet.read_table(out)
    assert table.column_names == ["id", "1", "2"]
    x = load(RECIPE).data()[0].dataset.tensors[0]
    assert table["id"].to_pylist() == list(range(len(x)))
    with torch.no_grad():
        for name, expected in (("1", model[:2](x)), ("2", model(x))):
            assert torch.allclose(torch.tensor(table[name].to_pylist()), expected)
    assert os.listdir(tmp_path) == ["weights.pt", "x.parquet"]


WRONG = {
    "layer": (("features", RECIPE, "--layers", "3", "-o", "x.parquet"), "has no layer 3"),
    "weights": (("test", RECIPE, "--weights", "none"), "no such checkpoint"),
    "no weights": (("test", RECIPE, "--weights", RECIPE), "the file holds no weights"),
    "no name": (("test", RECIPE, "--weights", ""), "the path is empty"),
    "no folder": (("train", RECIPE, "--checkpoint", "", "--every", "1s"), "the path is empty"),
    "no file": (("train", RECIPE, "--report", ""), "the path is empty"),
    "time": (("train", RECIPE, "--checkpoint", "run", "--every", "10"), "is no time"),
}


@pytest.mark.parametrize(("command", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_said(
    command: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shoal(*command) == [2]
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_writes_a_checkpoint_from_which_the_run_goes_on(
    tmp_path: Path, number: int
) -> None:
    train = [sys.executable, "-m", "shoal", "train", RECIPE, "--ranks", "2"]
    train += ["--checkpoint", str(tmp_path), "--epochs", "100000"]
    with subprocess.Popen(
        train, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if "epoch 3" in line:
                break
        time.sleep(0.1)
        job.send_signal(number)
        said = job.stdout.read()
    assert "saved, as a signal asked" in said, said
    assert job.returncode != 0
    newest = (tmp_path / "LATEST").read_text().strip()
    steps = int(newest.removeprefix("step-"))
    assert steps > 12
    train[train.index("--epochs") + 1] = str(steps // 6 + 1)
    done = subprocess.run(train, capture_output=True, text=True, timeout=100, check=True)
    left = (steps // 6 + 1) * 6 - steps
    assert f"{left} step{'s' * (left > 1)} of" in done.stdout
