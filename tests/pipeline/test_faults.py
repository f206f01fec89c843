"""Pipelines whose messages are late, whose ranks are lost, or do other things than the others.

No rank hangs: each ends soon, and its error names a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from pipeline_trials import (
    PINS,
    SOON_S,
    TIED,
    Blocks,
    a_step,
    assert_as_one_process,
    batch,
    errors_of,
    pins_of,
)
from torch import nn

from shoal.core.errors import PeerLost, RanksDiffer
from shoal_tools.testing.planned_faults import FaultyComm, Kill, Planted, RandomDelay


@pytest.mark.parametrize(
    ("ranks", "pins", "seed"),
    [
        (3, pins_of(TIED), 0),
        *(
            pytest.param(ranks, pins, seed, marks=pytest.mark.slow)
            for seed in range(8)
            for ranks, pins in ((2, PINS), (3, pins_of(TIED)), (4, PINS))
        ),
    ],
)
def test_random_delays_change_nothing(ranks: int, pins: dict[str, str], seed: int) -> None:
    model = Blocks()
    if pins != PINS:
        model.head = nn.Linear(6, 6)
        model.head.weight = model.first.weight  # one rank has the first and the last layer
    assert_as_one_process(
        model,
        ranks=ranks,
        pins=pins,
        rows=[[4] * ranks, [1, 3, 2, 5][:ranks], [0, 2, 4, 1][:ranks]],
        loss_fn=lambda output, y: ((output[:, :3] - y) ** 2).mean(),
        count=lambda output, y: len(y),
        wrapped=lambda comm: FaultyComm(comm, [RandomDelay(0.001, seed)]),
    )


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("phase", ["forward", "loss", "backward", "step"])
def test_a_lost_rank_is_named_by_all(phase: str, lost: int) -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        for step in range(3):
            x, y = batch(rank, step)

            def reach(place: str, now: bool = rank == lost and step == 1) -> None:
                if now and place == phase:
                    raise Planted(place)

            reach("forward")
            output = model(x)
            reach("loss")
            loss = loss_fn(output, y)
            reach("backward")
            loss.backward()
            reach("step")
            optimizer.step()

    begin = time.monotonic()
    errors = errors_of(Blocks(), loop, ranks=3)
    assert time.monotonic() - begin < SOON_S
    for rank, error in errors.items():
        assert isinstance(error, Planted if rank == lost else PeerLost)
        assert rank == lost or error.rank == lost


@pytest.mark.parametrize(
    "at", [3, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 5, 8, 12, 17, 23))]
)
def test_a_rank_that_dies_at_a_message_is_named_by_all(at: int) -> None:
    comms: dict[int, FaultyComm] = {}

    def wrapped(comm: Any) -> FaultyComm:
        return comms.setdefault(comm.rank, FaultyComm(comm, []))

    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        a_step(model, loss_fn, *batch(rank))
        if rank == 1:
            comms[1].suffer(Kill(1, comms[1].operations + at))
        for step in range(1, 3):
            a_step(model, loss_fn, *batch(rank, step))

    errors = errors_of(Blocks(), loop, ranks=3, wrapped=wrapped)
    assert {rank: getattr(errors[rank], "rank", None) for rank in (0, 2)} == {0: 1, 2: 1}


def _skips_backward(rank: int, model: Any, loss_fn: Any, x: Any, y: Any) -> None:
    for _ in range(2):
        loss = loss_fn(model(x), y)
        if not rank:
            loss.backward()


def _skips_loss(rank: int, model: Any, loss_fn: Any, x: Any, y: Any) -> None:
    for _ in range(2):
        output = model(x)
        if rank:
            loss_fn(output, y).backward()


def _in_other_modes(rank: int, model: Any, loss_fn: Any, x: Any, y: Any) -> None:
    a_step(model.train(rank == 0), loss_fn, x, y)


def _of_other_types(rank: int, model: Any, loss_fn: Any, x: Any, y: Any) -> None:
    a_step(model, loss_fn, x.float() if rank else x, y)


def _with_other_arguments(rank: int, model: Any, loss_fn: Any, x: Any, y: Any) -> None:
    loss_fn(model(x=x) if rank else model(x), y).backward()


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (_skips_backward, "pipeline: backward"),
        (_skips_loss, "pipeline: loss"),
        (_in_other_modes, "in training: "),
        (_of_other_types, r"dimensions of torch\.float"),
        (_with_other_arguments, r"arguments: .*'x'"),
    ],
)
def test_ranks_that_do_other_things_are_told(does: Callable[..., None], said: str) -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        a_step(model, loss_fn, *batch(rank))
        does(rank, model, loss_fn, *batch(rank, 1))

    errors = errors_of(Blocks(), loop)
    assert all(isinstance(error, RanksDiffer) for error in errors.values())
    for error in errors.values():
        with pytest.raises(RanksDiffer, match=said):
            raise error
