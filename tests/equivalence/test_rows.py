"""Ranks with different numbers of rows weigh exactly as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import (
    AMONG_WORKERS,
    CUTS,
    UNEVEN,
    Training,
    adamw,
    assert_same,
    assert_same_bits,
    built,
    features,
    integers,
    mlp,
    numbers,
    plain,
    rows_of,
)
from torch import Tensor, nn

import shoal
from shoal.core.errors import UsageError
from shoal.engine.counts import RowCounts
from shoal.strategies.landing import divide, num_shares, weigh


@pytest.mark.parametrize("optimizer", [None, adamw])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_uneven_rows(way, ranks, optimizer):
    chosen = {"optimizer": optimizer} if optimizer else {}
    assert_same(
        Training(model=built(mlp), batches=features(7, 3), **chosen), ranks, way, uneven=True
    )


@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_a_last_batch_of_other_size(way):
    batches = [*features(7, 3), (numbers(7, 7, seed=50), integers(3, 7, seed=50))]
    assert_same(Training(model=built(mlp), batches=batches), 4, way)


class Holder:
    """A batch as an object of a class that nobody has told PyTorch of."""

    def __init__(self, rows: Tensor) -> None:
        self.parts = {"rows": rows}


class OfHolders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, batch: Any) -> Tensor:
        return self.layers(batch.parts["rows"] if isinstance(batch, Holder) else batch)


@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_rows_within_objects_are_counted(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            loss = loss_fn(model(Holder(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert_same(
        Training(model=built(OfHolders), batches=features(7, 3), loop=loop), 3, way, uneven=True
    )


@UNEVEN
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_two_calls_of_other_rows_meet_in_one_backward(way, uneven):
    def loop(model, loss_fn, optimizer, batches):
        for (x, y), (other, its) in zip(batches, reversed(batches), strict=True):
            loss = loss_fn(model(x), y) + loss_fn(
                model(other[: len(other) // 2]), its[: len(its) // 2]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    batches = features(7, 3, rows=24)  # of which every rank has an even number
    training = Training(model=built(mlp), batches=batches, loop=loop)
    halves = (
        [half_of_each_rank(x, 3, uneven) for x, _ in batches],
        [half_of_each_rank(y, 3, uneven) for _, y in batches],
    )
    alone = Training(
        model=built(mlp), batches=list(zip(*halves, strict=True)), loop=second_beside(batches)
    )
    assert_same(training, 3, way, uneven=uneven, expected=alone.alone())


def half_of_each_rank(whole: Tensor, ranks: int, uneven: bool) -> Tensor:
    """The first half of every rank's rows."""
    mine = [rows_of(whole, rank, ranks, uneven) for rank in range(ranks)]
    return torch.cat([rows[: len(rows) // 2] for rows in mine])


def second_beside(batches):
    """A loop over halves of batches, the last first, each beside a whole batch."""

    def loop(model, loss_fn, optimizer, halves):
        for (x, y), (other, its) in zip(batches, reversed(halves), strict=True):
            loss = loss_fn(model(x), y) + loss_fn(model(other), its)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return loop


@pytest.mark.parametrize("way", AMONG_WORKERS)
def test_an_earlier_call_joins_in_a_later_backward(way):
    """Of another share of the rows on every rank."""

    def loop(model, loss_fn, optimizer, batches):
        earlier = None
        for x, y in batches:
            mine = loss_fn(model(x), y)
            # a backward of its own; then once more, with the one before
            mine.backward(retain_graph=True)
            optimizer.zero_grad()
            later = loss_fn(model(x.flip(1)), y)
            (later if earlier is None else later + 0.5 * earlier).backward(retain_graph=True)
            earlier = mine
        optimizer.step()

    batches = [*features(7, 3, steps=1, rows=9), *features(7, 3, steps=1, rows=23)]
    shares = [[len(rows_of(x, rank, 3, True)) / len(x) for rank in range(3)] for x, _ in batches]
    assert shares[0] != shares[1]
    assert_same(Training(model=built(mlp), batches=batches, loop=loop), 3, way, uneven=True)


def test_rows_in_an_earlier_call_alone_are_refused():
    def loop(model, loss_fn, optimizer, batches):
        (x, y), (other, its), *_ = batches
        earlier = loss_fn(model(x), y)
        earlier.backward(retain_graph=True)
        none = shoal.world().rank == 0
        later = loss_fn(model(other[:0] if none else other), its[:0] if none else its)
        (earlier + later).backward()

    with pytest.raises(UsageError, match="no rows in the later call"):
        Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2)


@pytest.mark.parametrize("way", AMONG_WORKERS)
def test_only_the_first_forward_exchanges_counts(way, monkeypatch):
    asked = []

    def noted(self, call, told, ask=RowCounts.ask):
        asked.append(call)
        return ask(self, call, told)

    monkeypatch.setattr(RowCounts, "ask", noted)
    Training(model=built(mlp), batches=features(7, 3)).on_ranks(2, way, uneven=True)
    assert len(asked) == 2, "one a rank"


@pytest.mark.parametrize("way", ["sliced", "server"])
@pytest.mark.parametrize("placement", ["balanced", "round-robin", {"2": 0}], ids=str)
def test_uneven_rows_where_a_rank_owns_nothing_of_a_bucket(way, placement):
    training = Training(model=built(mlp), batches=features(7, 3), placement=placement)
    for ranks in (2, 4):
        assert_same(training, ranks, f"{way}, small", uneven=True)


@pytest.mark.parametrize("way", [way for way in AMONG_WORKERS if way != "factor"])
@pytest.mark.parametrize("only", [0, 1])
def test_a_rank_without_rows_whose_loss_does_not_come_of_the_model(way, only):
    """One rank has all the rows, and the other a loss that has a gradient of 0, so that its
    backward does something.
    """

    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            world = shoal.world()
            none = step == 2 and world.size > 1 and world.rank != only
            output = model(x[:0] if none else x)
            loss = sum(0.0 * p.sum() for p in model.parameters()) if none else loss_fn(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    batches = features(7, 3)
    training = Training(model=built(mlp), batches=batches, loop=loop)
    whole = [rows_of(batch, only, 2) if step == 2 else batch for step, batch in enumerate(batches)]
    assert_same(
        training, 2, way, expected=Training(model=built(mlp), batches=whole, loop=loop).alone()
    )


class OneOfTwo(nn.Module):
    """Layers of which a rank uses the first or the second, by its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.first if x[0, 0] > 0 else self.second)(x))


@pytest.mark.parametrize("way", ["replicate", "sliced"])
def test_a_penalty_on_a_layer_that_this_rank_does_not_use(way):
    """Its gradient is there before any comes by way of the model."""

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            x[:, 0] = 1.0 if shoal.world().rank == 0 else -1.0
            loss = loss_fn(model(x), y) + 0.1 * sum(p.abs().sum() for p in model.parameters())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    states = Training(model=built(OneOfTwo), batches=features(7, 3), loop=loop).on_ranks(
        2, f"{way}, small", uneven=True
    )
    assert_same_bits(states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shares", [(1, 1, 1), (0.004, 0, 0), (0.5, 0.5, 0.5), (0, 0, 0), (1, 0.25, 64)], ids=str
)
def test_sums_are_divided_by_the_mean_of_the_shares_in_any_type(shares, dtype):
    total, going = torch.zeros(2, dtype=dtype), torch.zeros(num_shares(dtype.itemsize), dtype=dtype)
    for share in shares:
        mine, its = torch.tensor([3.0, 3.0], dtype=dtype), torch.empty(len(going), dtype=dtype)
        weigh([mine], its, share, len(shares))
        total, going = total + mine, going + its
    divide([total], going, len(shares))
    assert total.tolist() == pytest.approx(
        [9.0, 9.0], rel=2e-2 if dtype == torch.bfloat16 else 1e-6
    )


@pytest.mark.parametrize("ranks", [16, 64, 256])
def test_a_mean_of_many_ranks_shares_is_not_rounded(ranks):
    """By bfloat16, in which 1 % is lost of a sum of 16 shares: all ranks have 29 of 32 rows, so
    nothing changes.
    """
    going = torch.zeros(num_shares(2), dtype=torch.bfloat16)
    for _ in range(ranks):
        its = torch.empty_like(going)
        weigh([], its, 29 / 32, ranks)
        going += its
    total = torch.tensor([29.0], dtype=torch.bfloat16)
    divide([total], going, ranks)
    assert total.tolist() == [32.0]


def test_more_ranks_than_a_type_can_count_are_refused():
    going = torch.ones(num_shares(2), dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="256 ranks at most"):
        divide([], going, 257)
    # where it is not looked at afterwards
    with pytest.raises(UsageError, match="256 ranks at most"):
        weigh([], going.to("meta"), 29 / 32, 257)
    divide([], torch.zeros_like(going), 257)  # where all have as many rows nothing is counted


class Stopping(nn.Module):
    """A model whose forward somebody breaks off."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.stop = mlp(), False

    def forward(self, x: Tensor) -> Tensor:
        if self.stop:
            raise KeyboardInterrupt
        return self.net(x)


@pytest.mark.parametrize("way", ["replicate", "sliced"])
def test_rows_are_weighed_after_a_forward_that_was_broken_off(way):
    """As by a notebook's stop button, for which torch calls no hooks behind forward."""

    def loop(model, loss_fn, optimizer, batches):
        model.stop = True
        with pytest.raises(KeyboardInterrupt):
            model(batches[0][0])
        model.stop = False
        plain(model, loss_fn, optimizer, batches)

    assert_same(
        Training(model=built(Stopping), batches=features(7, 3), loop=loop), 2, way, uneven=True
    )
