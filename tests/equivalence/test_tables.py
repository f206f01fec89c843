"""Tables whose rows are at servers: the same as one process, what is held, what is refused."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    adamw,
    built,
    cluster_of,
    difference,
    plain,
    rows_of,
    sgd,
    state,
)
from torch import nn
from torch.nn import functional as F
from with_tables import PINS, ROWS, WIDTH, Twice, Words, assert_same, batches, together

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer, UsageError
from shoal.front.session_start import using
from shoal.servers.servers import serve


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_workers_and_servers_get_what_one_process_gets(
    workers: int, servers: int, optimizer: Any
) -> None:
    assert_same(built(Words), workers=workers, servers=servers, optimizer=optimizer)


def test_a_fused_optimizer_meets_no_parameter_without_state_beside_others() -> None:
    assert_same(
        built(Words), optimizer=lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9, fused=True)
    )


def test_uneven_rows_are_weighted() -> None:
    assert_same(built(Words), uneven=True)


def test_a_weight_that_a_loss_multiplies_with_rows_is_weighed_by_them() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        for x, y in its:
            optimizer.zero_grad()
            products = x.double() @ model.table.weight[: x.shape[1]]
            (loss_fn(model(x), y) + 1e-3 * products.square().mean()).backward()
            optimizer.step()

    assert_same(built(Words), loop, uneven=True)


@pytest.mark.parametrize("make", [Twice, lambda: Words(padding=0)], ids=["called twice", "padding"])
def test_a_table_is_used_otherwise(make: Callable[[], nn.Module]) -> None:
    assert_same(built(make), optimizer=adamw)


def test_one_optimizer_has_two_models() -> None:
    def both(models: Any, optimizer: Any, loss_fn: Any, its: list[Batch]) -> None:
        for x, y in its:
            optimizer.zero_grad()
            for model in models:
                loss_fn(model(x), y).backward()
            optimizer.step()

    made = [built(Words), built(Twice)]
    expected = copy.deepcopy(made)
    both(
        expected,
        adamw([p for model in expected for p in model.parameters()]),
        F.cross_entropy,
        batches(),
    )
    cluster = cluster_of(2, 1)

    def work(comm: ThreadComm) -> Any:
        if comm.rank == 2:
            return serve(comm)
        mine, own = copy.deepcopy(made), [rows_of(batch, comm.rank, 2) for batch in batches()]
        with using(comm, cluster):
            optimizer = adamw([p for model in mine for p in model.parameters()])
            for model in mine:
                shoal.parallelize(model, F.cross_entropy, optimizer, sample=own[0], pins=PINS)
            both(mine, optimizer, F.cross_entropy, own)
            return [state(model) for model in mine]

    got, *_ = run(3, work, timeout_s=20, hosts=("a", "b", "c"), servers=1)
    for one, other in zip(expected, got, strict=True):
        assert difference(state(one), other) <= 1e-10


def test_workers_hold_nothing_of_a_table() -> None:
    def held(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> tuple[int, int]:
        plain(model, loss_fn, optimizer, its)
        memory = shoal.memory(model)
        return memory.parameters, memory.optimizer_state

    head = (WIDTH * 3 + 3) * 8
    _, returned, _ = together(built(Words), held, optimizer=adamw)
    assert returned == [(head, 2 * head + 2 * 4)] * 3


def test_state_is_in_one_process_form() -> None:
    def saved(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> Any:
        plain(model, loss_fn, optimizer, its)
        return optimizer.state_dict()["state"]

    alone = built(Words)
    optimizer = adamw(alone.parameters())
    expected = saved(alone, F.cross_entropy, optimizer, batches())
    for got in together(built(Words), saved, optimizer=adamw)[1]:
        assert got.keys() == expected.keys()
        for index, state_of in expected.items():
            for name, value in state_of.items():
                torch.testing.assert_close(got[index][name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("bound", [1, 3, None])
def test_workers_run_ahead_of_one_another(bound: int | None) -> None:
    def many(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> list[float]:
        losses = []
        for step in range(30):
            x, y = its[step % len(its)]
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            time.sleep(0.02 if shoal.world().rank == 2 else 0.0)  # slow for good
            optimizer.step()
            losses.append(loss.item())
        return losses

    learnable = [(x, x[:, 0] % 3) for x, _ in batches()]
    _, losses, observed = together(
        built(Words), many, given=learnable, pins={"table": "server_rows"}, staleness=bound
    )
    for each in losses:
        assert sum(each[-5:]) < 0.95 * sum(each[:5])
    for histograms in observed:
        reached = [max(histogram) for histogram in histograms]
        assert max(reached) == bound if bound else max(reached) > 3, (
            "nobody ran ahead, so nothing was held"
        )
        # one server has few of the ids
        assert all(sum(histogram.values()) >= 45 for histogram in histograms)


def test_what_needs_one_gradient_is_refused_where_workers_run_ahead() -> None:
    def clips(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        loss_fn(model(its[0][0]), its[0][1]).backward()
        with pytest.raises(UsageError, match="no one gradient"):
            _ = model.table.weight.grad
        optimizer.step()

    together(built(Words), clips, pins={"table": "server_rows"}, staleness=2)


def test_ranks_that_want_different_things_hear_of_it() -> None:
    def apart(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        loss_fn(model(its[0][0]), its[0][1]).backward()
        if shoal.world().rank == 1:
            with torch.no_grad():
                model.table.weight.mul_(2)
        else:
            _ = model.table.weight.grad

    with pytest.raises(RanksDiffer, match=r"another thing of table table\.weight"):
        together(built(Words), apart)


def test_a_rank_that_looks_at_gradients_alone_hears_of_it() -> None:
    def alone(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        for x, y in its:
            loss_fn(model(x), y).backward()
            if shoal.world().rank == 0:
                _ = model.table.weight.grad
            optimizer.step()

    with pytest.raises(
        RanksDiffer, match=r"rank 0 asks for 'read gradients' .* rank \d went on without"
    ):
        together(built(Words), alone)


def test_a_change_in_place_is_refused_where_gradients_are_on() -> None:
    def changes(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            model.table.weight.mul_(2)

    together(built(Words), changes)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    def early(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        loss_fn(model(its[0][0]), its[0][1]).backward()
        if shoal.world().rank != 1:
            _ = model.table.weight.grad

    with pytest.raises(RanksDiffer, match="rank 1 has ended, but rank"):
        together(built(Words), early)


def test_an_id_that_is_no_row_is_refused() -> None:
    def outside(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        with torch.no_grad(), pytest.raises(IndexError, match="not one of the table's 23 rows"):
            model(torch.full((2, 2), ROWS))

    together(built(Words), outside)
