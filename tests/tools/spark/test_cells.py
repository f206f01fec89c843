"""Layers that are spread in each way, fed from a DataFrame, equal one process on the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal_tools.spark import run

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]

STEPS, BATCH = 5, 6
PINS = {
    "0": ("replicate", "sliced", "factor", "replicate"),
    "2": ("replicate", "sliced", "factor", "head"),
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_are_those_of_one_process(spark: Any, ranks: int) -> None:
    """Four models of one stage, each spread in one way, on the same rows."""
    cells = [dict(zip(PINS, pins, strict=True)) for pins in zip(*PINS.values(), strict=True)]
    generator = torch.Generator().manual_seed(ranks)
    num = STEPS * BATCH * ranks - 2  # so the last step is uneven
    x = torch.randn(num, 12, dtype=torch.float64, generator=generator)
    y = torch.randint(9, (num,), generator=generator)
    rows = [(i, x[i].tolist(), int(y[i])) for i in range(num)]
    df = spark.createDataFrame(rows, "id long, x array<double>, y long")

    def built() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 9)).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(loader: Any) -> Any:
        batches, found = list(loader), []
        for pins in cells:
            model, optimizer = built()
            loss_fn = nn.CrossEntropyLoss()
            sample = batches[0][1:]
            shoal.parallelize(model, loss_fn, optimizer, sample=sample, pins=pins)
            for _, inputs, targets in batches:
                optimizer.zero_grad()
                loss_fn(model(inputs), targets).backward()
                optimizer.step()
            state = {name: value.clone() for name, value in model.state_dict().items()}
            ways = {choice.layer: choice.strategy for choice in shoal.plan_of(model).choices}
            found.append((ways, state))
        return [own.tolist() for own, *_ in batches], found

    told = run(
        train,
        df,
        num_ranks=ranks,
        batch_size=BATCH,
        to_batch=lambda columns: (columns["id"], columns["x"], columns["y"]),
    )
    by_step = zip(*(ids for ids, _ in told), strict=True)
    steps = [[i for part in parts for i in part] for parts in by_step]
    assert len(steps) == STEPS and sorted(i for ids in steps for i in ids) == list(range(num))
    model, optimizer = built()
    for ids in steps:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
        optimizer.step()
    for _, found in told:
        assert [ways for ways, _ in found] == cells
        for _, state in found:
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
