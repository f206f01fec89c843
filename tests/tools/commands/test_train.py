"""Commands on a stream, and on a recipe that computes the loss of a batch."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.outer_step import Outer
from shoal.core.plan import Plan
from shoal.features.check_every import CheckReplicas
from shoal.features.local_steps import LocalSteps
from shoal.features.sync_batchnorm import SyncBatchNorm
from shoal.features.update_every import UpdateEvery
from shoal.front.options import Options
from shoal.front.recipe import load
from shoal.front.session_start import using
from shoal_tools.commands import worker
from shoal_tools.commands.train import train as train_command
from shoal_tools.commands.worker import CRITERION, Comparison, TrainingRun, check, plan, train

HOSTS = Cluster(Topology(("one", "other")), Link(1e-4, 1e8))
SLOW = Cluster(Topology(("one", "other")), Link(0.1, 1e8))
ENDLESS = """
    import itertools
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, IterableDataset

    class Numbers(IterableDataset):
        def __iter__(self):
            return ({"x": torch.full((2,), float(n))} for n in itertools.count())

    def data():
        return DataLoader(Numbers(), batch_size=4)

    def model():
        return nn.Linear(2, 1)

    def compute_loss(model, batch):
        return model(batch["x"]).square().mean()

    def optimizer(params):
        return torch.optim.SGD(params, lr=1e-4)
"""


def recipe(folder: Path, text: str) -> Path:
    path = folder / "endless.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_stream_without_an_end_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    nothing_is_built = ENDLESS.replace("return nn.Linear(2, 1)", "raise AssertionError")
    with using(ThreadComm()), pytest.raises(UsageError) as caught:
        train(load(recipe(tmp_path, nothing_is_built)), Options())
    assert "nobody knows when the recipe's stream ends" in str(caught.value)
    assert "--steps" in str(caught.value)


def test_so_many_steps_of_it_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with using(ThreadComm()):
        train(load(recipe(tmp_path, ENDLESS)), Options(), TrainingRun(max_steps=7))
    assert "7 steps of 4 rows in" in capsys.readouterr().out


COUNTED = (
    ENDLESS.replace("itertools.count()", "range(40)")
    + """
    def count(batch):
        return 3 * len(batch["x"])
"""
)


def test_a_recipe_that_computes_the_loss_of_a_batch_checks(
    tmp_path: Path,
) -> None:
    path = recipe(tmp_path, COUNTED)

    def work(comm: ThreadComm) -> float:
        with using(comm, HOSTS):
            return check(load(path), Options(), Comparison(steps=3))

    assert max(run(2, work, timeout_s=30)) <= CRITERION


def test_a_recipe_that_computes_the_loss_of_a_batch_is_planned(tmp_path: Path) -> None:
    with using(ThreadComm()):
        made = plan(load(recipe(tmp_path, COUNTED)), Options(), HOSTS)
    assert [choice.layer for choice in made.choices] == ["(model)"]


NORMED = (
    COUNTED.replace("nn.Linear(2, 1)", "nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8))")
    + """
    SYNC_BATCHNORM = True
"""
)


def test_a_batch_norm_over_all_ranks_is_checked_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, NORMED)

    def work(comm: ThreadComm) -> float:
        with using(comm, HOSTS):
            return check(load(path), Options.of({"sync_batchnorm": True}), Comparison(steps=3))

    assert max(run(2, work, timeout_s=30)) <= CRITERION
    assert "set to evaluation" not in capsys.readouterr().out


def test_a_batch_norm_over_all_ranks_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = worker.profiled

    def without_seconds(*args: Any) -> Any:  # so that the load of the machine decides nothing
        found = measured(*args)
        still = {"needed_s": 0.0, "forward_s": 0.0, "backward_s": 0.0}
        return replace(found, layers=tuple(replace(layer, **still) for layer in found.layers))

    monkeypatch.setattr(worker, "profiled", without_seconds)

    def planned(*, sync_batchnorm: bool) -> float:
        with using(ThreadComm()):
            options = Options.of(
                {"pins": {"*": "replicate:direct"}, "sync_batchnorm": sync_batchnorm}
            )
            return plan(load(recipe(tmp_path, NORMED)), options, SLOW).predicted_s

    assert planned(sync_batchnorm=True) > planned(sync_batchnorm=False) + SLOW.link.latency_s


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        ([], COUNTED, set()),
        ([], NORMED, {SyncBatchNorm()}),
        (["--sync-batchnorm", "--check-every", "7"], COUNTED, {SyncBatchNorm(), CheckReplicas(7)}),
        (["--check-every", "0"], NORMED, {SyncBatchNorm(), CheckReplicas(0)}),
    ],
)
def test_what_is_asked_of_batch_norms_and_replicas_reaches_training(
    words: list[str],
    text: str,
    expected: set[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Options] = []
    monkeypatch.setattr(worker, "train", lambda recipe, options, _: asked.append(options))
    done = CliRunner().invoke(train_command, [str(recipe(tmp_path, text)), *words])
    assert done.exit_code == 0, done.output
    (options,) = asked
    assert set(options.features) == expected


def test_ranks_step_by_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, COUNTED)

    def work(comm: ThreadComm) -> None:
        with using(comm, HOSTS):
            options = Options.of({"local_steps": 2, "outer": Outer(rule="average")})
            train(load(path), options, TrainingRun(max_steps=2, save_plan=tmp_path / "plan.json"))

    run(2, work, timeout_s=30)
    said = capsys.readouterr().out
    assert "2 local steps, average(lr=1, momentum=0): this changes the mathematics" in said
    assert Plan.load(tmp_path / "plan.json").local_steps == 2
    assert "batch: 4 rows a rank, 8 of all ranks" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ()),
        (["--local-steps", "16"], (LocalSteps(16),)),
        (["--local-steps", "auto", "--outer", "bmuf"], (LocalSteps("auto", Outer(rule="bmuf")),)),
        (
            ["--local-steps", "4", "--no-islands", "--warmup-steps", "10"],
            (LocalSteps(4, Outer(islands=False, warmup_steps=10)),),
        ),
    ],
)
def test_local_steps_reach_training(
    words: list[str], expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Options] = []
    monkeypatch.setattr(worker, "train", lambda recipe, options, _: asked.append(options))
    done = CliRunner().invoke(train_command, [str(recipe(tmp_path, COUNTED)), *words])
    assert done.exit_code == 0, done.output
    assert [options.features for options in asked] == [expected]


@pytest.mark.parametrize(
    ("words", "rule"), [([], "average"), (["--outer", "nesterov"], "nesterov")]
)
def test_with_servers_the_rule_is_theirs_unless_one_is_given(
    words: list[str], rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Options] = []
    monkeypatch.setenv("SHOAL_SERVERS", "1")
    monkeypatch.setattr(worker, "train", lambda recipe, options, _: asked.append(options))
    words = [str(recipe(tmp_path, COUNTED)), "--local-steps", "8", "--no-islands", *words]
    done = CliRunner().invoke(train_command, words)
    assert done.exit_code == 0, done.output
    outer = Outer(rule=rule, islands=False)
    assert [options.features for options in asked] == [(LocalSteps(8, outer),)]


def test_update_periods_reach_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Options] = []
    monkeypatch.setattr(worker, "train", lambda recipe, options, _: asked.append(options))
    path = str(recipe(tmp_path, COUNTED))
    words = ["--update-every", "fc.*=4", "--update-every", "head=2"]
    done = CliRunner().invoke(train_command, [path, *words])
    assert done.exit_code == 0, done.output
    periods = {"fc.*": 4, "head": 2}
    assert [options.features for options in asked] == [(UpdateEvery(periods),)]
    for wrong in ("4", "head=", "head=many"):
        done = CliRunner().invoke(train_command, [path, "--update-every", wrong])
        assert done.exit_code and "is not LAYER=STEPS" in done.output


def test_they_are_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, NORMED)

    def work(comm: ThreadComm) -> None:
        with using(comm, HOSTS):
            train(
                load(path),
                Options.of({"sync_batchnorm": True, "check_every": 1}),
                TrainingRun(max_steps=2),
            )

    run(2, work, timeout_s=30)
    assert "batch norm over all ranks: 1 layer" in capsys.readouterr().out


def test_what_steps_took_is_printed_and_written_and_plans_may_follow_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, told = recipe(tmp_path, COUNTED), tmp_path / "steps.json"

    def work(comm: ThreadComm) -> None:
        with using(comm, HOSTS):
            train(
                load(path), Options.of({"replan": True}), TrainingRun(max_steps=14, json_path=told)
            )

    run(2, work, timeout_s=60)
    printed = capsys.readouterr().out
    assert "off most: " in printed and "between steps" in printed
    found = json.loads(told.read_text())
    outcome = found["outcome"]
    assert found["ranks"] == 2 and len(found["plan"]["choices"]) == 1
    assert outcome["off"] in [term["name"] for term in outcome["terms"]]
    measured = {term["name"]: term["measured_s"] for term in outcome["terms"]}
    between_s = measured.pop("between steps")
    assert between_s >= 0 and outcome["measured_s"] == pytest.approx(sum(measured.values()))
