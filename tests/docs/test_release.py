"""What a release says of itself: versions, changelog, workflow and lab book agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pages import ROOT

import shoal_tools
from matrix import Outcome, Pair, lowest, row

pytestmark = pytest.mark.quick
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def listed(name: str) -> list[str]:
    """The values of one axis of the workflow's matrix."""
    found = re.search(rf"(?m)^ +{name}: \[(.+)\]$", WORKFLOW.read_text())
    assert found
    return re.findall(r'"([\d.]+)"', found[1])


def oldest_torch() -> str:
    (torch,) = [each for each in PROJECT["dependencies"] if each.startswith("torch>=")]
    return str(torch.removeprefix("torch>="))


def test_every_file_has_one_version() -> None:
    version = PROJECT["version"]
    assert re.search(rf"(?m)^version: {re.escape(version)}$", text("CITATION.cff"))
    assert re.search(rf"(?m)^## \[?.*\b{re.escape(version)}\b", text("CHANGELOG.md"))


def test_the_oldest_of_the_matrix_are_the_oldest_that_are_allowed() -> None:
    assert f">={listed('python')[0]}" == PROJECT["requires-python"]
    assert f"{oldest_torch()}.0" == listed("torch")[0]
    assert f"TORCHES ?= {' '.join(listed('torch'))}\n" in text("Makefile")
    named = " ".join(f"python{version}" for version in listed("python"))
    assert f"PYTHONS ?= {named}\n" in text("Makefile")


def test_the_lab_book_has_a_line_for_every_pair_and_a_cause_for_every_failure() -> None:
    page = text("docs/lab/versions.md")
    lines = re.findall(r"(?m)^\| ([\d.]+) \| ([\d.]+) \| \w+ \| ([\d,]+) \| (\d+) \|", page)
    pairs = {(python.rpartition(".")[0], torch) for python, torch, _, _ in lines}
    assert pairs == {(python, torch) for python in listed("python") for torch in listed("torch")}
    assert all(int(passed.replace(",", "")) > 700 for *_, passed, _ in lines)
    causes = re.findall(r"(?m)^\| `tests/", page)
    assert len(causes) == sum(int(failed) for *_, failed in lines)


def test_classifiers_name_the_pythons_of_the_matrix() -> None:
    named = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: 3." in each}
    assert set(listed("python")) <= named


def test_the_workflow_is_yaml_and_calls_targets_that_there_are() -> None:
    targets = re.findall(r"(?m)^([a-z][\w-]*):", text("Makefile"))
    called = re.findall(r"run: make ([\w-]+)", WORKFLOW.read_text())
    assert {"lint", "test", "docs", "release", "matrix"} <= set(called) <= set(targets)
    yaml = pytest.importorskip("yaml", reason="`make docs` installs it")
    for job in yaml.safe_load(WORKFLOW.read_text())["jobs"].values():
        assert job["timeout-minutes"] and all("uses" in s or "run" in s for s in job["steps"])


def test_every_file_of_the_archive_is_there() -> None:
    for line in text("MANIFEST.in").splitlines():
        word, *names = line.split() or ["#"]
        if word in ("include", "graft"):
            assert not [name for name in names if not list(ROOT.glob(name))]


def test_pages_of_the_root_link_to_files_that_there_are() -> None:
    for page in ROOT.glob("*.md"):
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        assert not [link for link in links if not (ROOT / link).exists()], page.name


@pytest.mark.parametrize(
    ("said", "passed", "failed"),
    [
        ("..\n1163 passed, 1 skipped in 281.77s (0:04:41)", 1163, 0),
        ("1 failed, 12 passed, 2 errors in 3.10s", 12, 3),
        ("ImportError while loading conftest", 0, 1),
    ],
)
def test_the_closing_line_of_a_run_is_read(said: str, passed: int, failed: int) -> None:
    outcome = Outcome.of(said, 90.0)
    assert (outcome.passed, outcome.failed) == (passed, failed)
    pair = Pair("python3.11", "2.8.0", is_lowest=True)
    expected = f"| 3.11.7 | 2.8.0 | lowest | {passed:,} | {failed} | 1.5 |"
    assert row("3.11.7", pair, outcome) == expected


def test_the_lowest_release_of_each_dependency() -> None:
    given = ["torch>=2.8", "rich>=13", "click>=8.1", "safetensors>=0.4.3"]
    assert list(lowest(given)) == ["rich==13.0.*", "click==8.1.*", "safetensors==0.4.3"]


def test_the_wheel_has_the_files_that_are_no_python() -> None:
    """setuptools leaves out what package-data does not name."""
    (package,) = shoal_tools.__path__
    patterns = tomllib.loads(text("pyproject.toml"))["tool"]["setuptools"]["package-data"]
    kept = {path for pattern in patterns["shoal_tools"] for path in Path(package).glob(pattern)}
    there = {path for path in Path(package).rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert there == kept
