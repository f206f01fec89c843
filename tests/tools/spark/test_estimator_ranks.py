"""What an estimator's ranks run, without Spark: ranks are threads, rows come as Arrow batches."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import SampleError, UsageError
from shoal.front.session_start import using
from shoal_tools.spark.estimator_ranks import FitFunction, FitResult
from shoal_tools.spark.job import Work
from shoal_tools.spark.parts import Parts
from shoal_tools.spark.rank import loaders_of
from shoal_tools.spark.rows import Split
from shoal_tools.spark.trained_model import TrainedModel

ROWS, MARKED = 22, 7  # of those, to validate with
X = torch.randn(ROWS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
Y = torch.randint(4, (ROWS,), generator=torch.Generator().manual_seed(4))
NET = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def accuracy(output: Any, target: Any) -> tuple[int, int]:
    return int((output.argmax(1) == target).sum()), len(target)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def parts(**more: Any) -> Parts:
    plain = {"to_input": lambda x: x, "metric": accuracy, "optimizer": sgd}
    return Parts(lambda: copy.deepcopy(NET), **{**plain, **more})


def stream(rank: int, size: int) -> Iterator[Any]:
    """A rank's rows in batches of 4, marked ones first: the second batch has both kinds."""
    ids = list(range(rank, ROWS, size))
    for start in range(0, len(ids), 4):
        own = ids[start : start + 4]
        yield pa.record_batch(
            {
                "x": pa.array([X[i].tolist() for i in own]),
                "marked": pa.array([i < MARKED for i in own]),
                "y": pa.array([int(Y[i]) for i in own]),
            }
        )


def trained(size: int, training: FitFunction, folder: Path, batch_size: int = 3) -> list[FitResult]:
    """The result of every rank."""
    epochs = training.epochs

    def work(comm: ThreadComm) -> FitResult:
        own = folder / f"{comm.rank}"
        own.mkdir(exist_ok=True)
        job = Work(
            training, batch_size, epochs, training.batch, False, 0, 60.0, validation="marked"
        )
        with using(comm):
            return training(*loaders_of(job, stream(comm.rank, size), own))

    return run(size, work)


def expected(epochs: int, size: int, every: int = 0) -> tuple[nn.Module, list[dict[str, Any]], Any]:
    """One process on the same global batches: the model, validations, and each epoch's loss."""
    model, told, step, losses = copy.deepcopy(NET), [], 0, []
    optimizer = sgd(model.parameters())
    held, total = list(range(MARKED)), 3 * size

    def validate(epoch: int) -> None:
        with torch.no_grad():
            output = model(X[held])
            loss = float(nn.functional.cross_entropy(output, Y[held]))
        right = accuracy(output, Y[held])[0] / MARKED
        told.append({"epoch": epoch, "step": step, "loss": loss, "right": right, "rows": MARKED})

    for epoch in range(epochs):
        total_loss = 0.0
        for start in range(MARKED, ROWS, total):  # sizes of ranks differ by one at most
            ids = list(range(start, min(start + total, ROWS)))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(X[ids]), Y[ids])
            loss.backward()
            optimizer.step()
            total_loss += float(loss.detach()) * len(ids)
            step += 1
            if every and step % every == 0:
                validate(epoch)
        if not (told and told[-1]["step"] == step):
            validate(epoch)
        losses.append(total_loss / (ROWS - MARKED))
    return model, told, losses


@pytest.mark.parametrize("every", [0, 2])
def test_validation_is_over_the_marked_rows_of_all_ranks(tmp_path: Path, every: int) -> None:
    """15 rows in steps of 6: the last has three rows, on two ranks."""
    training = FitFunction(parts(), "x", "y", 3, 0, "", every)
    first, second = trained(2, training, tmp_path)
    assert first.validations == second.validations and not second.state
    model, told, losses = expected(3, 2, every)
    assert first.losses == pytest.approx(losses, rel=0, abs=1e-10)
    assert [(t["epoch"], t["step"], t["rows"]) for t in told] == [
        (t["epoch"], t["step"], t["rows"]) for t in first.validations
    ]
    assert first.validations[-1]["step"] == 9
    for name, value in model.state_dict().items():
        torch.testing.assert_close(first.state[name], value, rtol=0, atol=1e-10)
    for got, wanted in zip(first.validations, told, strict=True):
        assert got == pytest.approx(wanted, rel=0, abs=1e-10)


@pytest.mark.slow
def test_a_run_goes_on_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    trained(2, FitFunction(parts(), "x", "y", 1, 0, str(folder), 0), tmp_path)
    again, _ = trained(2, FitFunction(parts(), "x", "y", 3, 0, str(folder), 0), tmp_path)
    model, told, losses = expected(3, 2)
    assert [each["step"] for each in again.validations] == [t["step"] for t in told]
    assert again.losses == pytest.approx(losses, rel=0, abs=1e-10)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state[name], value, rtol=0, atol=1e-10)
    whole, _ = trained(2, FitFunction(parts(), "x", "y", 3, 0, str(folder), 0), tmp_path)
    assert whole.validations == again.validations  # nothing is left to do


class Stopped(Exception):
    """The end of a run in the middle of an epoch."""


def stopping_sgd(step: int) -> Any:
    """Make an optimizer that stops the run behind so many steps."""
    steps = dict[int, int]()

    def count(optimizer: Any, *_: Any) -> None:
        steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
        if steps[id(optimizer)] == step:
            raise Stopped

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        optimizer.register_step_post_hook(count)
        return optimizer

    return made


def stopping_metric(calls: int) -> Any:
    """Make a metric that stops the run, on the rank which calls it so often."""
    counted = threading.local()

    def metric(output: Any, target: Any) -> tuple[int, int]:
        counted.calls = getattr(counted, "calls", 0) + 1
        if counted.calls == calls:
            raise Stopped
        return accuracy(output, target)

    return metric


STOPS: dict[str, dict[str, Any]] = {
    "in the second epoch": {"optimizer": stopping_sgd(6)},
    "in the first": {"optimizer": stopping_sgd(2)},
    "behind its last step": {"metric": stopping_metric(3)},
}


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("every", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, stop: str, every: int) -> None:
    """Three steps an epoch, a checkpoint behind each."""

    def fit(**more: Any) -> FitFunction:
        folder = str(tmp_path / "checkpoints")
        return FitFunction(parts(**more), "x", "y", 3, 0, folder, every, save_every=1)

    if every and stop == "behind its last step":
        stop = "in the second epoch"  # it would stop elsewhere
    with pytest.raises(Stopped):
        trained(2, fit(**STOPS[stop]), tmp_path)
    again, _ = trained(2, fit(), tmp_path)
    model, told, losses = expected(3, 2, every)
    assert [each["step"] for each in again.validations] == [t["step"] for t in told]
    for found, wanted in zip(again.validations, told, strict=True):
        assert found == pytest.approx(wanted, rel=0, abs=1e-10)
    assert again.losses == pytest.approx(losses, rel=0, abs=1e-10)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state[name], value, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_another_number_of_ranks_begins_the_epoch_anew(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    with pytest.raises(Stopped):
        stopped = parts(optimizer=stopping_sgd(6))
        trained(2, FitFunction(stopped, "x", "y", 3, 0, folder, 0, save_every=1), tmp_path)
    with pytest.warns(UserWarning, match="2 ranks had rows of its own, and now there are 3"):
        again, *_ = trained(3, FitFunction(parts(), "x", "y", 3, 0, folder, 0), tmp_path)
    # five steps before, and then two epochs of two
    assert [each["step"] for each in again.validations] == [3, 7, 9]
    assert len(again.losses) == 3 and again.losses[2] < again.losses[1] < again.losses[0]


class OwnLoss(nn.Module):
    """A model that returns (output, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = copy.deepcopy(NET)

    def forward(self, x: Any, y: Any = None) -> Any:
        output = self.net(x)
        return output, None if y is None else nn.functional.cross_entropy(output, y)


FORMS: dict[str, dict[str, Any]] = {
    "compute_loss": {
        "compute_loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "metric": lambda model, batch: accuracy(model(batch[0]), batch[1]),
    },
    "of a batch of its own": {
        "to_batch": lambda columns: {"in": columns["x"], "out": columns["y"]},
        "compute_loss": lambda model, batch: nn.functional.cross_entropy(
            model(batch["in"]), batch["out"]
        ),
        "metric": lambda model, batch: accuracy(model(batch["in"]), batch["out"]),
    },
    "the model's own": {
        "loss": None,
        "to_batch": lambda columns: (columns["x"], columns["y"]),
        "metric": lambda output, x: accuracy(output[0], x[1]),
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick
def test_a_loss_may_be_computed_in_each_way(tmp_path: Path, form: str) -> None:
    model = OwnLoss if form == "the model's own" else lambda: copy.deepcopy(NET)
    whole = Parts(model, optimizer=sgd, **{"to_input": lambda x: x, **FORMS[form]})
    first, _ = trained(2, FitFunction(whole, "x", "y", 2, 0, "", 0), tmp_path)
    one, told, losses = expected(2, 2)
    assert first.losses == pytest.approx(losses, rel=0, abs=1e-10)
    for got, wanted in zip(first.validations, told, strict=True):
        assert got == pytest.approx(wanted, rel=0, abs=1e-10)
    for name, value in one.state_dict().items():
        own = f"net.{name}" if form == "the model's own" else name
        torch.testing.assert_close(first.state[own], value, rtol=0, atol=1e-10)
    columns = {"x": X[:MARKED], "y": Y[:MARKED]}
    sums = TrainedModel(whole, first.state).sums(columns, "x", "y", 3)
    assert abs(sums.losses / sums.weight - told[-1]["loss"]) < 1e-10
    assert sums.right / sums.of_all == pytest.approx(told[-1]["right"]) and sums.rows == MARKED


@pytest.mark.slow
def test_options_may_follow_from_the_model(tmp_path: Path) -> None:
    def options(model: nn.Module) -> dict[str, Any]:
        names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        return {"pins": dict.fromkeys(names, "factor"), "check_every": 1}

    first, _ = trained(2, FitFunction(parts(options=options), "x", "y", 2, 0, "", 0), tmp_path)
    for name, value in expected(2, 2)[0].state_dict().items():
        torch.testing.assert_close(first.state[name], value, rtol=0, atol=1e-10)


@pytest.mark.quick
@pytest.mark.parametrize("marks", [[1, 1, 0], [0, 0], [1, 1], [], [1, 0, 0, 0, 0, 0]], ids=str)
def test_a_stream_is_split_where_marks_end(marks: Sequence[int]) -> None:
    def batches() -> Iterator[Any]:
        for start in range(0, len(marks), 2):
            own = list(range(start, min(start + 2, len(marks))))
            flags = pa.array([bool(marks[i]) for i in own])
            yield pa.record_batch({"id": pa.array(own), "marked": flags})

    split = Split(batches(), "marked")
    marked = [i for batch in split.marked() for i in batch.column("id").to_pylist()]
    others = list(split.others())
    assert marked == list(range(sum(marks)))
    assert [i for b in others for i in b.column("id").to_pylist()] == list(
        range(sum(marks), len(marks))
    )
    assert all(batch.schema.names == ["id"] for batch in others)


@pytest.mark.quick
def test_what_parts_do_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match="options has what") as caught:
        parts(options={"sample": None, "pinns": {}})
    assert "'sample', 'pinns'" in caught.value.got and "pins" in caught.value.expected
    with pytest.raises(UsageError, match="no other"):
        parts(compute_loss=lambda model, batch: None, loss=nn.MSELoss)
    with pytest.raises(UsageError, match="needs a target"):
        parts().columns("x", "", [])
    assert parts(loss=None).columns("x", "y", []) == ["x"]
    assert parts(loss=None, to_batch=dict).columns("x", "y", ["z", "x"]) == ["x", "y", "z"]


def test_a_model_that_does_not_fit_the_rows_is_told(tmp_path: Path) -> None:
    wide = Parts(lambda: nn.Linear(6, 4).double(), to_input=lambda x: x, optimizer=sgd)
    with pytest.raises(SampleError, match="does not take the sample") as caught:
        trained(2, FitFunction(wide, "x", "y", 1, 0, "", 0), tmp_path)
    assert "float64 (3, 5)" in caught.value.got and caught.value.do


@pytest.mark.slow
def test_no_marked_row_is_told(tmp_path: Path) -> None:
    def none(rank: int, size: int) -> Iterator[Any]:
        for batch in stream(rank, size):
            yield batch.set_column(1, "marked", pa.array([False] * len(batch)))

    training = FitFunction(parts(), "x", "y", 1, 0, "", 0)

    def work(comm: ThreadComm) -> FitResult:
        own = tmp_path / f"{comm.rank}"
        own.mkdir()
        job = Work(training, 3, 1, training.batch, False, 0, 60.0, validation="marked")
        with using(comm):
            return training(*loaders_of(job, none(comm.rank, 2), own))

    with pytest.raises(UsageError, match="no row is marked"):
        run(2, work)


OUTPUTS = {
    "a row for each": (nn.Identity(), True),
    "a tuple": (OwnLoss(), False),
    "no row for each": (nn.Flatten(0), False),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_column_takes_a_tensor_with_a_row_for_each(name: str) -> None:
    module, fits = OUTPUTS[name]
    own = TrainedModel(Parts(lambda: module, to_input=lambda x: x), module.state_dict())
    if fits:
        torch.testing.assert_close(own.computed(module, X, [""], 4)[""], X)
        return
    with pytest.raises(UsageError, match="a row for each row") as caught:
        own.computed(module, X, [""], 4)
    assert "setOutputCols" in caught.value.do


@pytest.mark.quick
@pytest.mark.parametrize(
    "module",
    [
        "shoal.integrations.spark.trained",
        "shoal_tools.spark.trained",
        "shoal_tools.spark.trained_model",
    ],
)
def test_models_that_were_saved_under_older_names_are_read(module: str) -> None:
    assert pickle.loads(f"c{module}\nTrained\n.".encode()) is TrainedModel


@pytest.mark.parametrize("kind", [pa.float64(), pa.int32()], ids=str)
def test_labels_of_other_columns_train_as_int64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    training = FitFunction(parts(), "x", "y", 2, 0, "", 0)
    (tmp_path / "whole").mkdir()
    (whole,) = trained(1, training, tmp_path / "whole")
    rows = stream

    def cast(rank: int, size: int) -> Iterator[Any]:
        for batch in rows(rank, size):
            yield batch.set_column(2, "y", batch["y"].cast(kind))

    monkeypatch.setitem(globals(), "stream", cast)
    (found,) = trained(1, training, tmp_path)
    assert found.losses == whole.losses and len(found.losses) == 2
    assert all(torch.equal(found.state[name], whole.state[name]) for name in whole.state)


def test_no_rows_at_all_is_said() -> None:
    training = FitFunction(parts(), "x", "y", 1, 0, "", 0)

    def work(comm: ThreadComm) -> None:
        job = Work(training, 3, 1, training.batch, False, 0, 60.0)
        with using(comm), pytest.raises(UsageError, match="there are no rows to train on"):
            training(*loaders_of(job, iter(()), Path()))

    run(2, work)
