"""Ranks on the executors of a real Spark cluster, fed from DataFrames."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import shoal
from shoal.core.errors import UsageError, WorldError
from shoal_tools.spark import run
from shoal_tools.spark.run import arrays

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]

SIZES = (40, 3, 0, 17, 90, 1, 25)  # rows of each partition
STEPS = 5


def digits(spark: Any) -> Any:
    """Digits in seven uneven partitions, one of them empty."""
    data = load_digits()
    rows, start = [], 0
    for size in SIZES:
        part = [(i, data.data[i].tolist(), int(data.target[i])) for i in range(start, start + size)]
        rows.append(part)
        start += size
    context = spark.sparkContext
    parts = context.parallelize(rows, len(rows)).flatMap(lambda part: part)
    return spark.createDataFrame(parts, "id long, x array<double>, y long")


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_row_comes_once_an_epoch_and_gradients_are_of_all(spark: Any, ranks: int) -> None:
    """Steps of a model are those of one process on the rows that all ranks had."""

    def built() -> Any:
        torch.manual_seed(0)
        layers = nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)
        model = nn.Sequential(*layers).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(loader: Any) -> Any:
        model, optimizer = built()
        loss_fn, ids, state = nn.CrossEntropyLoss(), [], {}
        _, x, y = next(iter(loader))
        model, loss_fn, optimizer = shoal.parallelize(model, loss_fn, optimizer, sample=(x, y))
        for epoch in range(3):
            for own, x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                ids.append((epoch, own.tolist()))
                if len(ids) == steps:
                    state = {k: v.clone() for k, v in model.state_dict().items()}
        return ids, state

    steps = STEPS
    df = digits(spark)
    given = run(train, df, num_ranks=ranks, batch_size=8, epochs=3, to_batch=to_batch_here())
    for epoch in range(3):
        ids = [i for told, _ in given for at, own in told if at == epoch for i in own]
        assert sorted(ids) == list(range(sum(SIZES)))

    data = load_digits()
    x, y = torch.tensor(data.data) / 16, torch.tensor(data.target)
    model, optimizer = built()
    for step in range(STEPS):
        rows = [i for told, _ in given for i in told[step][1]]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    for _, state in given:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


def to_batch_here() -> Any:
    """The function as one that is sent by value: executors do not have the tests."""
    return lambda columns: (columns["id"], columns["x"] / 16, columns["y"])


def test_each_rank_may_keep_a_partition_of_its_own_whatever_its_size(spark: Any) -> None:
    context = spark.sparkContext
    parts = context.parallelize([19, 2, 0], 3).flatMap(lambda n: [(i,) for i in range(n)])
    df = spark.createDataFrame(parts, "id long")

    def ids(loader: Any) -> Any:
        return [batch["id"].tolist() for batch in loader]

    given = run(ids, df, num_ranks=3, batch_size=2, repartition=False)
    assert sorted(i for steps in given for step in steps for i in step) == sorted(
        [*range(19), 0, 1]
    )
    assert {tuple(map(len, step)) for step in zip(*given, strict=True)} == {(2, 2, 2), (1, 1, 1)}
    with pytest.raises(UsageError, match="as many partitions as ranks"):
        run(ids, df, num_ranks=2, repartition=False)


def test_what_is_wrong_is_told_at_the_driver(spark: Any) -> None:
    df = spark.createDataFrame([(float(i),) for i in range(9)], "x double")

    def fails(loader: Any) -> None:
        if shoal.world().rank == 1:
            raise KeyError("a label that nobody knows")
        for _ in range(1000):  # waits for the other
            list(loader)

    with pytest.raises(WorldError, match="a label that nobody knows") as caught:
        run(fails, df, num_ranks=2, epochs=1000)
    assert "rank 1, executor on host 127.0.0.1" in caught.value.where

    def refuses(loader: Any) -> None:
        shoal.shard(loader)

    with pytest.raises(UsageError, match="sharded already") as refused:
        run(refuses, df, num_ranks=2)
    assert "executor on host" in refused.value.where and refused.value.do


def test_bad_input_is_told_before_anything_starts(spark: Any) -> None:
    df = spark.createDataFrame([(1.0, 2)], "x double, y int")
    with pytest.raises(UsageError, match="no such column") as caught:
        run(print, df, num_ranks=2, columns=["x", "label"])
    assert "'label'" in caught.value.got and "'y'" in caught.value.expected
    with pytest.raises(UsageError, match="more ranks than tasks") as many:
        run(print, df, num_ranks=4)
    assert "num_ranks=4" in many.value.got and "ask for 3" in many.value.do
    for wrong in ({"num_ranks": 0}, {"num_ranks": 2, "epochs": True}):
        with pytest.raises(UsageError, match="whole number"):
            run(print, df, **wrong)
    with pytest.raises(UsageError, match="cannot be pickled"):
        run(lambda loader: spark, df, num_ranks=2)
    with pytest.raises(UsageError, match="takes a DataFrame"):
        run(print, [1, 2], num_ranks=2)


def test_a_killed_rank_has_the_stage_go_on_from_its_checkpoint(spark: Any, tmp_path: Path) -> None:
    """In the middle of the third epoch of six steps: it has the weights of an undisturbed run."""

    def train(loader: Any, folder: Path, deadly: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(64, 10).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss_fn, began, ids = nn.CrossEntropyLoss(), folder / "began", []
        objects = {"model": model, "optimizer": optimizer, "loader": loader}
        sample = next(iter(loader))[1:]
        with shoal.Checkpoints(folder, **objects) as checkpoints:
            checkpoints.resume()
            first = checkpoints.steps
            model, loss_fn, optimizer = shoal.parallelize(model, loss_fn, optimizer, sample=sample)
            for _ in range(loader.epoch, 4):
                for own, x, y in loader:
                    here = (checkpoints.steps, shoal.world().rank) == (13, 1)
                    if deadly and here and not began.exists():
                        began.touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.zero_grad()
                    loss_fn(model(x), y).backward()
                    optimizer.step()
                    ids.append(own.tolist())
                    checkpoints.step()
                    checkpoints.save()
        return first, ids, model.weight.detach().clone()

    df, given = digits(spark), {"num_ranks": 2, "batch_size": 16, "epochs": 4}
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    whole = run(lambda loader: train(loader, plain, False), df, to_batch=to_batch_here(), **given)
    again = run(lambda loader: train(loader, killed, True), df, to_batch=to_batch_here(), **given)
    for (zero, ids, expected), (first, own, found) in zip(whole, again, strict=True):
        assert (zero, len(ids), first, own) == (0, 24, 13, ids[13:])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_vectors_are_sent_as_arrays(spark: Any) -> None:
    vectors = importlib.import_module("pyspark.ml.linalg").Vectors
    df = spark.createDataFrame([(vectors.dense(1.0, 2.0), 0), (vectors.sparse(2, {1: 3.0}), 1)])
    rows = arrays(df.toDF("x", "y")).collect()
    assert [row.x for row in rows] == [[1.0, 2.0], [0.0, 3.0]] and [row.y for row in rows] == [0, 1]
