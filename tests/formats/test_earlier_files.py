"""Files that the last release without features wrote: checkpoints, plans and runs are read.

All of them were made by release 0.1.0 as it was before contracts/feature.py: checkpoints have
version 1, plans no `features`, and a run's explanation has none either.

    checkpoints/CASE/saved    `shoal.save` on two ranks, which were threads. They had trained the
                              model of `net` as CASES says, on the rows of `batch`
    two-steps-later           the weights of each rank, when two new ranks of that release had
                              loaded the checkpoint and had made two more steps
    plans/                    `Plan.save` of what `parallelize` followed on three ranks, two of them
                              on one host, with one server where the plan names it
    run*.json                 `shoal train tests/tiny_recipe.py --ranks 2 --report`, one of them
                              with `--local-steps 2`

Where a test here fails, a file of yesterday is not read. Mend the reader, and leave the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import SMALL, Batch, State, built, difference, plain, state
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import shoal
from shoal.checkpoint.folder import STATE
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.feature import in_order, of_plan
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.plan import Choice, Plan
from shoal.features.local_steps import LocalSteps
from shoal.features.residuals import residuals_of
from shoal.features.staleness import Staleness
from shoal.features.update_every import UpdateEvery
from shoal.front.session_start import using
from shoal.session.session import current
from shoal_tools.report.page import page
from shoal_tools.report.run_file import load, to_json

pytestmark = pytest.mark.quick
HERE = Path(__file__).parent
PLANS = sorted(path.stem for path in (HERE / "plans").glob("*.json"))


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.2, momentum=0.5)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.02, weight_decay=0.1)


def net() -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)))


def batch(step: int, rank: int, ranks: int) -> Batch:
    """A rank's rows: each rank has more than the one before, and no number is drawn."""
    x = ((torch.arange(12 * 6) * 37 + step * 11) % 101 - 50).double().view(12, 6) / 50
    y = (torch.arange(12) * 7 + step) % 4
    begin, end = (12 * r * (r + 1) // (ranks * (ranks + 1)) for r in (rank, rank + 1))
    return x[begin:end].clone(), y[begin:end].clone()


@dataclass(frozen=True)
class Case:
    """A checkpoint: how the model was trained, and what the checkpoint has beside weights.

    Args:
        make: the optimizer.
        steps: that were made before it.
        options: of `parallelize`.
        kept: features that get their state back.
        model: the keyword that the model was saved under, in a dict of its own.
    """

    make: Callable[[Iterable[nn.Parameter]], Optimizer]
    steps: int
    options: dict[str, Any]
    kept: tuple[str, ...] = ()
    model: str = ""

    def objects(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """What was saved, under its keywords."""
        named = {self.model: {"net": model}} if self.model else {"model": model}
        return {**named, "optimizer": optimizer}


INT8 = "replicate:direct+int8(block=8)"
CODED = {"0": INT8, "2": "sliced:ring+one_bit(block=8)"}
DILOCO, SLOWMO = shoal.Outer(lr=0.7, momentum=0.9), shoal.Outer(rule="slowmo")
LATER = shoal.Outer(warmup_steps=3)
CASES = {
    "sliced": Case(adamw, 2, {"pins": {"*": "sliced:direct"}}),
    "residuals": Case(sgd, 3, {"pins": CODED}, ("residuals",)),
    "local": Case(adamw, 4, {"local_steps": 3, "outer": DILOCO}, ("local_steps",)),
    "local-codec": Case(
        sgd,
        4,
        {"local_steps": 3, "outer": SLOWMO, "pins": {"*": INT8}},
        ("local_steps", "residuals"),
    ),
    "warm-up": Case(sgd, 2, {"local_steps": 3, "outer": LATER}, ("local_steps",)),
    "update-every": Case(
        adamw,
        4,
        {"pins": {"*": "replicate:direct"}, "update_every": {"2": 3}},
        ("update_every",),
        "parts",
    ),
}


def on_ranks(
    ranks: int, case: Case, work: Callable[[ThreadComm, nn.Module, Any, Optimizer], Any]
) -> list[Any]:
    """What `work` returns on each rank, of a parallelised model, its loss and its optimizer."""
    models = [net() for _ in range(ranks)]
    hosts = tuple(f"host{rank}" for rank in range(ranks))
    cluster = Cluster(Topology(hosts), Link(latency_s=1e-4, bytes_per_s=1e9))

    def each(comm: ThreadComm) -> Any:
        model = models[comm.rank]
        with using(comm, cluster):
            model, loss_fn, optimizer = shoal.parallelize(
                model,
                F.cross_entropy,
                case.make(model.parameters()),
                sample=batch(0, comm.rank, ranks),
                search_options=SMALL,
                **case.options,
            )
            return work(comm, model, loss_fn, optimizer)

    return run(ranks, each, timeout_s=60, hosts=hosts)


def went_on(name: str, ranks: int) -> list[State]:
    """Each rank's weights, two steps after ranks have loaded a checkpoint."""
    case = CASES[name]

    def work(comm: ThreadComm, model: nn.Module, loss_fn: Any, optimizer: Optimizer) -> State:
        plain_data = shoal.load(
            HERE / "checkpoints" / name / "saved", epoch=0, **case.objects(model, optimizer)
        )
        assert plain_data == {"epoch": 3}
        two = [batch(step, comm.rank, ranks) for step in (case.steps, case.steps + 1)]
        plain(model, loss_fn, optimizer, two)
        return state(model)

    return on_ranks(ranks, case, work)


def later(name: str) -> list[State]:
    """Each rank's weights, two steps after the release that wrote it had loaded a checkpoint."""
    stored = load_file(HERE / "checkpoints" / name / "two-steps-later.safetensors")
    return [
        {key.partition("/")[2]: t for key, t in stored.items() if key.startswith(f"rank{rank}/")}
        for rank in range(2)
    ]


@pytest.mark.parametrize("name", CASES)
def test_ranks_go_on_from_a_checkpoint_as_they_did(name: str) -> None:
    """To the last bit on the machine that wrote them; another may add in another order."""
    before = load_file(
        HERE / "checkpoints" / name / "saved" / f"{CASES[name].model or 'model'}.safetensors"
    )
    expected, got = later(name), went_on(name, 2)
    for old, new in zip(expected, got, strict=True):
        assert difference(old, new) <= 1e-12
        weights = {key.removeprefix("net/"): tensor for key, tensor in before.items()}
        assert difference(weights, new) > 1e-3, "nothing was trained"


@pytest.mark.parametrize("name", CASES)
def test_three_ranks_go_on_from_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    got = went_on(name, 3)
    assert "dropped" not in caplog.text
    exact = name in ("sliced", "update-every")  # where ranks have the mathematics of one process
    if exact:
        assert all(difference(later(name)[0], new) <= 1e-10 for new in got)


def kept_of(model: nn.Module) -> dict[str, Any]:
    """What features would keep now of a model, by their names (a collective)."""
    attachments = current().attached[model].running.attachments
    found = {name: attachment.state() for name, attachment in attachments.items()}
    return {name: kept for name, kept in found.items() if kept is not None}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_each_feature_gets_its_state(name: str, ranks: int) -> None:
    """What a checkpoint has in files of their own is what features would save at once."""
    case, folder = CASES[name], HERE / "checkpoints" / name / "saved"

    def work(
        comm: ThreadComm, model: nn.Module, loss_fn: Any, optimizer: Optimizer
    ) -> dict[str, Any]:
        shoal.load(folder, **case.objects(model, optimizer))
        return kept_of(model)

    file, way = folder / "outer-state.safetensors", "parts.net" if case.model else "model"
    outer = load_file(file) if file.exists() else {}
    file = folder / "codec-residuals.safetensors"
    owed = load_file(file) if file.exists() else {}
    assert bool(outer or owed) == bool(set(case.kept) and name != "warm-up")
    for kept in on_ranks(ranks, case, work):
        assert tuple(sorted(kept)) == case.kept
        if "residuals" in kept:
            assert kept["residuals"]["local"] == ("local_steps" in case.options)
            check_same(owed, kept["residuals"]["sums"], way)
        if "update_every" in kept:
            check_same(outer, kept["update_every"], way)
            assert set(kept["update_every"]) == {"2.weight", "2.bias"}
        if "local_steps" in kept:
            check_same(outer, kept["local_steps"]["outer"], way)
            assert kept["local_steps"]["warmup_steps"] == (2 if name == "warm-up" else 0)


def check_same(stored: dict[str, Tensor], kept: dict[str, dict[str, Tensor]], way: str) -> None:
    """Compare the tensors of a file with those of a state, by parameter and by kind."""
    found = {f"{way}/{name}/{k}": t for name, of_name in kept.items() for k, t in of_name.items()}
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(found[name].view(-1), tensor.view(-1), rtol=1e-6, atol=1e-9)


def test_residuals_are_not_those_of_a_model_without_codecs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are dropped, and that is told; nothing else of an earlier checkpoint is."""
    case = CASES["residuals"]
    other = Case(case.make, case.steps, {"pins": {"*": "replicate:direct"}})

    def work(comm: ThreadComm, model: nn.Module, loss_fn: Any, optimizer: Optimizer) -> None:
        shoal.load(HERE / "checkpoints" / "residuals" / "saved", model=model, optimizer=optimizer)
        assert residuals_of(model).own() == {}

    on_ranks(2, other, work)
    assert "what codecs had lost of 0.weight" in caplog.text


def test_local_steps_that_were_not_asked_for_leave_weights_alone() -> None:
    """All ranks take the weights in common; no feature is there that had a use for the rest."""
    other = Case(adamw, 4, {"pins": {"*": "replicate:direct"}})

    def work(comm: ThreadComm, model: nn.Module, loss_fn: Any, optimizer: Optimizer) -> State:
        shoal.load(HERE / "checkpoints" / "local" / "saved", model=model, optimizer=optimizer)
        assert set(kept_of(model)) == set()
        return state(model)

    stored = load_file(HERE / "checkpoints" / "local" / "saved" / "model.safetensors")
    for got in on_ranks(2, other, work):
        assert difference(stored, got) == 0


@pytest.mark.parametrize("name", CASES)
def test_only_a_checkpoint_with_state_of_features_has_a_new_version(
    name: str, tmp_path: Path
) -> None:
    """So the release before reads what it has all of."""
    case = CASES[name]

    def work(comm: ThreadComm, model: nn.Module, loss_fn: Any, optimizer: Optimizer) -> None:
        steps = [batch(step, comm.rank, 2) for step in range(case.steps)]
        plain(model, loss_fn, optimizer, steps)
        shoal.save(tmp_path / "saved", **case.objects(model, optimizer))

    on_ranks(2, case, work)
    written = json.loads((tmp_path / "saved" / STATE).read_text())
    before = json.loads((HERE / "checkpoints" / name / "saved" / STATE).read_text())
    assert (before["version"], written["version"]) == (1, 2 if case.kept else 1)
    assert before["state"].keys() <= written["state"].keys()
    assert before["state"]["objects"].keys() - {"epoch"} == written["state"]["objects"].keys()


def plan_file(name: str) -> Path:
    return HERE / "plans" / f"{name}.json"


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_read_field_by_field_and_written_as_it_was(name: str, tmp_path: Path) -> None:
    plan = Plan.load(plan_file(name))
    plan.save(tmp_path / "again.json")
    before, after = (json.loads(p.read_text()) for p in (plan_file(name), tmp_path / "again.json"))
    assert "features" not in after and after == before
    assert plan.features == {}
    read = {**asdict(plan), "choices": [asdict(choice) for choice in plan.choices]}
    if plan.outer is not None:
        later = [read["outer"].pop(name) for name in ("grows", "quorum", "grace_s")]
        assert later == [False, None, 5.0]  # fields that came later
    about = {"format", "written_by"}
    assert {key: value for key, value in before.items() if key not in about} == {
        key: value for key, value in read.items() if key != "features"
    }


OUTER = shoal.Outer(rule="slowmo", warmup_steps=2, lag=1, islands=True)
AVERAGE = shoal.Outer(rule="average", lag=0, islands=False)
SAID: dict[str, tuple[str, list[Any]]] = {
    "any-staleness": ("server:direct", [Staleness(None)]),
    "cut": ("row", []),
    "local": ("replicate:direct", [LocalSteps(3, OUTER)]),
    "local-servers": ("server:direct", [LocalSteps(3, AVERAGE), Staleness(1)]),
    "placed": ("sliced:direct", []),
    "plain": ("replicate:ring+int8(block=8)", []),
    "staleness": ("server:direct", [Staleness(2)]),
    "update-every": ("replicate:direct", [UpdateEvery({"2": 3})]),
}


@pytest.mark.parametrize("name", PLANS)
def test_features_are_read_from_the_fields_of_a_plan(name: str) -> None:
    way, expected = SAID[name]
    plan = Plan.load(plan_file(name))
    assert plan.choice("2").way == way and len(plan.choices) == 2
    usual = in_order(())
    assert [feature for feature in of_plan(plan, ()) if feature not in usual] == expected


def test_a_plan_with_a_feature_says_so() -> None:
    """Only then has it a key that the release before does not know."""
    plan = Plan(2, "digest", (Choice("0", "replicate", "direct"),), 100, lanes=1)
    written = json.loads(plan.with_feature("toy", {"every": 2}).to_json())
    assert written["features"] == {"toy": {"every": 2}}


@pytest.mark.parametrize("name", ["run", "run-local-steps"])
def test_a_run_is_read_and_written_as_it_was(name: str) -> None:
    record = load(HERE / f"{name}.json")
    before, after = (
        json.loads(text)["run"] for text in ((HERE / f"{name}.json").read_text(), to_json(record))
    )
    assert {key: after[key] for key in before} == before
    assert record.explanation is not None
    local = "2 local steps, nesterov(lr=0.7, momentum=0.9)" if name != "run" else ""
    assert record.explanation.local == local
    assert record.outcome is not None and bool(record.outcome.terms) == (name == "run")
    assert f"{local}: the bytes of a layer" in page(record) if local else page(record)
