"""Every habit of ordinary loops under every strategy: as in one process, to 1e-10."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from habits import CLASSES, HABITS, OF_INPUTS, WIDTH, Net, Step
from one_process import built, cluster_of, difference, on_threads, sgd, state
from torch import Tensor
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.front.joining import using

ROWS = (3, 4)
WAYS: dict[str, dict[str, Any]] = {
    "replicate": {"pins": {"*": "replicate"}},
    "sliced": {"pins": {"*": "sliced"}},
    "factor": {"pins": {"*": "factor"}},
    "column": {"pins": dict.fromkeys("abc", "column")},
    "row": {"pins": dict.fromkeys("abc", "row")},
    "pair": {"pins": {"a": "column_pair", "b": "row_pair"}},
    "head": {"pins": {"c": "head"}},
    "embedding": {"pins": {"table": "embedding"}},
    "sync norm": {"pins": {"a": "column"}, "sync_batchnorm": True},
    "pipeline": {"pins": {"*": "pipeline"}},
}


def batch(step: int, of_ids: bool) -> tuple[Tensor, Tensor]:
    """The rows of all ranks in a step."""
    generator = torch.Generator().manual_seed(step)
    rows = sum(ROWS)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.randint(11, (rows, 2), generator=generator)
    return ids if of_ids else x, torch.randint(CLASSES, (rows,), generator=generator)


def habits_of(way: str) -> list[str]:
    return [name for name in HABITS if way != "embedding" or name not in OF_INPUTS]


def train(way: str, model: Any, loss_fn: Any, optimizer: Any, rank: int | None) -> Any:
    """Make a step by each habit, on a rank's rows or on all; return the state behind each."""
    states = {}
    for number, name in enumerate(habits_of(way)):
        x, y = batch(number, way == "embedding")
        if rank is not None:
            x, y = x.split(ROWS)[rank].clone(), y.split(ROWS)[rank].clone()
        try:
            HABITS[name](Step(model, loss_fn, optimizer, x, y))
        except Exception as error:
            error.add_note(f"habit: {name}")
            raise
        states[name] = state(model)
    return states


@pytest.mark.parametrize("way", WAYS)
def test_habits_train_as_in_one_process(way: str) -> None:
    model = built(lambda: Net(of_ids=way == "embedding", with_norm=way == "sync norm"))
    alone = copy.deepcopy(model)
    with using(ThreadComm()):
        expected = train(way, alone, F.cross_entropy, sgd(alone.parameters()), None)
    copies = [copy.deepcopy(model) for _ in ROWS]

    def work(comm: ThreadComm) -> Any:
        own = copies[comm.rank]
        x, y = (tensor.split(ROWS)[comm.rank] for tensor in batch(0, way == "embedding"))
        with using(comm, cluster_of(len(ROWS))):
            own, loss_fn, optimizer = shoal.parallelize(
                own, F.cross_entropy, sgd(own.parameters()), sample=(x, y), **WAYS[way]
            )
            return train(way, own, loss_fn, optimizer, comm.rank)

    for states in on_threads(len(ROWS), work):
        for name in expected:
            assert difference(expected[name], states[name]) <= 1e-10, name
