"""Servers and tail hosts as tasks of the stage; a script under TorchDistributor; a lost worker."""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import shoal
from shoal.core.errors import UsageError
from shoal_tools.spark import run

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]

ROWS, STEPS, EPOCHS = 61, 5, 2


def digits(spark: Any, partitions: int) -> Any:
    data = load_digits()
    rows = [(i, data.data[i].tolist(), int(data.target[i])) for i in range(ROWS)]
    return spark.createDataFrame(
        spark.sparkContext.parallelize(rows, partitions), "id long, x array<double>, y long"
    )


def model() -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)
    built = nn.Sequential(*layers).double()
    return built, torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9)


def training(pins: dict[str, str]) -> Any:
    """A function of the loader, that is sent by value: executors do not have the tests."""

    def train(loader: Any) -> Any:
        torch.manual_seed(0)
        layers = nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)
        model = nn.Sequential(*layers).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        _, x, y = next(iter(loader))
        model, loss_fn, optimizer = shoal.parallelize(
            model, nn.CrossEntropyLoss(), optimizer, sample=(x, y), pins=pins
        )
        ids, state = [], {}
        for epoch in range(2):
            for own, x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                ids.append((epoch, own.tolist()))
                if len(ids) == 5:
                    state = {k: v.clone() for k, v in model.state_dict().items()}
        return ids, state

    return train


@pytest.mark.parametrize(
    ("others", "pins", "repartition"),
    [
        ({"num_servers": 1}, {"*": "server"}, True),
        ({"num_tail": 1}, {"2": "stage"}, True),
        ({"num_servers": 1}, {"*": "server"}, False),
    ],
    ids=["server", "tail", "partitions of their own"],
)
def test_hosts_that_do_not_train_are_tasks_too_and_gradients_are_those_of_one_process(
    spark: Any, others: dict[str, int], pins: dict[str, str], repartition: bool
) -> None:
    given = run(
        training(pins),
        digits(spark, 2),
        num_ranks=2,
        batch_size=8,
        epochs=EPOCHS,
        to_batch=lambda columns: (columns["id"], columns["x"] / 16, columns["y"]),
        repartition=repartition,
        **others,
    )
    assert len(given) == 2
    for epoch in range(EPOCHS):
        ids = [i for told, _ in given for at, own in told if at == epoch for i in own]
        assert sorted(ids) == list(range(ROWS))

    data = load_digits()
    x, y = torch.tensor(data.data) / 16, torch.tensor(data.target)
    single, optimizer = model()
    for step in range(STEPS):
        rows = [i for told, _ in given for i in told[step][1]]
        optimizer.zero_grad()
        nn.functional.cross_entropy(single(x[rows]), y[rows]).backward()
        optimizer.step()
    for _, state in given:
        for name, value in single.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


def test_as_many_cores_are_needed_as_there_are_tasks(spark: Any) -> None:
    df = digits(spark, 2)
    with pytest.raises(UsageError, match="more ranks than tasks") as many:
        run(print, df, num_ranks=3, num_servers=1)
    assert "num_ranks=3, num_servers=1, num_tail=0, 3 free" in many.value.got
    with pytest.raises(UsageError, match="num_tail is a whole number"):
        run(print, df, num_ranks=2, num_tail=-1)


def test_a_script_runs_unchanged_under_torch_distributor(spark: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import pathlib, sys
            import torch
            import shoal

            world = shoal.init()
            torch.manual_seed(0)
            model, loss_fn = torch.nn.Linear(6, 2).double(), torch.nn.CrossEntropyLoss()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(12, 6, dtype=torch.float64)
            y = torch.arange(12) % 2
            mine = slice(world.rank, None, world.size)
            sample = x[mine], y[mine]
            model, loss_fn, optimizer = shoal.parallelize(model, loss_fn, optimizer, sample=sample)
            for _ in range(5):
                optimizer.zero_grad()
                loss_fn(model(x[mine]), y[mine]).backward()
                optimizer.step()
            torch.save((world.size, model.state_dict()), f"{sys.argv[1]}/{world.rank}.pt")
        """)
    )
    distributor = importlib.import_module("pyspark.ml.torch.distributor").TorchDistributor
    distributor(num_processes=3, local_mode=False, use_gpu=False).run(str(script), str(tmp_path))

    torch.manual_seed(0)
    single = nn.Linear(6, 2).double()
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.arange(12) % 2
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(single(x), y).backward()
        optimizer.step()
    for rank in range(3):
        size, state = torch.load(tmp_path / f"{rank}.pt")
        assert size == 3
        for name, value in single.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
