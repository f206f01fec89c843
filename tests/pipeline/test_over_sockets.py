"""`shoal check` of pipelines on real processes, over gloo on 127.0.0.1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HALVES = ("words", "places", "blocks.[01].*"), ("blocks.[23].*", "norm", "head")
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]


def shoal(kind: str, *words: str) -> str:
    """What a command prints, for one of the small models."""
    return ran([sys.executable, "-m", "shoal", *words], PIPELINE_KIND=kind)


def ran(command: list[str], **environment: str) -> str:
    """What a command prints, which must end well."""
    paths = [str(HERE), str(HERE.parent / "equivalence"), os.environ.get("PYTHONPATH", "")]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command,
        env=os.environ | variables | environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("kind", "ranks"), [("gpt", 3), ("tied", 4), ("vit", 2), ("lstm", 3)])
def test_processes_get_what_one_process_gets(kind: str, ranks: int) -> None:
    words = ["check", str(HERE / "small_recipe.py"), "--pin", "*=pipeline", "--ranks", str(ranks)]
    printed = shoal(kind, *words)
    assert f"{ranks} ranks against one process" in " ".join(printed.split())
    assert "pipeline:0" in printed


def test_dropout_repeats_by_its_seed() -> None:
    """`shoal train` begins with one seed, on every rank."""
    pins = [f"{layer}=pipeline:{rank}" for rank, layers in enumerate(HALVES) for layer in layers]
    pinned = [word for pin in pins for word in ("--pin", pin)]
    words = ["train", str(HERE / "small_recipe.py"), *pinned, "--ranks", "2"]
    printed = [shoal("dropout", *words, "--steps", "5") for _ in range(2)]
    first, again = (re.findall(r"loss (\d+\.\d+)", each) for each in printed)
    assert first and first == again


def test_dropout_draws_by_call_station_and_micro_batch(tmp_path: Path) -> None:
    """The same numbers come again: from a checkpoint, in activation checkpointing, by 1f1b."""
    job = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(HERE / "dropout_job.py")]
    printed = ran([sys.executable, *job, str(tmp_path)])
    assert printed.count("alike: again resumed checkpointed reentrant 1f1b\n") == 2
