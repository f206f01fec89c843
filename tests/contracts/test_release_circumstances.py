"""What a model may have been through when it is released, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from one_process import (
    HERE,
    SMALL,
    Batch,
    adamw,
    built,
    cluster_of,
    difference,
    features,
    mlp,
    numbers,
    on_threads,
    plain,
    rows_of,
    servers_of,
    sgd,
    state,
)
from ordinary import Ordinary
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import RanksDiffer, UsageError
from shoal.front.session_start import using
from shoal.session.session import Session

# layers in several transfers
in_small_parts = partial(shoal.parallelize, search_options=SMALL)
RANKS = 2
BATCHES = features(7, 3, steps=4)
# of layers of `mlp`; rows of tables have a test of their own
WAYS = [way for way in HERE if way not in ("embedding", "server_rows", "row_pair", "column_pair")]


def pins_of(way: str) -> dict[str, str]:
    return {"*": "replicate", "2" if way == "head" else "*": way}


def together_on(
    ranks: int, work: Callable[[Session, nn.Module, list[Batch]], Any], way: str = "replicate"
) -> list[Any]:
    """What `work` returns on each rank, of a small model and its rows of all batches."""
    models = [built(mlp) for _ in range(ranks)]  # threads share random numbers

    def on_rank(comm: ThreadComm) -> Any:
        own = [rows_of(batch, comm.rank, ranks) for batch in BATCHES]
        with using(comm, cluster_of(ranks, servers_of(way, ranks))) as session:
            return work(session, models[comm.rank], own)

    return on_threads(ranks, on_rank, servers_of(way, ranks))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_are_there_are_whole_afterwards(way: str) -> None:
    expected = built(mlp)
    F.cross_entropy(expected(BATCHES[0][0]), BATCHES[0][1]).backward()

    def work(session: Session, model: nn.Module, own: list[Batch]) -> list[Tensor]:
        optimizer = sgd(model.parameters())
        before = Ordinary.of(model, optimizer)
        _, loss_fn, _ = in_small_parts(
            model, F.cross_entropy, optimizer, sample=own[0], pins=pins_of(way)
        )
        loss_fn(model(own[0][0]), own[0][1]).backward()
        shoal.unparallelize(model)
        before.assert_again()
        return [parameter.grad for parameter in model.parameters()]

    for gradients in together_on(RANKS, work, way):
        for gradient, parameter in zip(gradients, expected.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_is_still_held_hinders_nothing(way: str) -> None:
    def work(session: Session, model: nn.Module, own: list[Batch]) -> None:
        optimizer = sgd(model.parameters())
        _, loss_fn, _ = in_small_parts(
            model, F.cross_entropy, optimizer, sample=own[0], pins=pins_of(way)
        )
        held = loss_fn(model(own[0][0]), own[0][1])
        held.backward()
        shoal.unparallelize(model)
        optimizer.zero_grad()
        F.cross_entropy(model(own[0][0]), own[0][1]).backward()
        assert held.requires_grad
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())

    together_on(RANKS, work, way)


@pytest.mark.parametrize("kind", ["function", "module"])
def test_a_loss_that_was_counted_weighs_nothing_and_can_be_given_again(kind: str) -> None:
    def counted(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def work(session: Session, model: nn.Module, own: list[Batch]) -> None:
        loss_fn: Any = counted if kind == "function" else nn.CrossEntropyLoss()
        optimizer = sgd(model.parameters())
        for _ in range(2):
            _, loss_fn, _ = in_small_parts(
                model, loss_fn, optimizer, sample=own[0], count=lambda output, y: len(y)
            )
            plain(model, loss_fn, optimizer, own[:1])
            shoal.unparallelize(model)
            plain(model, loss_fn, optimizer, BATCHES[:1])  # each rank alike, by itself
        if isinstance(loss_fn, nn.Module):
            assert not loss_fn._forward_hooks

    together_on(RANKS, work)


@pytest.mark.parametrize("way", ["replicate", "sliced", "column"])
def test_a_schedule_made_in_between_stays(way: str) -> None:
    def work(session: Session, model: nn.Module, own: list[Batch]) -> None:
        optimizer = SGD(model.parameters(), lr=0.1)
        in_small_parts(model, F.cross_entropy, optimizer, sample=own[0], pins=pins_of(way))
        schedule = ExponentialLR(optimizer, 0.5)
        plain(model, F.cross_entropy, optimizer, own[:1])
        schedule.step()
        shoal.unparallelize(model)
        plain(model, F.cross_entropy, optimizer, own[:1])
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.025
        assert not hasattr(optimizer, "clip_grad_norm_")

    together_on(RANKS, work)


@pytest.mark.parametrize("way", ["sliced", "column", "server"])
def test_one_optimizer_of_two_models_keeps_what_it_does_for_the_other(way: str) -> None:
    def both(models: list[nn.Module], optimizer: Any, batches: list[Batch]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            (sum(F.cross_entropy(model(x), y) for model in models)).backward()
            optimizer.step()

    models = [built(mlp), built(mlp)]
    optimizer = adamw([*models[0].parameters(), *models[1].parameters()])
    both(models, optimizer, BATCHES[:2])
    both(models[1:], optimizer, BATCHES[2:])

    def work(session: Session, model: nn.Module, own: list[Batch]) -> tuple[Any, Any]:
        mine = [model, copy.deepcopy(model)]
        optimizer = adamw([*mine[0].parameters(), *mine[1].parameters()])
        for each in mine:
            in_small_parts(each, F.cross_entropy, optimizer, sample=own[0], pins=pins_of(way))
        both(mine, optimizer, own[:2])
        shoal.unparallelize(mine[0])
        assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in mine[0].parameters())
        optimizer.zero_grad()
        both(mine[1:], optimizer, own[2:])
        return tuple(map(state, mine))

    for got in together_on(RANKS, work, way):
        assert difference(state(models[0]), got[0]) <= 1e-10
        assert difference(state(models[1]), got[1]) <= 1e-10


def test_memory_and_state_lie_as_they_did() -> None:
    def make() -> nn.Module:
        conv = nn.Conv2d(3, 6, 3)
        return nn.Sequential(conv, nn.Flatten(), nn.Linear(24, 3)).to(
            memory_format=torch.channels_last
        )

    models = [built(make) for _ in range(RANKS)]

    def work(comm: ThreadComm) -> None:
        model = models[comm.rank]
        optimizer = sgd(model.parameters())
        before = Ordinary.of(model, optimizer)
        x, y = numbers(2, 3, 4, 4, seed=comm.rank), torch.tensor([0, 1])
        with using(comm, cluster_of(RANKS)):
            pins = {"0": "column", "2": "row"}
            in_small_parts(model, F.cross_entropy, optimizer, sample=(x, y), pins=pins)
            plain(model, F.cross_entropy, optimizer, [(x, y)])
            shoal.unparallelize(model)
        before.assert_again()
        for parameter, held in optimizer.state.items():
            assert held["momentum_buffer"].stride() == parameter.stride()

    on_threads(RANKS, work)


def test_alone_it_takes_the_two_methods_away() -> None:
    model = built(mlp)
    optimizer = sgd(model.parameters())
    before = Ordinary.of(model, optimizer)
    with using(ThreadComm()):
        in_small_parts(model, F.cross_entropy, optimizer)
        assert shoal.plan_of(model) is None
        shoal.unparallelize(model)
        before.assert_again()
        assert shoal.plan_of(model) is None
        with pytest.raises(UsageError, match="is not parallelised"):
            shoal.unparallelize(model)


def test_alone_an_optimizer_of_two_models_keeps_them_for_the_other() -> None:
    models = [built(mlp), built(mlp)]
    optimizer = sgd([*models[0].parameters(), *models[1].parameters()])
    with using(ThreadComm()):
        for each in models:
            in_small_parts(each, F.cross_entropy, optimizer)
        shoal.unparallelize(models[0])
        assert hasattr(optimizer, "accumulate")
        shoal.unparallelize(models[1])
        assert not hasattr(optimizer, "accumulate")


def test_a_model_that_is_not_parallelised_is_refused() -> None:
    def work(session: Session, model: nn.Module, own: list[Batch]) -> None:
        with pytest.raises(UsageError, match=r"is not parallelised[\s\S]*call shoal.parallelize"):
            shoal.unparallelize(model)

    together_on(RANKS, work)


@pytest.mark.parametrize("way", ["replicate", "sliced", "factor"])
def test_accumulated_gradients_are_refused_until_they_are_sent(way: str) -> None:
    def work(session: Session, model: nn.Module, own: list[Batch]) -> None:
        optimizer = sgd(model.parameters())
        in_small_parts(model, F.cross_entropy, optimizer, sample=own[0], pins=pins_of(way))
        with optimizer.accumulate():  # type: ignore[attr-defined]
            F.cross_entropy(model(own[0][0]), own[0][1]).backward()
            with pytest.raises(UsageError, match="have not been sent"):
                shoal.unparallelize(model)
        with pytest.raises(UsageError, match=r"have not been sent[\s\S]*one more backward"):
            shoal.unparallelize(model)
        F.cross_entropy(model(own[1][0]), own[1][1]).backward()
        shoal.unparallelize(model)
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())

    together_on(RANKS, work)


def test_ranks_that_release_different_models_hear_of_it() -> None:
    def work(session: Session, model: nn.Module, own: list[Batch]) -> None:
        models = [model, copy.deepcopy(model)]
        for each in models:
            in_small_parts(each, F.cross_entropy, sgd(each.parameters()), sample=own[0])
        with pytest.raises(RanksDiffer, match="release different models"):
            shoal.unparallelize(models[session.comm.rank])

    together_on(RANKS, work)


def test_a_layer_that_was_taken_out_is_missed() -> None:
    def work(session: Session, model: nn.Module, own: list[Batch]) -> None:
        in_small_parts(model, F.cross_entropy, sgd(model.parameters()), sample=own[0])
        model[2] = nn.Linear(5, 3, dtype=torch.float64)
        with pytest.raises(UsageError, match="layer 2 is not the model's any more"):
            shoal.unparallelize(model)

    together_on(RANKS, work)


def test_a_staleness_is_refused() -> None:
    def work(session: Session, model: nn.Module, own: list[Batch]) -> None:
        optimizer = sgd(model.parameters())
        in_small_parts(model, F.cross_entropy, optimizer, sample=own[0], staleness=1)
        plain(model, F.cross_entropy, optimizer, own)
        with pytest.raises(UsageError, match=r"run ahead[\s\S]*again from it"):
            shoal.unparallelize(model)

    together_on(RANKS, work, "server")
