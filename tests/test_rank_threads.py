"""Ranks of most tests are threads of one process: none of them may change what they share."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.rglob("*.py"))
SHARED = {
    "torch.manual_seed": "build models with `built` of one_process.py, numbers with `numbers`",
    "random.seed": "draw from a random.Random of your own",
    "np.random.seed": "draw from a generator of your own",
    "torch.random.fork_rng": "build models with `built` of one_process.py",
    "torch.set_default_dtype": "give the type",
    "torch.set_num_threads": "set it around run()",
    "warnings.catch_warnings": "catch them around run()",
    "pytest.warns": "catch them around run()",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_rank_changes_what_all_of_them_share(path: Path) -> None:
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and is_of_a_rank(function):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in SHARED:
                    pytest.fail(f"{path}:{node.lineno}: {name} in a rank: {SHARED[name]}")


def is_of_a_rank(function: ast.FunctionDef) -> bool:
    """Whether it is given its rank's communicator, as every function is that `run` calls."""
    return any(
        argument.arg == "comm"
        or (argument.annotation is not None and ast.unparse(argument.annotation) == "ThreadComm")
        for argument in function.args.args
    )


def test_a_rank_that_seeds_is_found(tmp_path: Path) -> None:
    seeds = tmp_path / "seeds.py"
    seeds.write_text("def work(comm):\n    torch.manual_seed(0)\n")
    with pytest.raises(pytest.fail.Exception, match=r"seeds\.py:2: torch\.manual_seed in a rank"):
        test_no_rank_changes_what_all_of_them_share(seeds)
