"""`shoal simulate` and the profiles that it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from command_line import RECIPE
from shoal.core.facts import Cluster, LayerProfile, Link, ModelProfile, ParameterProfile, Topology
from shoal.profiling.profile_file import Measured
from shoal_tools.cli import main
from shoal_tools.commands.simulate import hosts_of


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A file of one layer of 40 MB, as two hosts measured it."""
    weight = ParameterProfile("fc.weight", (10_000_000,), 10_000_000, 4, used=True, ready_s=0.1)
    layer = LayerProfile("fc", "Conv2d", (weight,))
    measured = Cluster(Topology(("one", "other")), Link(1e-4, 125e6), 4.0)
    path = tmp_path / "profile.json"
    Measured(ModelProfile((layer,), 0.2, 0.3, 0.01, digest=""), measured).save(path)
    return str(path)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["simulate", *words])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("1,2,4", (1, 2, 4)),
        ("8,2", (2, 8)),
        ("1..16", (1, 2, 4, 8, 16)),
        ("3..10,1", (1, 3, 6, 10)),
    ],
)
def test_hosts_are_a_list_or_a_range(text: str, hosts: tuple[int, ...]) -> None:
    assert hosts_of(None, None, text) == hosts  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "0", "4..2", "1..2..3", "many", "1..5000"])
def test_what_are_no_hosts_is_refused(profile: str, text: str) -> None:
    code, said = run("--from", profile, "--hosts", text)
    assert code == 2
    assert "hosts" in said


def test_a_profile_is_simulated_without_its_model(profile: str, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    code, said = run("--from", profile, "--hosts", "1,2,8", "--rate", "10gbit", "--json", str(path))
    assert code == 0, said
    assert "orth it" in said
    told = json.loads(path.read_text())
    assert [row["hosts"] for row in told["hosts"]] == [1, 2, 8]
    assert told["network"]["bytes_per_s"] == 1.25e9
    assert 2 < told["hosts"][2]["times_one_host"] <= 8


def test_a_slower_link_takes_longer(profile: str, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"

    def step_s(*words: str) -> float:
        code, said = run("--from", profile, "--hosts", "4", "--json", str(path), *words)
        assert code == 0, said
        step: float = json.loads(path.read_text())["hosts"][0]["step_s"]
        return step

    assert step_s("--rate", "100mbit") > step_s() > step_s("--rate", "10gbit")
    assert step_s("--oversubscription", "4") > step_s()


def test_neither_or_both_of_recipe_and_profile_are_refused(profile: str) -> None:
    for words, got in ((), "neither"), ((RECIPE, "--from", profile), "both"):
        code, said = run(*words)
        assert code == 2
        assert got in said


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_recipe_is_measured_saved_and_simulated(tmp_path: Path) -> None:
    saved = tmp_path / "profile.json"
    shoal = sys.executable, "-m", "shoal"
    for command in (
        ("plan", RECIPE, "-w", "2", "--save-profile", str(saved)),
        ("simulate", RECIPE, "--hosts", "1,4"),
        ("simulate", "--from", str(saved), "--hosts", "1,4"),
    ):
        done = subprocess.run((*shoal, *command), capture_output=True, text=True, timeout=190)
        assert done.returncode == 0, done.stderr
    assert Measured.load(saved).cluster.size == 2
