"""What training loops do with a model whose end runs on hosts of its own: as in one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    Loop,
    adamw,
    built,
    features,
    plain,
    rows_of,
    sgd,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F
from torch.optim import Optimizer
from with_tail import (
    CLASSES,
    PINS,
    WIDTH,
    Net,
    assert_same,
    clip_of,
    together,
)

import shoal


def clipping(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def clipping_by_the_optimizer(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        if hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(0.1)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def accumulating(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for first, second in zip(its[::2], its[1::2], strict=False):
        optimizer.zero_grad(set_to_none=False)
        loss_fn(model(first[0]), first[1]).backward()
        (loss_fn(model(second[0]), second[1]) / 2).backward()
        optimizer.step()


def two_losses(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        output = model(x)
        loss = 0.3 * loss_fn(output, y) + 0.7 * loss_fn(output, (y + 1) % CLASSES)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def two_forwards(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        one, other = model(x), model(x * 2)
        optimizer.zero_grad()
        (loss_fn(one, y) + loss_fn(other, y)).backward()
        optimizer.step()


def changing(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Settings, groups, gradients and values are changed between steps, and all of it is looked
    at.
    """
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step, (x, y) in enumerate(its):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
            if step % 2:
                parameter.grad = parameter.grad * 2
        optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            model(x[:3]).sum()
            for parameter in model.parameters():
                parameter.mul_(0.9).clamp_(-2, 2)
        model.train()


def freezing(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for step, (x, y) in enumerate(its):
        for parameter in model.tail[3].parameters():
            parameter.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def saving(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Everything goes back to what it was after two steps, and on from there."""
    plain(model, loss_fn, optimizer, its[:2])
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    plain(model, loss_fn, optimizer, its[2:4])
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    plain(model, loss_fn, optimizer, its[4:])


def penalised(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        penalty = sum(0.1 * p.pow(2).sum() for p in model.parameters())
        optimizer.zero_grad()
        (loss_fn(model(x), y) + penalty).backward()
        optimizer.step()


def scaled(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Gradients that are not finite are skipped, by all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, (x, y) in enumerate(its):
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y) * (float("inf") if step == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def sending_once(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for first, second in zip(its[::2], its[1::2], strict=False):
        optimizer.zero_grad()
        with optimizer.accumulate() if hasattr(optimizer, "accumulate") else nullcontext():
            loss_fn(model(first[0]), first[1]).backward()
        loss_fn(model(second[0]), second[1]).backward()
        optimizer.step()


def by_closure(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def penalised_afterwards(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        (
            loss + sum(0.1 * p.pow(2).sum() + 0.1 * p.abs().sum() for p in model.parameters())
        ).backward()
        sum(0.1 * p.pow(2).sum() for p in model.tail.parameters()).backward()
        optimizer.step()


def attacked(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """A gradient of inputs changes no parameter's; nor does a backward into some of them change the
    others'.
    """
    for x, y in its:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_fn(model(x), y), x)
        x = (x + 0.1 * slope.sign()).detach()
        loss_fn(model(x), y).backward(inputs=[*model.body.parameters(), model.tail[1].weight])
        loss_fn(model(x / 2), y).backward()
        optimizer.step()


def freezing_in_between(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        loss = loss_fn(model(x / 2), y)
        model.tail[3].requires_grad_(False)
        loss.backward()
        model.tail[3].requires_grad_(True)
        optimizer.step()


def counting(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Outputs and losses are looked at when all is done, and kept."""
    kept = []
    for x, y in its:
        output = model(x)
        loss = loss_fn(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            kept.append((loss, (output.argmax(1) == y).sum(), loss_fn(output, y), output))
    assert all(each[1] <= len(its[0][1]) for each in kept)


def regrouping(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Groups change, before states are loaded and gradients clipped."""
    head = list(model.tail[5].parameters())
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if all(p is not other for other in head)]
    plain(model, loss_fn, optimizer, its[:2])
    optimizer.add_param_group({"params": head, "lr": 0.01})
    loss_fn(model(its[2][0]), its[2][1]).backward()
    clip = getattr(optimizer, "clip_grad_norm_", None) or (lambda most: clip_of(optimizer, most))
    [float(p.grad.norm()) for p in model.parameters()]
    clip(0.05)
    for parameter in model.parameters():
        parameter.grad.add_(0.01)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain(model, loss_fn, optimizer, its[3:])


def setting(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """What modules are told in the middle of training."""
    for step, batch in enumerate(its):
        model.tail[4].negative_slope = 0.1 * step
        plain(model, loss_fn, optimizer, [batch])


LOOPS = [
    penalised_afterwards,
    attacked,
    freezing_in_between,
    counting,
    regrouping,
    setting,
    penalised,
    scaled,
    sending_once,
    by_closure,
    clipping,
    clipping_by_the_optimizer,
    accumulating,
    two_losses,
    two_forwards,
    changing,
    freezing,
    saving,
]


SLOW = pytest.mark.slow
QUICK = (changing, scaled)
TWO = {"body.*": "replicate", "tail.1": "pipeline:3", "tail.[35]": "pipeline:4"}


@pytest.mark.parametrize(
    ("tail", "optimizer", "pins"), [pytest.param(1, sgd, PINS, marks=SLOW), (2, adamw, TWO)]
)
@pytest.mark.parametrize(
    "loop", [loop if loop in QUICK else pytest.param(loop, marks=SLOW) for loop in LOOPS]
)
def test_what_loops_do(loop: Loop, optimizer: Any, tail: int, pins: dict[str, str]) -> None:
    assert_same(built(Net), loop, optimizer=optimizer, tail=tail, pins=pins)


def by_torch(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Save by torch's checkpoint functions, which make a step where an optimizer seems to have no
    state.
    """
    plain(model, loss_fn, optimizer, its[:2])
    optimizer.zero_grad()
    assert get_optimizer_state_dict(model, optimizer)["state"]
    plain(model, loss_fn, optimizer, its[2:])


@pytest.mark.parametrize("optimizer", [pytest.param(sgd, marks=SLOW), adamw])
def test_torchs_checkpoint_functions_leave_the_state_of_a_tail_alone(optimizer: Any) -> None:
    model = built(Net)
    model.body.requires_grad_(False)
    assert_same(model, by_torch, optimizer=optimizer, pins={"tail.*": "stage"})


def looking(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> Any:
    """Outputs are looked at, in training and in evaluation."""
    seen = []
    for x, y in its:
        output = model(x)
        seen.append((output.argmax(1) == y).sum())
        loss = loss_fn(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            seen += [
                loss.clone(),
                loss_fn(model(x), y),
                model(x[:1]).sum(),
                output.shape[1] * output.float().mean(),
            ]
    return torch.stack([each.double() for each in seen])


def test_outputs_are_what_they_are_in_one_process() -> None:
    model, batches = built(Net), features(WIDTH, CLASSES)
    copies = [copy.deepcopy(model) for _ in range(2)]
    _, seen = together(model, looking, workers=2, given=batches)
    for rank in range(2):  # each on its rows, and no gradients exchanged but those of both
        first = looking(
            copies[rank],
            F.cross_entropy,
            sgd(copies[rank].parameters()),
            [rows_of(batches[0], rank, 2)],
        )
        assert torch.allclose(seen[rank][0], first[0]) and torch.allclose(seen[rank][1], first[1])
        assert seen[rank].isfinite().all()


def of_inputs(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> Tensor:
    x, y = its[0][0].requires_grad_(), its[0][1]
    loss_fn(model(x), y).backward()
    assert x.grad is not None
    return x.grad


def test_gradients_of_inputs_are_this_ranks_own() -> None:
    model, batch = built(Net), features(WIDTH, CLASSES)[0]
    _, grads = together(model, of_inputs, workers=2)
    for rank in range(2):
        x, y = rows_of(batch, rank, 2)
        F.cross_entropy(model(x.requires_grad_()), y).backward()
        assert torch.allclose(grads[rank], x.grad)


def copied(
    model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]
) -> tuple[Tensor, Tensor, str]:
    plain(model, loss_fn, optimizer, its[:1])
    one = copy.deepcopy(model)
    assert type(one) is Net and type(one.tail) is nn.Sequential
    output = one(its[0][0]).detach()
    # read here: a tensor of the output is brought when it is read, by all ranks together
    values = torch.tensor(model(its[0][0]).tolist(), dtype=output.dtype)
    return output, values, repr(model)


def test_a_copy_is_an_ordinary_model() -> None:
    _, results = together(built(Net), copied)
    for ours, theirs, said in results:
        assert torch.allclose(ours, theirs)
        assert said == repr(built(Net))


def loaded_before(model: Any, optimizer: Any) -> None:
    plain(model, F.cross_entropy, optimizer, features(WIDTH, CLASSES)[:2])


@pytest.mark.parametrize("tail", [1, pytest.param(2, marks=SLOW)])
def test_an_optimizer_brings_its_state(tail: int) -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        if not hasattr(optimizer, "accumulate"):
            loaded_before(model, optimizer)
        plain(model, loss_fn, optimizer, its)

    assert_same(built(Net), loop, optimizer=adamw, before=loaded_before, tail=tail)


def two_optimizers(parameters: Any) -> Any:
    """Of the body, and of the end."""
    every = list(parameters)
    return [sgd(every[:4]), sgd(every[4:])]


def each_clipped_by_itself(model: Any, loss_fn: Any, optimizers: Any, its: list[Batch]) -> None:
    for x, y in its:
        model.zero_grad()
        loss_fn(model(x), y).backward()
        for each in optimizers:
            (each.clip_grad_norm_ if hasattr(each, "clip_grad_norm_") else partial(clip_of, each))(
                0.05
            )
            each.step()


@pytest.mark.parametrize("tail", [pytest.param(1, marks=SLOW), 2])
def test_an_optimizer_that_has_nothing_at_the_end(tail: int) -> None:
    assert_same(built(Net), each_clipped_by_itself, optimizer=two_optimizers, tail=tail)


def test_a_frozen_model_is_evaluated_with_gradients_switched_on() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        plain(model, loss_fn, optimizer, its[:1])
        model.requires_grad_(False)
        output = model(its[1][0])
        assert output.argmax(1).shape == its[1][1].shape and loss_fn(output, its[1][1]).isfinite()
        model.requires_grad_(True)
        plain(model, loss_fn, optimizer, its[1:])

    assert_same(built(Net), loop)


def test_a_scaler_and_a_fused_optimizer() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        scaled(model, loss_fn, optimizer, its[:3])
        plain(model, loss_fn, optimizer, its[3:])

    def fused(parameters: Any) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=0.05, fused=True)

    assert_same(built(Net), loop, optimizer=fused)


def fused_sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def test_a_fused_optimizer_meets_no_parameter_without_state_beside_others() -> None:
    assert_same(built(Net), optimizer=fused_sgd)


def rows_of_none(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> Tensor:
    x = its[0][0][: 2 * shoal.world().rank]
    with torch.no_grad():
        return model(x)


def test_a_rank_without_rows_evaluates_beside_the_others() -> None:
    _, outputs = together(built(Net), rows_of_none)
    assert [tuple(output.shape) for output in outputs] == [(0, CLASSES), (2, CLASSES), (4, CLASSES)]
