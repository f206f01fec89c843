"""Terms of a loss that reach parameters by no output of the model, and losses that are sums."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from one_process import (
    AMONG_WORKERS,
    CUTS,
    UNEVEN,
    Training,
    assert_same,
    built,
    features,
)
from random_terms import judged
from test_row_counts import Tagger, counted, token_loss, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import SampleError, UsageError

WAY = pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])


class Keeping(nn.Module):
    """Keeps a balance loss, as a mixture of experts does, and what a list of heads gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.aside = nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(5, 2)
        self.heads: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.balance = hidden.square().mean()
        self.heads[:] = [self.aside(hidden)]
        return self.second(hidden)


def beside(model: Keeping) -> Tensor:
    """The terms that come by attributes."""
    return model.balance + model.heads[0].square().mean()


def several(model, loss_fn, optimizer, batches, once):
    """Every third batch sends for all three."""
    quiet = getattr(optimizer, "accumulate", nullcontext)
    for number, (x, y) in enumerate(batches, start=1):
        with nullcontext() if number % 3 == 0 else quiet():
            once(model, loss_fn, x, y).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


@WAY
@pytest.mark.parametrize("accumulate", [False, True])
def test_terms_that_modules_keep(way, accumulate):
    def once(model, loss_fn, x, y):
        return loss_fn(model(x), y) + beside(model)

    def loop(model, loss_fn, optimizer, batches):
        if accumulate:
            several(model, loss_fn, optimizer, batches, once)
            return
        for x, y in batches:
            optimizer.zero_grad()
            once(model, loss_fn, x, y).backward()
            optimizer.step()

    training = Training(model=built(Keeping), batches=features(7, 3, steps=6), loop=loop)
    assert_same(training, 3, way, uneven=True)


@WAY
def test_terms_that_modules_keep_in_two_calls_of_other_rows(way):
    """Of the second call every rank takes the half of its rows, some of them rounded."""

    def loop(model, loss_fn, optimizer, batches):
        for (x, y), (other, its) in zip(batches, reversed(batches), strict=True):
            loss = loss_fn(model(x), y) + beside(model)
            loss = loss + loss_fn(model(other), its) + beside(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    batches = [*features(7, 3, steps=2, rows=9), *features(7, 3, steps=2, rows=23)]
    assert_same(Training(model=built(Keeping), batches=batches, loop=loop), 3, way, uneven=True)


@WAY
def test_what_a_hook_takes(way):
    def once(model, loss_fn, x, y):
        taken: list[Tensor] = []
        hook = model.first.register_forward_hook(lambda module, args, out: taken.append(out))
        loss = loss_fn(model(x), y)
        hook.remove()
        return loss + taken[0].abs().mean()

    def loop(model, loss_fn, optimizer, batches):
        several(model, loss_fn, optimizer, batches, once)

    training = Training(model=built(Keeping), batches=features(7, 3, steps=6), loop=loop)
    assert_same(training, 3, way, uneven=True)


def test_a_hook_in_two_calls_of_other_rows_is_refused():
    def loop(model, loss_fn, optimizer, batches):
        (x, y), (other, its) = batches
        taken: list[Tensor] = []
        model.first.register_forward_hook(lambda module, args, out: taken.append(out))
        loss = loss_fn(model(x), y) + loss_fn(model(other), its)
        (loss + taken[0].mean() + taken[1].mean()).backward()

    batches = [*features(7, 3, steps=1, rows=9), *features(7, 3, steps=1, rows=23)]
    with pytest.raises(UsageError, match="call backward once for each call"):
        Training(model=built(Keeping), batches=batches, loop=loop).on_ranks(3, uneven=True)


@WAY
def test_terms_beside_in_a_backward_of_their_own(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward(retain_graph=True)
            beside(model).backward()
            optimizer.step()

    training = Training(model=built(Keeping), batches=features(7, 3), loop=loop)
    assert_same(training, 3, way, uneven=True)


@WAY
@UNEVEN
@pytest.mark.parametrize("kind", ["function", "module"])
def test_a_loss_that_is_a_sum(way, uneven, kind):
    """As one process: the sum over the rows of all ranks. What is added is a mean."""

    def of_sum(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum")

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            penalty = sum(p.square().sum() for p in model.parameters())
            (loss_fn(model(x), y) + model.balance + 0.1 * penalty).backward()
            optimizer.step()

    loss_fn = of_sum if kind == "function" else nn.CrossEntropyLoss(reduction="sum")
    training = Training(model=built(Keeping), batches=features(7, 3), loop=loop, loss_fn=loss_fn)
    assert_same(training, 3, way, uneven=uneven)


class WithLoss(nn.Module):
    """A model that returns its own loss, a sum, with dropout and normalisation on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(7, 3), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.idle(self.layer(x)).square().sum()


@pytest.mark.parametrize("way", ["replicate", "factor", "column"])
def test_a_model_whose_own_loss_is_a_sum(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, _ in batches:
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

    batches = [(x, None) for x, _ in features(7, 3)]
    training = Training(model=built(WithLoss), batches=batches, loop=loop, loss_fn=None)
    assert_same(training, 3, way, uneven=True)


def test_a_sum_of_rows_and_of_something_else_is_refused():
    model = built(Keeping)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum") + 3 * model.first.weight.norm()

    with pytest.raises(SampleError, match="does not grow with rows"):
        Training(model=model, batches=features(7, 3), loss_fn=loss_fn).on_ranks(2)


@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_terms_beside_a_loss_that_counts_are_weighed_by_rows(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            output = model(x)
            loss = loss_fn(output, y) + 0.1 * output.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    training = Training(
        model=built(Tagger), batches=tokens(), loss_fn=token_loss, count=counted, loop=loop
    )
    assert_same(training, 3, way, uneven=True)


@pytest.mark.parametrize("number", random.Random(31).sample(range(2000), 12))
@pytest.mark.quick
def test_random_terms(number):
    """The long form: python tests/equivalence/random_terms.py --cases 2000."""
    assert judged(number)
