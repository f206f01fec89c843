"""`simulate`, `plan`, `check` and `bench` take a script's model: its arguments of parallelize."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import RECIPE, prepare, shoal
from shoal.core.errors import UsageError
from shoal.front import parallel
from shoal.front.options import Options
from shoal_tools.commands.script_model import ModelSource, redrawn, with_flags

BEGIN = """
import sys
import torch
from torch import nn
import shoal

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x, y = torch.randn(8, 6), torch.randint(2, (8,))
"""
TRAINED = "\nraise AssertionError('a step was trained')\n"
CALL = "shoal.init()\nshoal.parallelize(model, loss_fn, optimizer, sample=(x, y){more})\n"
MAKE = """
def make():
    given = dict(model=model, loss_fn=loss_fn, optimizer=optimizer, sample=(x, y))
    return {**given, "pins": {"0": "sliced"}}
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def write(text: str, begin: str = BEGIN) -> str:
        path = tmp_path / "mine.py"
        path.write_text(begin + text)
        return str(path)

    return write


def taken(path: str, *words: str, number: int | None = None, compares: bool = False) -> Any:
    source = ModelSource(path, words, number)
    assert source.checked() is None, "it is no recipe"
    return source.taken(compares=compares)


def test_a_script_runs_until_its_call_and_trains_no_step(
    script: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shoal")
    path = script(CALL.format(more="") + TRAINED)
    answer = tmp_path / "answer.json"
    assert shoal("simulate", path, "--hosts", "1,2", "--json", answer) == [0]
    assert [row["hosts"] for row in json.loads(answer.read_text())["hosts"]] == [1, 2]
    assert f"taken: call 1 of parallelize ({path}, line 13)" in caplog.text
    assert "--call 2 takes the next one" in caplog.text


def test_options_of_the_call_hold_on_imagined_hosts(script: Any, tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    path = script(CALL.format(more=', pins={"*": "replicate:ring"}, codecs=["int8"]') + TRAINED)
    assert shoal("simulate", path, "--hosts", "2,4", "--json", answer) == [0]
    told = json.loads(answer.read_text())
    assert told["codecs"] == ["int8"]
    assert {way for row in told["hosts"] for way in row["ways"]} <= {
        "replicate:ring",
        "replicate:ring+int8",
    }


def test_a_recipes_options_hold_on_imagined_hosts(tmp_path: Path) -> None:
    recipe, answer = tmp_path / "pinned.py", tmp_path / "answer.json"
    recipe.write_text(Path(RECIPE).read_text() + '\nOPTIONS = {"pins": {"*": "replicate:ring"}}\n')
    assert shoal("simulate", recipe, "--hosts", "2", "--json", answer) == [0]
    (row,) = json.loads(answer.read_text())["hosts"]
    assert row["ways"] == {"replicate:ring": 2}


def test_a_plan_in_a_recipes_options_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --plan the recipe's own plan stands."""
    recipe, saved = tmp_path / "plan_queries.py", tmp_path / "plan.json"
    assert shoal("plan", RECIPE, "--pin", "*=replicate:ring", "--save", saved, ranks=2) == [0, 0]
    recipe.write_text(Path(RECIPE).read_text() + f'\nOPTIONS = {{"plan": {str(saved)!r}}}\n')
    capsys.readouterr()
    assert shoal("plan", recipe, ranks=2) == [0, 0]
    assert "2 replicate:ring" in capsys.readouterr().out


def test_a_functions_arguments_are_compared_with_one_process(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(MAKE)
    assert shoal("check", f"{path}:make", "--steps", 3, ranks=2) == [0, 0]
    said = capsys.readouterr().out
    assert "sliced" in said, "a pin of the function's"
    assert "2 ranks against one process, 3 steps in float64" in said and "(the same)" in said


def test_flags_win_over_the_scripts_options(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(MAKE)
    assert shoal("plan", f"{path}:make", "--pin", "*=replicate:ring", ranks=2) == [0, 0]
    assert "2 replicate:ring" in capsys.readouterr().out
    options = with_flags(
        Options.of({"pins": {"0": "factor"}, "check_every": 3}),
        {"memory": "low", "check_every": 9},
    )
    assert options == Options.of({"pins": {"0": "factor"}, "memory": "low", "check_every": 9})


def test_ranks_that_compare_have_rows_of_their_own() -> None:
    x, y = torch.arange(6.0)[:, None], torch.arange(6)
    batches = [redrawn((x, {"y": y, "n": 3}), seed) for seed in range(4)]
    for own_x, rest in batches:
        assert own_x.shape == x.shape and rest["n"] == 3
        assert torch.equal(own_x[:, 0], rest["y"].float()), "rows stay together"
        assert torch.equal(own_x, own_x.sort(0).values), "and in their order"
    assert len({tuple(rest["y"].tolist()) for _, rest in batches}) > 1
    unlike = torch.ones(2, 3), torch.ones(5)
    assert redrawn(unlike, 1) is unlike


def test_models_and_optimizers_are_copies_where_several_are_compared(script: Any) -> None:
    given = taken(script(CALL.format(more="") + TRAINED), compares=True)
    one, other = given.model(), given.model()
    optimizer = given.optimizer(one.parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[0]["params"] == list(one.parameters())
    one(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    assert not torch.equal(one[0].weight, other[0].weight)
    original = given.given.model
    assert torch.equal(original[0].weight, other[0].weight)
    assert given.given.optimizer.param_groups[0]["params"] == list(original.parameters())


def test_the_first_batch_of_a_compute_loss_is_the_sample(script: Any) -> None:
    text = """
def compute_loss(model, x, y):
    return loss_fn(model(x), y)
shoal.init()
_, compute_loss, _ = shoal.parallelize(model, None, optimizer, compute_loss=compute_loss)
compute_loss(model, x, y).backward()
"""
    given = taken(script(text + TRAINED))
    assert isinstance(given.given.sample, tuple) and len(given.given.sample) == 2
    assert given.objective().loss(given.model(), given.given.sample).dim() == 0
    assert shoal("plan", script(text + TRAINED), ranks=1) == [0]


def test_a_later_call_and_the_scripts_own_arguments(script: Any) -> None:
    text = """
shoal.init()
other = nn.Linear(3, 1)
first = torch.optim.SGD(other.parameters(), lr=float(sys.argv[1]))
got, *_ = shoal.parallelize(other, nn.MSELoss(), first, sample=(torch.ones(2, 3), torch.ones(2, 1)))
assert got is other
"""
    path = script(text + CALL.format(more="") + TRAINED)
    before, main = list(sys.argv), sys.modules["__main__"]
    assert isinstance(taken(path, "0.5").model(), nn.Linear)
    assert taken(path, "0.5").given.optimizer.param_groups[0]["lr"] == 0.5
    assert isinstance(taken(path, "0.5", number=2).model(), nn.Sequential)
    assert sys.argv == before and sys.modules["__main__"] is main
    assert parallel.by_options.__name__ == "by_options", "calls are parallelize's own again"


def test_a_script_may_catch_exceptions(script: Any) -> None:
    call = CALL.format(more="").splitlines()[1]
    path = script(f"shoal.init()\ntry:\n    {call}\nexcept Exception:\n    pass\n" + TRAINED)
    assert isinstance(taken(path).model(), nn.Sequential)


@pytest.mark.parametrize(
    ("name", "text", "words", "number", "said"),
    [
        ("", "shoal.init()", (), None, "the script calls parallelize never"),
        ("", CALL.format(more=""), (), 2, "the script calls parallelize once"),
        ("", "open('no data here')", (), None, "FileNotFoundError"),
        ("", "sys.exit(2)", (), None, r"sys.exit\(2\)"),
        ("", "raise ValueError('no')", ("--rows", "3"), None, "line 12"),
        (":mke", MAKE, (), None, "did you mean .*mine.py:make"),
        (":nothing", "", (), None, "has no function nothing"),
        (":model", "", (), None, "model is a Sequential"),
        (":optimizer", "", (), None, "a AdamW"),
        (":make", "def make(): return 3", (), None, "a int"),
        (":make", "def make(): return {'model': model}", (), None, "no optimizer"),
        (":make", "def make(): return model, loss_fn, optimizer, None", (), None, "no sample"),
        (":make", MAKE.replace("pins", "pens"), (), None, "did you mean 'pins'"),
        (":make", MAKE, ("more",), None, "takes no arguments"),
        (":make", "def make(rows): return {}", (), None, "takes arguments"),
    ],
)
def test_a_script_that_gives_nothing_is_refused_with_the_way_out(
    script: Any, name: str, text: str, words: tuple[str, ...], number: int | None, said: str
) -> None:
    path = script(text) + name
    with pytest.raises(UsageError, match=said) as refused:
        taken(path, *words, number=number)
    assert "do this: " in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer=None", "not trained"),
        ("optimizer=[optimizer, optimizer]", "one optimizer each"),
        ("optimizer=torch.optim.SGD([*model.parameters(), torch.ones(2)], 1)", "not the model's"),
    ],
)
def test_a_model_that_cannot_be_compared_is_refused(script: Any, text: str, said: str) -> None:
    make = f"def make(): return dict(model=model, loss_fn=loss_fn, sample=(x, y), {text})"
    with pytest.raises(UsageError, match=said if "None" not in text else "no optimizer"):
        taken(f"{script(make)}:make", compares=True)


def test_a_recipe_is_a_recipe_and_an_incomplete_one_says_what_it_lacks(tmp_path: Path) -> None:
    assert ModelSource(RECIPE).checked() is not None
    part = tmp_path / "part.py"
    part.write_text("import shoal\ndef data(): ...\ndef model(): ...\n")
    with pytest.raises(UsageError, match="no function loss"):
        ModelSource(str(part)).checked()
    plain = tmp_path / "plain.py"
    plain.write_text("raise AssertionError('it runs')\n")
    with pytest.raises(UsageError, match="recipe has no function"):
        ModelSource(str(plain)).checked()
    with pytest.raises(UsageError, match="takes no arguments"):
        ModelSource(RECIPE, ("--rows", "3")).checked()
