"""A loss that weighs itself, and a script that makes another one: it is said, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

HOSTS = Cluster(Topology(("host",) * 2), Link(1e-4, 1e8))  # nothing is measured

CASES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "count": (nn.CrossEntropyLoss(), {"count": lambda output, y: (y != -100).sum()}),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), {}),
}


def said(case: str, inline: bool) -> list[str]:
    """What two steps on two ranks warn of, these being threads of one process."""

    def work(comm: ThreadComm) -> None:
        loss_fn, options = deepcopy(CASES[case][0]), CASES[case][1]
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x, y = torch.randn(4, 6) + comm.rank, torch.tensor([0, 1, 2, 0])
        with using(comm, HOSTS):
            _, counted, _ = shoal.parallelize(model, loss_fn, optimizer, sample=(x, y), **options)
            made: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy if inline else counted
            for _ in range(2):
                made(model(x), y).backward()
                optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(2, work)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("case", CASES)
def test_a_loss_made_beside_it_is_warned_of_once_a_rank(case: str) -> None:
    messages = said(case, inline=True)
    assert len(messages) == 2
    assert all("not made by the loss_fn that parallelize returned" in each for each in messages)


@pytest.mark.parametrize("case", CASES)
def test_its_own_is_not(case: str) -> None:
    assert said(case, inline=False) == []
