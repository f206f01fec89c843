"""Imports go down: the floors of docs/README.md, read off the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGES = ("shoal", "shoal_tools")  # the library, and the tools that use it
FILES = sorted(path for package in PACKAGES for path in (SOURCE / package).rglob("*.py"))
NAMES = [str(path.relative_to(SOURCE)) for path in FILES]

LIBRARY = {
    "core": 0,
    "contracts": 1,
    "tensors": 2,
    "comm": 3,
    **dict.fromkeys(["remote", "checkpoint"], 4),
    **dict.fromkeys(["profiling", "exchange", "codecs", "pipeline"], 5),
    **dict.fromkeys(["strategies", "data"], 6),
    **dict.fromkeys(["planner", "rewrite", "engine"], 7),
    "optim": 8,
    "servers": 9,
    "session": 10,
    "features": 11,
    "front": 12,
    "moved": 12,  # old names of tools
    "integrations": 13,
    "__init__": 13,  # the public names
    "__main__": 14,  # `python -m shoal`, a door to the tools
}
TOOLS = {
    "__init__": 20,
    "testing": 20,
    "launch": 20,
    "simulate": 20,
    "contenders": 20,
    "doctor": 21,
    "report": 21,
    **dict.fromkeys(["spark", "elastic"], 22),
    "commands": 23,
    "cli": 24,
}
FLOORS = {
    **{f"shoal.{room}": floor for room, floor in LIBRARY.items()},
    **{f"shoal_tools.{room}": floor for room, floor in TOOLS.items()},
}
DOORS = {"shoal.__main__"}


def part(module: str) -> str:
    """Return the room of a module: its package, and the folder or file at the top of that."""
    package, *rest = module.split(".")
    return f"{package}.{rest[0] if rest else '__init__'}"


@cache
def imports(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements of a file, each with whether it stands in a function."""
    found = []
    left: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), False)]
    while left:
        block, in_function = left.pop()
        if isinstance(block, ast.Import | ast.ImportFrom):
            found.append((block, in_function))
        in_function |= isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef)
        nodes = ast.iter_child_nodes(block)
        left += [(node, in_function) for node in nodes if not isinstance(node, ast.expr)]
    return found


def imported(path: Path) -> Iterator[str]:
    """Modules of Shoal that a file imports; `from shoal import core` is shoal.core where there is
    such a one.
    """
    for node, _ in imports(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if part_of_shoal(alias.name))
        else:
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write it from shoal"
            if node.module in PACKAGES:
                for name in (f"{node.module}.{alias.name}" for alias in node.names):
                    yield name if is_module(name) else node.module
            elif node.module is not None and part_of_shoal(node.module):
                yield node.module


def part_of_shoal(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def is_module(name: str) -> bool:
    path = SOURCE / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_go_down(path: Path) -> None:
    here = part(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    assert here in FLOORS, f"give {here} a floor"
    for module in imported(path):
        there = part(module)
        assert there in FLOORS, f"give {there} a floor"
        assert there == here or FLOORS[there] < FLOORS[here] or here in DOORS, (
            f"{here} (floor {FLOORS[here]}) imports {module}"
        )


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_library_does_not_use_the_tools(path: Path) -> None:
    here = part(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    if here.startswith("shoal.") and here not in DOORS:
        assert not [name for name in imported(path) if name.startswith("shoal_tools")]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_import_hides_in_a_function(path: Path) -> None:
    hidden = [node.lineno for node, in_function in imports(path) if in_function]
    assert not hidden, f"imports inside a function, lines {hidden}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 500
