"""Ranks with different numbers of rows, or of terms in the loss, weigh exactly as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import (
    AMONG_WORKERS,
    CUTS,
    Training,
    adamw,
    assert_same,
    built,
    features,
    integers,
    numbers,
    rows_of,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import UsageError
from shoal.runtime.weights import Weigher

UNEVEN = pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("optimizer", [None, adamw])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_uneven_rows(way, ranks, optimizer):
    chosen = {"optimizer": optimizer} if optimizer else {}
    assert_same(Training(model=built(mlp), batches=features(7, 3), **chosen), ranks, way, uneven=True)


@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_a_last_batch_of_other_size(way):
    batches = [*features(7, 3), (numbers(7, 7, seed=50), integers(3, 7, seed=50))]
    assert_same(Training(model=built(mlp), batches=batches), 4, way)


class Tagger(nn.Module):
    """Tokens to a class for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def tokens(*, nothing_in_rows: slice = slice(0)) -> list[tuple[Tensor, Tensor]]:
    """Ids and token classes; a third of the targets, and all of `nothing_in_rows`, are ignored."""
    batches = []
    for step in range(5):
        targets = integers(4, 12, 5, seed=step).masked_fill(integers(3, 12, 5, seed=step + 20) == 0, -100)
        targets[nothing_in_rows] = -100
        batches.append((integers(11, 12, 5, seed=step + 40), targets))
    return batches


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


class TokenLoss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return token_loss(output, target)


def counted(output: Any, target: Tensor) -> Tensor:
    return (target != -100).sum()


@UNEVEN
@pytest.mark.parametrize("loss_fn", [token_loss, TokenLoss()], ids=["function", "module"])
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_token_loss_with_ignore_index(way, loss_fn, uneven):
    assert_same(Training(model=built(Tagger), batches=tokens(), loss_fn=loss_fn, count=counted), 3, way, uneven=uneven)


def test_token_loss_without_its_count_is_another_mean():
    with pytest.raises(AssertionError, match="1e-10"):
        assert_same(Training(model=built(Tagger), batches=tokens(), loss_fn=token_loss))


@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_a_rank_all_of_whose_targets_are_ignored(way):
    batches = tokens(nothing_in_rows=slice(0, 4))  # all that rank 0 of 3 has
    assert_same(Training(model=built(Tagger), batches=batches, loss_fn=token_loss, count=counted), 3, way)


@pytest.mark.parametrize("loss", ["token", "smooth"])
@pytest.mark.parametrize("count", [None, counted])
def test_a_rank_all_of_whose_targets_are_ignored_by_a_head(count, loss):
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        smooth = 0.1 if loss == "smooth" else 0.0
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=smooth)

    batches = tokens(nothing_in_rows=slice(0, 4))
    training = Training(model=built(Tagger), batches=batches, loss_fn=loss_fn, count=count)
    if count is not None:
        assert_same(training, 3, "head")
    else:  # its loss is 0 ÷ 0, its gradients are zero, as torch has them
        states = training.on_ranks(3, "head")
        assert all(value.isfinite().all() for its in states for value in its.values())


@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_accumulated_batches_each_of_other_counts(way):
    def loop(model, loss_fn, optimizer, batches):
        optimizer.zero_grad()
        for x, y in batches:
            (loss_fn(model(x), y) / len(batches)).backward()
        optimizer.step()

    assert_same(
        Training(model=built(Tagger), batches=tokens(), loss_fn=token_loss, count=counted, loop=loop),
        3,
        way,
        uneven=True,
    )


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

    assert_same(Training(model=built(OfHolders), batches=features(7, 3), loop=loop), 3, way, uneven=True)


@pytest.mark.parametrize("loss_fn", [token_loss, TokenLoss()], ids=["function", "module"])
def test_a_loss_called_by_names_is_counted_as_it_is(loss_fn):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            loss = loss_fn(target=y, output=model(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    training = Training(model=built(Tagger), batches=tokens(), loss_fn=loss_fn, count=counted, loop=loop)
    assert_same(training, 3, AMONG_WORKERS[0], uneven=True)


@UNEVEN
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_two_calls_of_other_rows_meet_in_one_backward(way, uneven):
    def loop(model, loss_fn, optimizer, batches):
        for (x, y), (other, its) in zip(batches, reversed(batches), strict=True):
            loss = loss_fn(model(x), y) + loss_fn(model(other[: len(other) // 2]), its[: len(its) // 2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    batches = features(7, 3, rows=24)  # of which every rank has an even number
    training = Training(model=built(mlp), batches=batches, loop=loop)
    halves = (
        [half_of_each_rank(x, 3, uneven) for x, _ in batches],
        [half_of_each_rank(y, 3, uneven) for _, y in batches],
    )
    alone = Training(model=built(mlp), batches=list(zip(*halves, strict=True)), loop=second_beside(batches))
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


@UNEVEN
@pytest.mark.parametrize("way", AMONG_WORKERS)
def test_an_earlier_call_joins_in_a_later_backward(way, uneven):
    def loop(model, loss_fn, optimizer, batches):
        earlier = None
        for x, y in batches:
            loss = kept = loss_fn(model(x), y)
            loss.backward(retain_graph=True)
            optimizer.zero_grad()
            if earlier is not None:  # whose graph has older parameters: they only must not change in place
                loss = loss + 0.5 * earlier
            loss.backward(retain_graph=True)
            earlier = kept
        optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way, uneven=uneven)


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


@pytest.mark.parametrize("rows", ["some", "of one rank none", "none"])
@pytest.mark.parametrize("way", [way for way in AMONG_WORKERS if way != "factor"])
def test_a_penalty_beside_few_rows_or_none(way, rows):
    """What does not come of rows is the mean over ranks, also where the counts of a step are other than usual, or 0."""

    def of_terms(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, ignore_index=-100, reduction="sum") / counted(output, target).clamp(
            min=1
        )

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            loss = loss_fn(model(x), y) + 0.1 * sum(p.abs().sum() for p in model.parameters())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    ignored = [integers(3, 12, seed=step) == 0 for step in range(5)]
    if rows != "some":
        ignored[2][: 4 if rows == "of one rank none" else 12] = True
    batches = [(x, y.masked_fill(its, -100)) for (x, y), its in zip(features(7, 3), ignored, strict=True)]
    assert_same(Training(model=built(mlp), batches=batches, loop=loop, loss_fn=of_terms, count=counted), 3, way)


@pytest.mark.parametrize("way", AMONG_WORKERS)
def test_only_the_first_forward_exchanges_counts(way, monkeypatch):
    asked = []

    def noted(self, mine, ask=Weigher._ask):
        asked.append(mine)
        return ask(self, mine)

    monkeypatch.setattr(Weigher, "_ask", noted)
    Training(model=built(mlp), batches=features(7, 3)).on_ranks(2, way, uneven=True)
    assert len(asked) == 2, "one a rank"
