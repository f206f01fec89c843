"""`shoal check` on real processes, over gloo on 127.0.0.1: every way of training, by few starts.

What is exact equals one process to 1e-10. What is not equals the same way on threads to 1e-10, by
how far each parameter is from one process. Workers that run ahead are never twice alike: theirs are
nearer to one process than the weights before training are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from command_line import prepare, shoal

RECIPE = str(Path(__file__).parent / "every_way.py")
CODECS = ("bfloat16", "float16", "int8", "int4", "one_bit", "top_k", "low_rank")
EXACT = {
    "cuts": (
        "--sync-batchnorm",
        {
            "*": "replicate:ring",
            "table": "embedding",
            "rows": "sparse",
            "wide": "column_pair",
            "narrow": "row_pair",
            "linears.0": "factor",
            "linears.1": "column",
            "linears.2": "row",
            "linears.3": "sliced:direct",
            "linears.4": "sliced:ring",
            "linears.5": "replicate:tree",
            "out": "head",
        },
    ),
    "tables": (
        "--servers 1",
        {"*": "server", "table": "server_rows", "rows": "server_rows", "linears.0": "replicate"},
    ),
    "stages apart": ("--tail 1", {"*": "replicate", "linears.3": "sliced", "out": "pipeline:2"}),
    "tails": ("--tail 1", {"*": "replicate", "linears.0": "sliced", "out": "stage"}),
}
LOSSY = {
    "codecs": (
        "--update-every out=2",
        {
            "*": "replicate:allreduce+low_rank(rank=2)",
            **{f"linears.{i}": f"replicate:direct+{codec}" for i, codec in enumerate(CODECS)},
            "wide": "sliced:ring+int4",
        },
    ),
    "local steps": ("--local-steps 2", {"*": "replicate"}),
}
AHEAD = "--servers 1 --staleness 1", {"*": "server", "table": "server_rows", "rows": "server_rows"}
ANY = 1e6  # the largest difference that `--within` takes
MOST_MOVED = 0.02  # training moves some parameter by more, or nothing is compared

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(400)]
Parameters = dict[str, tuple[float, float]]  # how far from one process, and how far training moved


def words(way: tuple[str, Mapping[str, str]], file: Path, within: float) -> list[str]:
    options, pins = way
    pinned = [word for layer, pin in pins.items() for word in ("--pin", f"{layer}={pin}")]
    asked = ["--steps", "4", "--within", str(within), "--json", str(file)]
    return ["check", RECIPE, *asked, *options.split(), *pinned]


def told(file: Path) -> Parameters:
    rows = json.loads(file.read_text())["parameters"]
    found = {row["name"]: (row["difference"], row["moved"]) for row in rows}
    assert max(moved for _, moved in found.values()) > MOST_MOVED
    return found


def over_sockets(
    way: tuple[str, Mapping[str, str]], file: Path, within: float = 1e-10, sparse: bool = False
) -> Parameters:
    """Run `shoal check` on two processes and those that the way needs beside."""
    command = [sys.executable, "-m", "shoal", *words(way, file, within), "--ranks", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "EVERY_WAY": "sparse" if sparse else ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return told(file)


@pytest.mark.parametrize("way", EXACT)
def test_what_is_exact_is_as_in_one_process(way: str, tmp_path: Path) -> None:
    found = over_sockets(EXACT[way], tmp_path / "found.json", sparse=way == "cuts")
    assert max(difference for difference, _ in found.values()) <= 1e-10


@pytest.mark.parametrize("way", LOSSY)
def test_what_is_not_is_as_on_threads(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = over_sockets(LOSSY[way], tmp_path / "found.json", within=ANY)
    prepare(monkeypatch)
    assert shoal(*words(LOSSY[way], tmp_path / "threads.json", ANY), ranks=2) == [0, 0]
    expected = told(tmp_path / "threads.json")
    assert max(difference for difference, _ in expected.values()) > 1e-4, "nothing is lossy"
    for name, (difference, _) in expected.items():
        assert abs(found[name][0] - difference) <= 1e-10, name


def test_workers_that_run_ahead_go_the_same_way(tmp_path: Path) -> None:
    found = over_sockets(AHEAD, tmp_path / "found.json", within=ANY)
    off = sum(difference for difference, _ in found.values())
    assert 1e-6 < off < sum(moved for _, moved in found.values())
