"""Whoever looks at a parameter or a gradient that others own gets the right one, whenever it is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from one_process import (
    Training,
    adamw,
    assert_same,
    built,
    features,
    sgd,
)
from torch import Tensor, nn


class Seeing(nn.Module):
    """Has a place for what a loop saw, which is compared like any other state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 3)
        self.spare = nn.Linear(2, 2)  # nobody uses it
        self.register_buffer("seen", torch.zeros(100))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def see(self, place: int, *values: Tensor | None) -> None:
        """Note the sums of some tensors."""
        for offset, value in enumerate(values):
            self.seen[place + offset] += (
                1e3
                if value is None
                else (
                    value * torch.arange(1, value.numel() + 1, device=value.device).view_as(value)
                ).sum()
            )


def gradients(model: Seeing) -> list[Tensor | None]:
    return [model.first.weight.grad, model.last.bias.grad, model.spare.weight.grad]


def assert_seen_alike(way, loop, optimizer=sgd, ranks=3):
    assert_same(
        Training(model=built(Seeing), batches=features(7, 3), optimizer=optimizer, loop=loop),
        ranks,
        way,
    )


@pytest.mark.parametrize(
    "clear", ["first", "before backward", "after step", "the model's", "to zeros", "one by one"]
)
def test_gradients_are_seen_before_and_after_the_step_and_cleared_anywhere(owner_way, clear):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            if clear == "first":
                optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            if clear == "before backward":
                optimizer.zero_grad()
            loss.backward()
            if step % 2:
                model.see(0, *gradients(model))
            optimizer.step()
            if step > 2:
                model.see(10, *gradients(model))
            if clear == "after step":
                optimizer.zero_grad()
            elif clear == "the model's":
                model.zero_grad()
            elif clear == "to zeros":
                optimizer.zero_grad(set_to_none=False)
            elif clear == "one by one":
                for parameter in model.parameters():
                    parameter.grad = None
            model.see(20, *gradients(model))

    assert_seen_alike(owner_way, loop)


def test_what_is_read_in_inference_mode_is_trained_on_outside(owner_way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            loss_fn(model(x), y).backward()
            with torch.inference_mode():
                model.see(0, *gradients(model))
            optimizer.step()
            with torch.inference_mode():
                model(x)
                model.see(10, model.last.weight)
            optimizer.zero_grad(set_to_none=False)

    assert_seen_alike(owner_way, loop)


def test_gradients_that_are_never_cleared_add_up(owner_way):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            loss_fn(model(x), y).backward()
            if step == 3:
                model.see(0, *gradients(model))
            optimizer.step()

    assert_seen_alike(owner_way, loop)


@pytest.mark.parametrize("look", [False, True])
def test_accumulation_over_several_backwards(owner_way, look):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            loss_fn(model(x), y).backward()
            if look and step == 2:
                model.see(0, *gradients(model))
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    assert_seen_alike(owner_way, loop, adamw)


def test_gradients_that_are_dropped_changed_or_put_there(owner_way):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            loss_fn(model(x), y).backward()
            if step == 0:
                optimizer.zero_grad()  # dropped on all ranks
                continue
            if step == 1:
                model.first.weight.grad.mul_(0.1)
            if step == 2:
                model.first.weight.grad = torch.ones_like(model.first.weight)
                del model.last.bias.grad
            optimizer.step()
            if step != 3:
                optimizer.zero_grad()

    assert_seen_alike(owner_way, loop, adamw)


def test_parameters_are_seen_right_after_the_step(owner_way):
    def loop(model, loss_fn, optimizer, batches):
        average = copy.deepcopy(model)
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                assert type(mean) is nn.Parameter
                mean.detach().mul_(0.9).add_(parameter.detach(), alpha=0.1)
            model.see(0, *average.parameters())

    assert_seen_alike(owner_way, loop)


def test_parameters_may_be_changed_between_steps(owner_way):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            if step == 1:
                model.first.weight.data.clamp_(-0.2, 0.2)
            elif step == 2:
                with torch.no_grad():
                    model.last.bias += 0.5
            elif step == 3:
                model.load_state_dict(
                    {name: value * 0.5 for name, value in model.state_dict().items()}
                )

    assert_seen_alike(owner_way, loop)


def test_a_frozen_layer_thaws(owner_way):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            model.first.requires_grad_(step > 2)
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    assert_seen_alike(owner_way, loop, adamw)


def test_copies_and_pickles_are_plain(owner_way):
    def loop(model, loss_fn, optimizer, batches):
        stepped(model, loss_fn, optimizer, batches[0])
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert type(theirs) is nn.Parameter and torch.equal(mine, theirs)
                assert isinstance(mine, nn.Parameter) and theirs.grad is None
        for x, y in batches:
            stepped(model, loss_fn, optimizer, (x, y))

    assert_seen_alike(owner_way, loop)


class Block(nn.Module):
    """Of a class that Dynamo compiles: it skips frames of torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


# Dynamo looks, and hides it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_that_are_compiled_as_one_graph(owner_way):
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    def loop(model, loss_fn, optimizer, batches):
        torch.compiler.reset()
        for block in model:
            block.compile(backend=counting, fullgraph=True)
        for batch in batches:
            stepped(model, loss_fn, optimizer, batch)

    assert_same(
        Training(
            model=built(lambda: nn.Sequential(Block(), Block())), batches=features(7, 7), loop=loop
        ),
        2,
        owner_way,
    )
    assert graphs, "nothing was compiled, so nothing was shown"


def stepped(model, loss_fn, optimizer, batch):
    optimizer.zero_grad()
    loss_fn(model(batch[0]), batch[1]).backward()
    optimizer.step()
