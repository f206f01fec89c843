"""Parameters in the optimizer that are the program's own business, as a head cut by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from one_process import (
    AMONG_WORKERS,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    on_threads,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import UsageError
from shoal.front.session_start import using


def both() -> nn.Module:
    """A backbone, and a head that the program itself sees to."""
    return nn.Sequential(nn.Sequential(nn.Linear(7, 5), nn.Tanh()), nn.Linear(5, 3))


def summed_by_hand(head: nn.Module, comm: ThreadComm) -> None:
    """What a program does for a parameter of its own."""
    for parameter in head.parameters():
        everywhere = comm.gather_objects(parameter.grad, "test: gradients of the head")
        parameter.grad = torch.stack(everywhere).mean(0).to(parameter.device)


@pytest.mark.parametrize("way", AMONG_WORKERS)
def test_a_head_beside_a_parallelised_backbone(way: str) -> None:
    ranks = 2

    def work(comm: ThreadComm) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        backbone, head = model
        own = [rows_of(batch, comm.rank, ranks) for batch in features(7, 3)]
        with using(comm, cluster_of(ranks)):
            optimizer = sgd(model.parameters())
            head.weight.grad = torch.ones_like(head.weight)  # which the sample leaves as it is
            shoal.parallelize(
                backbone,
                lambda out, y: F.cross_entropy(head(out), y),
                optimizer,
                sample=own[0],
                pins={"*": way},
                left_alone=head.parameters(),
            )
            assert bool((head.weight.grad == 1).all()) and head.bias.grad is None
            for x, y in own:
                optimizer.zero_grad()
                F.cross_entropy(head(backbone(x)), y).backward()
                summed_by_hand(head, comm)
                optimizer.step()
            return state(model)

    start = built(both)
    alone = copy.deepcopy(start)
    optimizer = sgd(alone.parameters())
    for x, y in features(7, 3):
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
    states = on_threads(ranks, work)
    assert_same_bits(states)
    assert difference(state(alone), states[0]) < 1e-10


def test_their_gradients_are_neither_exchanged_nor_clipped() -> None:
    def work(comm: ThreadComm) -> tuple[Tensor, Tensor, float]:
        model = copy.deepcopy(start)
        backbone, head = model
        x, y = rows_of(features(7, 3)[0], comm.rank, 2)
        local = torch.autograd.grad(F.cross_entropy(model(x), y), head.weight)[0]
        with using(comm, cluster_of(2)):
            optimizer = sgd(model.parameters())
            shoal.parallelize(
                backbone,
                lambda out, y: F.cross_entropy(head(out), y),
                optimizer,
                sample=(x, y),
                left_alone=list(head.parameters()),
            )
            F.cross_entropy(head(backbone(x)), y).backward()
            norm = float(optimizer.clip_grad_norm_(1e-6))
            optimizer.step()
            return local, head.weight.grad.clone(), norm

    start = built(both)
    results = on_threads(2, work)
    for local, gradient, _ in results:
        assert torch.equal(local, gradient)
    assert results[0][2] == results[1][2]
    assert not torch.equal(results[0][1], results[1][1])


def test_a_loss_with_parameters_that_are_left_alone() -> None:
    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(out * self.scale, y)

    def work(comm: ThreadComm) -> Tensor | None:
        model, loss_fn = copy.deepcopy(start), Margin().double()
        x, y = rows_of(features(7, 3)[0], comm.rank, 2)
        optimizer = sgd([*model.parameters(), *loss_fn.parameters()])
        with using(comm, cluster_of(2)):
            own = loss_fn.parameters()
            shoal.parallelize(model, loss_fn, optimizer, sample=(x, y), left_alone=own)
            loss_fn(model(x), y).backward()
            optimizer.step()
        return loss_fn.scale.grad

    start = built(both)
    first, second = on_threads(2, work)
    assert first is not None and second is not None and not torch.equal(first, second)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (lambda model: model.parameters(), "is the model's"),
        (lambda model: [model], "left_alone is of parameters"),
    ],
)
def test_what_cannot_be_left_alone(given: Any, problem: str) -> None:
    def work(comm: ThreadComm) -> None:
        model = copy.deepcopy(start)
        with using(comm, cluster_of(2)):
            shoal.parallelize(
                model,
                F.cross_entropy,
                sgd(model.parameters()),
                sample=features(7, 3)[0],
                left_alone=given(model),
            )

    start = built(both)
    with pytest.raises(UsageError, match=problem):
        on_threads(2, work)
