"""What loops do with tables whose rows are at servers: as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    Loop,
    Training,
    adamw,
    built,
    difference,
    plain,
    sgd,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from with_tables import Rarely, Words, assert_same, batches, together

import shoal


def accumulating(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for first, second in zip(its[::2], its[1::2], strict=False):
        optimizer.zero_grad()
        loss_fn(model(first[0]), first[1]).backward()
        loss_fn(model(second[0]), second[1]).backward()
        optimizer.step()


def without_clearing(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.step()


def clearing_to_zero(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()


def torch_clips(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def optimizer_clips(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    clip = getattr(optimizer, "clip_grad_norm_", None) or (
        lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)
    )
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        assert clip(0.05) > 0.05
        optimizer.step()


def editing_gradients(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        model.table.weight.grad[3:9] *= 0.5
        model.table.weight.grad = model.table.weight.grad * 2
        optimizer.step()
        loss_fn(model(x), y).backward()  # on top of what is there
        optimizer.step()


def editing_values(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        plain(model, loss_fn, optimizer, [(x, y)])
        with torch.no_grad():
            model.table.weight.clamp_(-0.5, 0.5)
            model.table.weight.mul_(0.9)


def penalising(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        loss = loss_fn(model(x), y) + 0.1 * model.table.weight.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def saving_and_loading(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    plain(model, loss_fn, optimizer, its[:2])
    saved, learned = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    plain(model, loss_fn, optimizer, its[2:4])
    model.load_state_dict(saved)
    optimizer.load_state_dict(learned)
    plain(model, loss_fn, optimizer, its[2:])


def starting_anew(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    saved, nothing = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    plain(model, loss_fn, optimizer, its[:3])
    model.load_state_dict(saved)
    optimizer.load_state_dict(nothing)
    plain(model, loss_fn, optimizer, its[2:])


def clipping_what_adds_up(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for number, (x, y) in enumerate(its):
        loss_fn(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def scheduling(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for x, y in its:
        plain(model, loss_fn, optimizer, [(x, y)])
        scheduler.step()


def evaluating_on_one(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        plain(model, loss_fn, optimizer, [(x, y)])
        if shoal.world().rank == 0:
            with torch.no_grad():
                model(x)
            model.state_dict()


LOOPS = [
    accumulating,
    without_clearing,
    clearing_to_zero,
    torch_clips,
    optimizer_clips,
    editing_gradients,
    editing_values,
    penalising,
    saving_and_loading,
    starting_anew,
    clipping_what_adds_up,
    scheduling,
    evaluating_on_one,
]


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_gets_what_it_gets_in_one_process(loop: Loop, optimizer: Any) -> None:
    assert_same(built(Words), loop, optimizer=optimizer)


def test_within_accumulate_gradients_add_up() -> None:
    def sends_once(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        with optimizer.accumulate():
            loss_fn(model(its[0][0]), its[0][1]).backward()
        loss_fn(model(its[1][0]), its[1][1]).backward()
        optimizer.step()

    expected = Training(model=built(Words), batches=batches(2), loop=accumulating).alone()
    got, _, _ = together(built(Words), sends_once)
    assert difference(expected, got[0]) <= 1e-10


@pytest.mark.parametrize(
    "loop", [plain, clearing_to_zero, clipping_what_adds_up, editing_gradients]
)
def test_a_table_that_no_rank_uses_stays_and_one_that_some_use_moves(loop: Loop) -> None:
    given = batches()
    # the rows, of 4 a rank
    for step, even in enumerate([range(12), range(0), range(2), range(10, 12), range(0)]):
        given[step][0][:, 0] = 1
        given[step][0][list(even), 0] = 2
    if loop is editing_gradients:
        given = [given[0], given[2], given[3]]  # there is one to edit
    assert_same(built(Rarely), loop, given=given, optimizer=adamw)


def by_torch(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Save and load by torch's checkpoint functions, which make a step where an optimizer seems to
    have no state.
    """
    plain(model, loss_fn, optimizer, its[:2])
    optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    plain(model, loss_fn, optimizer, its[2:4])
    optimizer.zero_grad()
    set_optimizer_state_dict(model, optimizer, saved)
    plain(model, loss_fn, optimizer, its[2:])


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_torchs_checkpoint_functions_leave_the_state_of_a_table_alone(optimizer: Any) -> None:
    model = built(Words)
    model.head.requires_grad_(False)
    assert_same(model, by_torch, optimizer=optimizer, pins={"table": "server_rows"})
