"""The examples of trainers run on two ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "trainers"
NEEDS = {"accelerate_loop": "accelerate", "hugging_face": "transformers"}
pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(200),
]


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *start, FOLDER / f"{name}.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = "accuracy 0.9" if name == "accelerate_loop" else "'eval_loss': 0."
    assert found in done.stdout


def test_examples_are_short() -> None:
    for path in FOLDER.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name
