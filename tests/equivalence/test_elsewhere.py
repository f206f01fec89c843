"""`factor`, where a layer's weight gets gradients that its factors do not hold."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from one_process import UNEVEN, Training, assert_same, built, features, mlp
from torch.nn import functional as F

import shoal


def tied(model, x):
    """A use of the first layer's weight outside of it."""
    return F.linear(x, model[0].weight).square().mean()


@UNEVEN
@pytest.mark.parametrize("first", [0, 2])
def test_a_use_of_the_weight_outside_its_layer(uneven, first):
    """From the first step on, or from a later one."""

    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            loss = loss_fn(model(x), y)
            if step >= first:
                loss = loss + 0.3 * tied(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    training = Training(model=built(mlp), batches=features(7, 3), loop=loop)
    assert_same(training, 3, "factor", uneven=uneven)


def test_a_penalty_that_is_kept_until_a_later_backward():
    def loop(model, loss_fn, optimizer, batches):
        quiet = getattr(optimizer, "accumulate", nullcontext)
        for step, (x, y) in enumerate(batches):
            with nullcontext() if step % 2 else quiet():
                (loss_fn(model(x), y) + 0.1 * model[0].weight.square().sum()).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    training = Training(model=built(mlp), batches=features(7, 3, steps=6), loop=loop)
    assert_same(training, 3, "factor", uneven=True)


def test_what_was_kept_and_cleared_is_not_sent():
    def loop(model, loss_fn, optimizer, batches):
        quiet = getattr(optimizer, "accumulate", nullcontext)
        for x, y in batches:
            with quiet():
                (loss_fn(model(x), y) + tied(model, x)).backward()
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    training = Training(model=built(mlp), batches=features(7, 3), loop=loop)
    assert_same(training, 3, "factor")


def test_gradients_from_elsewhere_on_one_rank_alone():
    """On the others there is none, so the mean over ranks has a part of it."""

    def loop(model, loss_fn, optimizer, batches):
        world = shoal.world()
        for x, y in batches:
            loss = loss_fn(model(x), y)
            if world.size == 1:
                loss = loss + model[0].weight.square().sum() / 3
            elif world.rank == 1:
                loss = loss + model[0].weight.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    training = Training(model=built(mlp), batches=features(7, 3), loop=loop)
    assert_same(training, 3, "factor")


def test_a_gradient_that_is_there_stays_under_one_from_elsewhere():
    """Two backwards in a step, of which one has only the penalty."""

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            (0.1 * sum(p.square().sum() for p in model.parameters())).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    training = Training(model=built(mlp), batches=features(7, 3), loop=loop)
    assert_same(training, 3, "factor", uneven=True)
