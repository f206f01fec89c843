"""A NaN on one rank: that rank says so, once, before all ranks have it."""

from __future__ import annotations

import warnings

import pytest
import torch
from bad_cases import batch, model, sgd
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using


@pytest.mark.parametrize("strategy", ["replicate", "sliced"])
def test_the_rank_and_layer_of_a_nan_are_named_once(strategy: str) -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, Cluster(Topology(("a", "b", "c")), Link(1e-4, 1e8), 1.0)):
            own, loss_fn = model(), nn.CrossEntropyLoss()
            optimizer = sgd(own.parameters())
            own, loss_fn, optimizer = shoal.parallelize(
                own, loss_fn, optimizer, sample=batch(comm.rank), strategies=[strategy]
            )
            for step in range(4):
                x, y = batch(comm.rank)
                if (comm.rank, step) == (1, 2):
                    x[3, 0] = torch.nan
                optimizer.zero_grad()
                loss_fn(own(x), y).backward()
                optimizer.step()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(3, work, timeout_s=20)
    texts = [str(each.message) for each in said if "NaN" in str(each.message)]
    assert len(texts) == 1
    assert "on rank 1 (host thread1), backward 2" in texts[0]
    assert "the gradient of head.bias has NaN" in texts[0] or strategy == "sliced"


@pytest.mark.parametrize("strategy", ["replicate", "sliced", "factor"])
@pytest.mark.parametrize("step", [0, 2])
def test_a_nan_in_one_element_is_named_where_every_element_is_looked_at(
    strategy: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.strategies.landing.CLOSELY", 2)

    def work(comm: ThreadComm) -> None:
        with using(comm, Cluster(Topology(("a", "b")), Link(1e-4, 1e8), 1.0)):
            own, loss_fn = model(), nn.CrossEntropyLoss()
            optimizer = sgd(own.parameters())
            pins = {"*": "replicate", "hidden": strategy, "head": strategy}
            own, loss_fn, optimizer = shoal.parallelize(
                own, loss_fn, optimizer, sample=batch(comm.rank), pins=pins
            )
            for number in range(step + 1):
                x, y = batch(comm.rank)
                optimizer.zero_grad()
                output = own(x)
                if (comm.rank, number) == (1, step):
                    output.register_hook(one_nan)
                loss_fn(output, y).backward()
                optimizer.step()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(2, work, timeout_s=20)
    texts = [str(each.message) for each in said if "NaN" in str(each.message)]
    assert len(texts) == 1
    assert f"on rank 1 (host thread1), backward {step}" in texts[0]
    assert "the gradient of head." in texts[0]


def one_nan(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    grad[0, -1] = torch.nan  # of one class alone, which is not the first
    return grad
