"""How errors are shown: whose they are, and what comes last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_process import cluster_of
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.front.errors import _show, foreign
from shoal.front.session_start import using

SCRIPT = """
import shoal, torch
shoal.init()
def main():  # torch stands between the script and Shoal, as in forward and backward
    torch.no_grad()(shoal.explain)(torch.nn.Linear(1, 1))
main()
"""


def raised(source: str, name: str) -> Exception:
    """The error that some code raises, as if it were in a file of that name."""
    try:
        exec(compile(source, name, "exec"), {})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_of_pythons_library_that_shoal_called_is_shoals() -> None:
    package = Path(sys.modules["shoal"].__file__ or "").parent
    error = raised("import json\njson.loads('[')", str(package / "core" / "any.py"))
    said = foreign(
        error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    )
    assert said.startswith("Shoal failed, which is a bug in it\nTraceback")
    assert "any.py" in said, "all frames"


def test_an_error_of_a_recipe_is_the_recipes_also_within_pythons_library() -> None:
    error = raised("import json\njson.loads('[')", "recipe.py")
    assert foreign(error).startswith("the recipe failed\nTraceback")


@pytest.mark.processes
@pytest.mark.parametrize("frames", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_script_that_ends_with_an_error_of_shoals_shows_its_message_last(
    frames: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("SHOAL_TRACEBACK", frames)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    command = (sys.executable, str(script))
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    do = "call shoal.parallelize first"
    message = str(UsageError("the model is not parallelised", got="Linear", do=do))
    assert done.stderr.endswith(f"{message}\n")
    if frames == "0":
        assert done.stderr == f'File "{script}", line 5\nshoal: {message}\n'
    else:
        assert done.stderr.startswith("Traceback")


def test_the_line_of_the_script_is_not_that_of_a_constructor_that_dataclasses_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = raised("import shoal\n\nshoal.Outer(quorum=1.5)", "script.py")
    trace = error.__traceback__
    _show(type(error), error, trace.tb_next if trace else None)
    assert capsys.readouterr().err.startswith('File "script.py", line 3\nshoal: ')


@pytest.mark.quick
@pytest.mark.parametrize(
    ("wrong", "way_out"),
    [
        ("model", r"the class Linear(.|\n)*do this: make one first: model = Linear\(…\)"),
        ("optimizer", r"the class SGD(.|\n)*make one first: optimizer = SGD\(model.parameters"),
    ],
)
def test_a_class_in_place_of_an_object_is_told_with_the_way_to_make_one(
    wrong: str, way_out: str
) -> None:
    def work(comm: ThreadComm) -> None:
        model = nn.Linear(4, 3)
        given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        given |= {wrong: type(given[wrong])}
        sample = torch.ones(6, 4), torch.ones(6, 3)
        with using(comm, cluster_of(2)), pytest.raises(UsageError, match=way_out):
            shoal.parallelize(**given, loss_fn=nn.MSELoss(), sample=sample)

    run(2, work, timeout_s=60)
