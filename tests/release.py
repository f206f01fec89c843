"""Build the wheel and the source archive, and use both as somebody who has nothing else.

    python tests/release.py     builds into dist/, and tries them in an empty folder

The wheel goes into a new environment: versions are asked for, and the demo trains on two ranks. Its
recipe, and one test, come from the source archive. Nothing of this folder is on the path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
ONE_TEST = "tests/contracts/test_delay_codec.py"


def build() -> tuple[Path, Path]:
    """Build the source archive, and the wheel from it. Return both paths."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST], cwd=ROOT, check=True)
    (wheel,), (archive,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, archive


def commands(python: Path, wheel: Path, source: Path) -> list[list[str]]:
    """List the commands of a newcomer, in order."""
    limits, shoal = str(ROOT / "constraints.txt"), str(python.with_name("shoal"))
    wanted = [f"{wheel}[examples]", "pytest", "pytest-timeout"]
    return [
        [str(python), "-m", "pip", "install", "--quiet", "--constraint", limits, *wanted],
        [shoal, "--version"],
        [str(python), "-m", "shoal", "--version"],
        [shoal, "train", str(source / "examples" / "digits.py"), "--ranks", "2"],
        [str(python), "-m", "pytest", "-p", "no:cacheprovider", str(source / ONE_TEST)],
    ]


def try_out(wheel: Path, archive: Path) -> None:
    """Install the wheel in an empty folder, and run the commands there.

    Raises: CalledProcessError for the first command that fails.
    """
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        here = Path(folder)
        with tarfile.open(archive) as packed:
            packed.extractall(here, filter="data")
        source = here / archive.name.removesuffix(".tar.gz")
        shutil.rmtree(source / "src")  # so that nothing but the wheel can be imported
        subprocess.run([sys.executable, "-m", "venv", here / "env"], check=True)
        for command in commands(here / "env" / "bin" / "python", wheel, source):
            print("$", *command, flush=True)
            subprocess.run(command, cwd=here, env=clean, check=True)
        size = sum(path.stat().st_size for path in (here / "env").rglob("*") if path.is_file())
        print(f"the environment takes {size / 1e9:.1f} GB; {wheel.name} and {archive.name} work")


if __name__ == "__main__":
    try_out(*build())
