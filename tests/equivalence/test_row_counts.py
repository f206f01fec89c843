"""Losses that count terms of their own, such as tokens: ranks weigh by them as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import (
    AMONG_WORKERS,
    CUTS,
    DEVICE,
    UNEVEN,
    Training,
    assert_same,
    built,
    call,
    features,
    integers,
    mlp,
)
from torch import Tensor, nn
from torch.nn import functional as F


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
        targets = integers(4, 12, 5, seed=step).masked_fill(
            integers(3, 12, 5, seed=step + 20) == 0, -100
        )
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
    assert_same(
        Training(model=built(Tagger), batches=tokens(), loss_fn=loss_fn, count=counted),
        3,
        way,
        uneven=uneven,
    )


@pytest.mark.parametrize("loss_fn", [token_loss, TokenLoss()], ids=["function", "module"])
def test_token_loss_counts_its_targets_itself(loss_fn):
    assert_same(Training(model=built(Tagger), batches=tokens(), loss_fn=loss_fn), uneven=True)


WEIGHTS = torch.tensor([1.0, 10.0, 0.5, 3.0], dtype=torch.float64, device=DEVICE)


def weighted_token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), WEIGHTS, label_smoothing=0.1)


@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS, "head"])
@pytest.mark.parametrize("uneven", [True])
def test_class_weights_count_themselves(way, uneven):
    training = Training(model=built(Tagger), batches=tokens(), loss_fn=weighted_token_loss)
    assert_same(training, 3, way, uneven=uneven)


def test_class_weights_that_change_in_training_and_probabilities():
    """The module's weights are read anew; of probabilities torch's loss is a mean over rows."""

    def loop(model, loss_fn, optimizer, batches):
        for number, (x, y) in enumerate(batches):
            loss_fn.weight = WEIGHTS.roll(number)
            optimizer.zero_grad()
            loss_fn(model(x).transpose(1, 2), y).backward()
            optimizer.step()

    loss_fn = nn.CrossEntropyLoss(WEIGHTS)
    rows = [(x, y.clamp(min=0)) for x, y in tokens()]

    class Turned(Tagger):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).transpose(1, 2)

    def turned(model, loss_fn, optimizer, batches):
        loop(lambda x: model(x).transpose(1, 2), loss_fn, optimizer, batches)

    training = Training(model=built(Turned), batches=rows, loss_fn=loss_fn, loop=turned)
    assert_same(training, 3, uneven=True)
    near = [(x, F.one_hot(y, 4).double().transpose(1, 2) * 0.8 + 0.05) for x, y in rows]
    training = Training(model=built(Turned), batches=near, loss_fn=nn.CrossEntropyLoss(WEIGHTS))
    assert_same(training, 3, uneven=True)


class OwnTokenLoss(Tagger):
    def __init__(self, loss_fn: Any) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss_fn(super().forward(ids)[:, :-1], labels[:, 1:])


@pytest.mark.parametrize("loss_fn", [token_loss, weighted_token_loss])
def test_a_models_own_loss_counts_the_labels_of_its_input(loss_fn):
    """The first label of each row, which is shifted away, counts on no rank."""

    def loop(model, loss_fn, optimizer, batches):
        for x, _ in batches:
            optimizer.zero_grad()
            call(model, x).backward()
            optimizer.step()

    batches = [(batch, None) for batch in tokens()]
    model = built(lambda: OwnTokenLoss(loss_fn))
    training = Training(model=model, batches=batches, loss_fn=None, loop=loop)
    assert_same(training, 3, uneven=True)


@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_a_rank_all_of_whose_targets_are_ignored(way):
    batches = tokens(nothing_in_rows=slice(0, 4))  # all that rank 0 of 3 has
    assert_same(
        Training(model=built(Tagger), batches=batches, loss_fn=token_loss, count=counted), 3, way
    )


@pytest.mark.parametrize("loss", ["token", "smooth"])
@pytest.mark.parametrize("count", [None, counted])
def test_a_rank_all_of_whose_targets_are_ignored_by_a_head(count, loss):
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        smooth = 0.1 if loss == "smooth" else 0.0
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=smooth)

    batches = tokens(nothing_in_rows=slice(0, 4))
    training = Training(model=built(Tagger), batches=batches, loss_fn=loss_fn, count=count)
    assert_same(training, 3, "head")


@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_accumulated_batches_each_of_other_counts(way):
    def loop(model, loss_fn, optimizer, batches):
        optimizer.zero_grad()
        for x, y in batches:
            (loss_fn(model(x), y) / len(batches)).backward()
        optimizer.step()

    assert_same(
        Training(
            model=built(Tagger), batches=tokens(), loss_fn=token_loss, count=counted, loop=loop
        ),
        3,
        way,
        uneven=True,
    )


@pytest.mark.parametrize("loss_fn", [token_loss, TokenLoss()], ids=["function", "module"])
def test_a_loss_called_by_names_is_counted_as_it_is(loss_fn):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            loss = loss_fn(target=y, output=model(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    training = Training(
        model=built(Tagger), batches=tokens(), loss_fn=loss_fn, count=counted, loop=loop
    )
    assert_same(training, 3, AMONG_WORKERS[0], uneven=True)


@pytest.mark.parametrize("rows", ["some", "of one rank none", "none"])
@pytest.mark.parametrize("way", [way for way in AMONG_WORKERS if way != "factor"])
def test_a_penalty_beside_few_rows_or_none(way, rows):
    """What does not come of rows is the mean over ranks, also where the counts of a step are other
    than usual, or 0.
    """

    def of_terms(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, ignore_index=-100, reduction="sum") / counted(
            output, target
        ).clamp(min=1)

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            loss = loss_fn(model(x), y) + 0.1 * sum(p.abs().sum() for p in model.parameters())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    ignored = [integers(3, 12, seed=step) == 0 for step in range(5)]
    if rows != "some":
        ignored[2][: 4 if rows == "of one rank none" else 12] = True
    batches = [
        (x, y.masked_fill(its, -100)) for (x, y), its in zip(features(7, 3), ignored, strict=True)
    ]
    assert_same(
        Training(model=built(mlp), batches=batches, loop=loop, loss_fn=of_terms, count=counted),
        3,
        way,
    )


@pytest.mark.parametrize("way", AMONG_WORKERS)
def test_what_is_added_to_a_counted_loss_is_not_weighed_by_it(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            output = model(x)
            loss = loss_fn(output, y) + 0.1 * output.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert_same(
        Training(
            model=built(Tagger), batches=tokens(), loss_fn=token_loss, count=counted, loop=loop
        ),
        3,
        way,
    )
