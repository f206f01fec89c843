"""Try a built wheel with several Pythons and several releases of torch, one pair at a time.

    python tests/matrix.py --python python3.11 python3.13 --torch 2.8.0 2.15.0 --room optim

Each pair gets an environment of its own in build/matrix: the wheel, its `dev` extra, and that
release of torch. The tests of ROOMS, or of each `--room`, run there against the installed wheel.
Then the environment is removed. All get the newest release of every other dependency. With
`--lowest` the first pair gets the lowest that pyproject.toml allows. The last lines are a table for
docs/lab/versions.md. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "matrix"
# Rooms that use torch's inner parts, such as autograd, optimizers, collectives and files.
ROOMS = """alone checkpoint codecs core engine exchange features formats
           optim pipeline remote rewrite session strategies"""
HEAD = "| Python | torch | others | passed | failed | minutes |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Pair:
    """A Python and a release of torch, with the lowest other dependencies if `is_lowest`."""

    python: str
    torch: str
    is_lowest: bool

    @property
    def folder(self) -> Path:
        """The environment's place."""
        return FOLDER / re.sub(r"[^\w.]+", "-", f"{self.python}-torch-{self.torch}").strip("-")


@dataclass(frozen=True)
class Outcome:
    """The closing line of a run of pytest, read."""

    passed: int
    failed: int
    seconds: float

    @classmethod
    def of(cls, said: str, seconds: float) -> Outcome:
        """Count passed and failed tests. A run without a closing line has failed once."""
        lines = [line for line in said.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
        if not lines:
            return cls(0, 1, seconds)
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", lines[-1])}
        failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
        return cls(counts.get("passed", 0), failed, seconds)


def lowest(dependencies: Sequence[str]) -> Iterator[str]:
    """Yield a constraint for the lowest release that each `name>=version` allows."""
    for dependency in dependencies:
        name, _, version = dependency.partition(">=")
        numbers = version.split(".")
        if name != "torch":
            exact = version if len(numbers) > 2 else ".".join([*numbers, "0"][:2]) + ".*"
            yield f"{name}=={exact}"


def row(version: str, pair: Pair, outcome: Outcome) -> str:
    """Write one line of the table."""
    others = "lowest" if pair.is_lowest else "newest"
    told = f"{outcome.passed:,} | {outcome.failed} | {outcome.seconds / 60:.1f}"
    return f"| {version} | {pair.torch} | {others} | {told} |"


def build_wheel() -> Path:
    """Build the wheel of this folder into dist/."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist"]
    for old in (ROOT / "dist").glob("*.whl"):
        old.unlink()
    subprocess.run([*command, "."], cwd=ROOT, check=True)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    return wheel


def install(pair: Pair, wheel: Path) -> Path:
    """Make the environment of a pair, and return its interpreter."""
    shutil.rmtree(pair.folder, ignore_errors=True)
    subprocess.run([pair.python, "-m", "venv", pair.folder], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    limits = pair.folder / "limits.txt"
    limits.write_text("\n".join(lowest(project["dependencies"]) if pair.is_lowest else []))
    python = pair.folder / "bin" / "python"
    wanted = [f"{wheel}[dev]", f"torch=={pair.torch}"]
    options = ["--quiet", "--no-compile", "--constraint", str(limits)]
    subprocess.run([python, "-m", "pip", "install", *options, *wanted], check=True)
    return python


def run(python: Path, rooms: Sequence[str], log: Path) -> Outcome:
    """Run the quick tests of some rooms against the wheel, and keep their output in `log`."""
    begin = time.monotonic()
    command = [python, "-m", "pytest", "-n", "2", "-m", "not slow", "-p", "no:cacheprovider"]
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, *(f"tests/{room}" for room in rooms)],
        cwd=ROOT,
        env=without,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    log.write_text(done.stdout)
    return Outcome.of(done.stdout, time.monotonic() - begin)


def try_pair(pair: Pair, wheel: Path, rooms: Sequence[str]) -> tuple[str, Outcome]:
    """Install a pair, run its tests and remove it. Return its line of the table, too."""
    try:
        python = install(pair, wheel)
        asked = [python, "-c", "import platform; print(platform.python_version())"]
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        outcome = run(python, rooms, FOLDER / f"{pair.folder.name}.log")
        return row(version, pair, outcome), outcome
    finally:
        shutil.rmtree(pair.folder, ignore_errors=True)


def main() -> int:
    """Try every pair in turn, and print the table."""
    parser = argparse.ArgumentParser(description="Try the wheel with several Pythons and torches.")
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    parser.add_argument("--torch", nargs="+", required=True)
    parser.add_argument("--lowest", action="store_true", help="for the first pair")
    parser.add_argument("--room", nargs="+", default=ROOMS.split())
    chosen = parser.parse_args()
    wheel, table, is_whole = build_wheel(), [HEAD], True
    for torch in chosen.torch:
        for python in chosen.python:
            pair = Pair(python, torch, is_lowest=chosen.lowest and len(table) == 1)
            line, outcome = try_pair(pair, wheel, chosen.room)
            table.append(line)
            is_whole = is_whole and outcome.passed > 0 and not outcome.failed
            print(line, flush=True)
    print("\n".join(table))
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
