"""`optimizer.accumulate()`: several backwards, of which the last sends for all."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from one_process import (
    EVERY_RANK,
    Training,
    adamw,
    assert_same,
    built,
    features,
    sgd,
)
from owned import mlp

from shoal.core.errors import UsageError


@pytest.mark.parametrize("way", EVERY_RANK)
@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_accumulate_sends_once_for_several_backwards(make, way, search_options):
    def loop(model, loss_fn, optimizer, batches):
        quiet = optimizer.accumulate if hasattr(optimizer, "accumulate") else nullcontext
        for step, (x, y) in enumerate(batches):
            with nullcontext() if step % 2 else quiet():
                loss_fn(model(x), y).backward()
            if step == 2:
                optimizer.zero_grad()  # drops what was kept
                with quiet():
                    (loss_fn(model(x), y) * 0.5).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    assert_same(
        Training(
            model=built(mlp),
            batches=features(7, 3, steps=6),
            optimizer=make,
            loop=loop,
            search_options=search_options,
        ),
        3,
        way,
    )


@pytest.mark.parametrize("way", EVERY_RANK)
def test_a_step_before_what_was_accumulated_is_sent_is_refused(way, search_options):
    def loop(model, loss_fn, optimizer, batches):
        x, y = batches[0]
        with optimizer.accumulate():
            loss_fn(model(x), y).backward()
        with pytest.raises(UsageError, match="have not been sent"):
            optimizer.step()

    Training(
        model=built(mlp), batches=features(7, 3), loop=loop, search_options=search_options
    ).on_ranks(2, way)


@pytest.mark.parametrize("way", ["replicate", "sliced"])
def test_a_closure_that_only_accumulates_is_refused(way, search_options):
    def loop(model, loss_fn, optimizer, batches):
        x, y = batches[0]

        def closure():
            with optimizer.accumulate():
                loss = loss_fn(model(x), y)
                loss.backward()
            return loss

        with pytest.raises(UsageError, match="have not been sent"):
            optimizer.step(closure)

    Training(
        model=built(mlp), batches=features(7, 3), loop=loop, search_options=search_options
    ).on_ranks(2, way)


def test_what_is_accumulated_is_not_seen_as_global(owned_way):
    def loop(model, loss_fn, optimizer, batches):
        x, y = batches[0]
        with optimizer.accumulate():
            loss_fn(model(x), y).backward()
            with pytest.raises(UsageError, match="have not been sent"):
                print(model[0].weight.grad)

    Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, owned_way)


@pytest.mark.parametrize("way", EVERY_RANK)
def test_a_layer_that_is_frozen_since_has_the_gradient_that_was_accumulated(way):
    def loop(model, loss_fn, optimizer, batches):
        quiet = optimizer.accumulate if hasattr(optimizer, "accumulate") else nullcontext
        for step, (x, y) in enumerate(batches[:4]):
            with nullcontext() if step % 2 else quiet():
                loss_fn(model(x), y).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
            first = next(module for module in model if hasattr(module, "weight"))
            first.requires_grad_(step != 0)  # frozen before the second backward

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 2, way, uneven=True)


def test_a_bias_that_trains_on_beside_a_frozen_weight_is_refused_in_words():
    def loop(model, loss_fn, optimizer, batches):
        x, y = batches[0]
        with optimizer.accumulate():
            loss_fn(model(x), y).backward()
        model[0].weight.requires_grad_(False)
        loss_fn(model(x), y).backward()

    training = Training(model=built(mlp), batches=features(7, 3), loop=loop)
    with pytest.raises(UsageError, match="frozen after a backward within accumulate"):
        training.on_ranks(2, "factor")
