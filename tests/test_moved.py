"""Older names of the tools' modules are the modules themselves."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.moved import NEW_NAMES, new_name

SOURCE = Path(__file__).parents[1] / "src"


@pytest.mark.parametrize("old", sorted(name for name in NEW_NAMES if "spark" not in name))
def test_an_old_name_is_the_same_module(old: str) -> None:
    new = importlib.import_module(NEW_NAMES[old])
    assert importlib.import_module(old) is new
    assert new.__spec__ is not None and new.__spec__.name == NEW_NAMES[old]


def test_a_module_in_a_moved_package_is_found() -> None:
    from_old = importlib.import_module("shoal.doctor.wire")
    assert from_old is importlib.import_module("shoal_tools.doctor.wire")
    assert sys.modules["shoal.doctor"].wire is from_old


@pytest.mark.parametrize("old", sorted(NEW_NAMES))
def test_nothing_stands_at_an_old_name(old: str) -> None:
    path = SOURCE / old.replace(".", "/")
    assert not path.with_suffix(".py").exists() and not (path / "__init__.py").exists()
    new = SOURCE / NEW_NAMES[old].replace(".", "/")
    assert new.with_suffix(".py").exists() or (new / "__init__.py").exists()


def test_a_function_may_be_called_by_the_name_of_a_moved_package() -> None:
    code = "import shoal, shoal.launch.local; print(shoal.launch(int, 1), shoal.launch.local.Local)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("[0] <class"), done.stderr


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("shoal.doctor.no_such_file")
    assert new_name("shoal.front.parallel") is None
    assert new_name("torch") is None


def test_importing_the_library_does_not_read_the_tools() -> None:
    code = "import shoal, sys; sys.exit(any(n.startswith('shoal_tools') for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
