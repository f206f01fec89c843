"""Pipelines: evaluation, dropout, rounding; what loops do beside training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    built,
    cluster_of,
    on_threads,
    sgd,
)
from piped import PIPELINE, Script, assert_same, loss_of, plain, script
from small_models import WORDS, Gpt, of_words, words
from torch import nn
from torch.utils import _pytree as pytree

import shoal
from shoal.comm.threads import ThreadComm
from shoal.front.session_start import using


def piped(model: nn.Module, ranks: int, loop: Any) -> list[Any]:
    """What a loop returns on each rank."""
    copies, (x, y) = [copy.deepcopy(model) for _ in range(ranks)], words(12)[0]

    def work(comm: ThreadComm) -> Any:
        own = copies[comm.rank]
        with using(comm, cluster_of(ranks)):
            own, loss_fn, optimizer = shoal.parallelize(
                own,
                of_words,
                sgd(own.parameters()),
                sample=(x[comm.rank : comm.rank + 2], y[comm.rank : comm.rank + 2]),
                pins=PIPELINE,
            )
            return loop(comm.rank, own, loss_fn, optimizer)

    return on_threads(ranks, work)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_evaluation_with_a_rank_without_rows(ranks: int) -> None:
    model, (x, y) = built(Gpt), words()[0]

    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> Any:
        model.eval()
        with torch.no_grad():
            own = slice(0, 0) if rank == 1 else slice(3 * rank, 3 * rank + 3)
            output = model(x[own])
            assert output.shape == (3 * (rank != 1), 6, WORDS)
            right = (output.argmax(-1) == y[own]).sum()
            best = output.topk(2).indices
            loss = loss_fn(output, y[own])
            seen = output + 0
        model.train()
        return own, right, best, loss, seen

    alone = copy.deepcopy(model).eval()
    for own, right, best, loss, seen in piped(model, ranks, loop):
        with torch.no_grad():
            expected = alone(x[own])
            torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)
            assert right == (expected.argmax(-1) == y[own]).sum()
            assert torch.equal(best, expected.topk(2).indices)
            torch.testing.assert_close(loss, of_words(expected, y[own]), equal_nan=True)


@pytest.mark.parametrize("kind", ["gpt", pytest.param("own loss", marks=pytest.mark.slow)])
def test_training_with_a_rank_without_rows(kind: str) -> None:
    """In a step in which one rank has no row left, its loss is a mean of nothing."""

    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
        own = slice(0, 0) if shoal.world().size > 1 and shoal.world().rank == 1 else slice(None)
        if shoal.world().size == 1:
            own = torch.tensor([True] * 4 + [False] * 4 + [True] * 4)
        plain(model, loss_fn, optimizer, batches[:2])
        plain(
            model,
            loss_fn,
            optimizer,
            [pytree.tree_map(lambda t: t if t is None else t[own], batches[2])],
        )
        plain(model, loss_fn, optimizer, batches[3:])

    assert_same(script(kind, loop=loop, uneven=False), 3)


def test_dropout_trains() -> None:
    x, y = words()[0]

    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> Any:
        own = slice(6 * rank, 6 * rank + 6)

        def evaluated() -> float:
            model.eval()
            with torch.no_grad():
                loss = float(loss_fn(model(x[own]), y[own]))
            model.train()
            return loss

        before = evaluated()
        plain(model, loss_fn, optimizer, [(x[own], y[own])] * 20)
        return before, evaluated()

    for before, after in piped(built(lambda: Gpt(dropout=0.3)), 2, loop):
        assert after < 0.95 * before


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler(enabled: bool) -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=enabled)
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, loss_fn, batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

    assert_same(script("gpt", loop=loop), 3)


@pytest.mark.slow
def test_autocast_is_as_near_as_bfloat16_is() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()

    tried = Script(model=built(Gpt, torch.float32), batches=words(), loss_fn=of_words, loop=loop)
    assert_same(tried, 3, within=0.02)


@pytest.mark.parametrize("kind", ["own loss", pytest.param("gpt", marks=pytest.mark.slow)])
def test_losses_under_no_grad_and_inference(kind: str) -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> list[float]:
        losses = []
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                losses.append(loss_of(model, loss_fn, batches[0]).item())
        plain(model, loss_fn, optimizer, batches)
        with torch.inference_mode():
            losses.append(loss_of(model, loss_fn, batches[0]).item())
        plain(model, loss_fn, optimizer, batches[:1])
        return losses

    got = assert_same(script(kind, loop=loop), 2)
    assert got[0][0][0] == got[0][0][1]


def test_rows_of_other_lengths_from_step_to_step() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
        cut = [(x[:, :n], y[:, :n]) for n, (x, y) in zip((6, 3, 5, 3, 6), batches, strict=True)]
        plain(model, loss_fn, optimizer, cut)

    assert_same(script("gpt", loop=loop), 3)


def test_hooks_run_where_the_layer_is() -> None:
    """Each hook once a micro-batch, on one rank."""
    calls = []

    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> Any:
        x, y = (each[rank : rank + 2] for each in words()[0])
        for name, module in model.named_modules():
            if name.endswith("mlp.0"):
                module.register_forward_hook(lambda m, i, o, name=name: calls.append((rank, name)))
        plain(model, loss_fn, optimizer, [(x, y)])

    piped(built(Gpt), 2, loop)
    names = {name for _, name in calls}
    assert len(names) == 3
    for name in names:
        ranks = {rank for rank, called in calls if called == name}
        assert len(ranks) == 1
        assert sum(called == name for _, called in calls) == 2
