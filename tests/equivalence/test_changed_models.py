"""A model changed after `parallelize`: what may change, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from one_process import (
    cluster_of,
)
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.front.session_start import using


def converted(model: nn.Module) -> None:
    model.double()


def one_layer_converted(model: nn.Module) -> None:
    model[2].to(torch.bfloat16)


def replaced(model: nn.Module) -> None:
    model[2] = nn.Linear(7, 5)


def tied(model: nn.Module) -> None:
    model[2].bias = model[4].bias


def wrapped(model: nn.Module) -> None:
    model[2] = nn.Sequential(model[2], nn.Linear(5, 5))


@pytest.mark.parametrize("strategy", ["replicate", "sliced", "factor"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (wrapped, "2.1.weight is new"),
        (converted, "0.weight was converted after parallelize"),
        (one_layer_converted, "2.weight was converted after parallelize"),
        (replaced, "2.weight is no longer the model's"),
        (tied, "2.bias is no longer the model's"),
    ],
)
def test_a_model_changed_after_parallelize_is_refused(change, says, strategy) -> None:
    first = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5))

    def work(comm: ThreadComm) -> None:
        model = copy.deepcopy(first)
        with using(comm, cluster_of(2)):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            shoal.parallelize(
                model,
                nn.MSELoss(),
                optimizer,
                sample=(batch, torch.zeros(4, 5)),
                pins={"*": strategy},
            )
            model(batch).sum().backward()
            optimizer.step()
            change(model)
            with pytest.raises(UsageError, match=says):
                model(batch).sum().backward()

    run(2, work)


def test_a_frozen_layer_may_be_taken_out() -> None:
    first = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5))

    def work(comm: ThreadComm) -> None:
        model = copy.deepcopy(first)
        with using(comm, cluster_of(2)):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            shoal.parallelize(
                model,
                nn.MSELoss(),
                optimizer,
                sample=(batch, torch.zeros(4, 5)),
                pins={"*": "replicate"},
            )
            model[1].requires_grad_(False)
            model[1] = nn.Identity()
            model(batch).sum().backward()
            assert model[0].weight.grad is not None

    run(2, work)
