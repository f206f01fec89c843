"""Backward in every manner: accumulated, clipped, several times, differentiated again."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
from one_process import (
    CUTS,
    DEVICE,
    EVERY_RANK,
    UNEVEN,
    Training,
    adamw,
    assert_same,
    built,
    features,
    integers,
    mlp,
    numbers,
)
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import UsageError, WorldError

WAY = pytest.mark.parametrize("way", EVERY_RANK)


# zeroed where it was seen, in a part of its rows
@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("set_to_none", [True, False])
@UNEVEN
@WAY
def test_accumulation(way, uneven, set_to_none):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches, start=1):
            (loss_fn(model(x), y) / 3).backward()
            if step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

    training = Training(
        model=built(mlp), batches=features(7, 3, steps=9), optimizer=adamw, loop=loop
    )
    assert_same(training, 3, way, uneven=uneven)


def accumulated(
    model, loss_fn, optimizer, batches, between=lambda model, optimizer: None, reuse=False
):
    """Two batches a step, the first of which is kept on its rank, where there is an
    `accumulate`.
    """
    held = torch.empty_like(batches[0][0])
    for (x, y), (other_x, other_y) in pairwise(batches):
        optimizer.zero_grad()
        with optimizer.accumulate() if hasattr(optimizer, "accumulate") else nullcontext():
            loss_fn(model(held.copy_(x) if reuse else x), y).backward()
            between(model, optimizer)
        loss_fn(model(held.copy_(other_x) if reuse else other_x), other_y).backward()
        optimizer.step()


@WAY
def test_an_input_that_is_filled_anew_while_gradients_are_kept(way):
    loop = partial(accumulated, reuse=True)
    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way)


# zeroed where it was seen, in a part of its rows
@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("set_to_none", [True, False])
# owners refuse a look at what is kept
@pytest.mark.parametrize("way", ["replicate", "factor", *CUTS])
def test_kept_gradients_that_are_dropped(way, set_to_none):
    loop = partial(
        accumulated, between=lambda model, optimizer: optimizer.zero_grad(set_to_none=set_to_none)
    )
    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way)


def test_kept_factors_whose_gradient_is_changed_are_refused():
    def change(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = parameter.grad + 1.0

    with pytest.raises(UsageError, match="a gradient was changed of which a part is kept"):
        loop = partial(accumulated, between=change)
        Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, "factor")


class Phases(nn.Module):
    """A layer of complex numbers between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.turn, self.last = (
            nn.Linear(7, 5),
            nn.Linear(5, 5, dtype=torch.complex128),
            nn.Linear(5, 3),
        )

    def forward(self, x):
        return self.last(self.turn(torch.polar(self.first(x).exp(), self.first(x))).abs())


@pytest.mark.parametrize("way", ["replicate", "sliced", "factor", *CUTS])
def test_complex_numbers(way):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        model = Phases()
    for layer in (model.first, model.last):
        layer.double()
    model.to(DEVICE)
    assert_same(Training(model=model, batches=features(7, 3)), 3, way)


@WAY
def test_accumulation_in_one_backward(way):
    def loop(model, loss_fn, optimizer, batches):
        for _ in range(3):
            optimizer.zero_grad()
            sum(loss_fn(model(x), y) for x, y in batches).backward()
            optimizer.step()

    batches = [*features(7, 3, steps=2), (numbers(7, 7, seed=50), integers(3, 7, seed=50))]
    assert_same(Training(model=built(mlp), batches=batches, loop=loop), 3, way, uneven=True)


@WAY
def test_clip_grad_norm(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
            optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way, uneven=True)


@WAY
def test_several_losses_each_with_its_backward(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            out = model(x)
            loss_fn(out, y).backward(retain_graph=True)
            second = model(x * 2)
            (loss_fn(out * 2, y) + loss_fn(second, y)).backward(retain_graph=True)
            out.square().mean().backward()
            optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way, uneven=True)


@WAY
def test_a_forward_that_no_backward_follows(way):
    def loop(model, loss_fn, optimizer, batches):
        kept = []
        for x, y in batches:
            optimizer.zero_grad()
            kept.append(model(x * 3))
            loss_fn(model(x), y).backward()
            optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way, uneven=True)


def penalised(model, loss_fn, optimizer, batches):
    """WGAN-GP's penalty: the norm of the gradient with respect to the input, differentiated
    again.
    """
    for x, y in batches:
        optimizer.zero_grad()
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (loss_fn(out, y) + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()


@UNEVEN
@pytest.mark.parametrize("way", ["replicate", "sliced", "factor", *CUTS])
def test_gradient_penalty(uneven, way):
    training = Training(model=built(mlp), batches=features(7, 3), loop=penalised)
    assert_same(training, way=way, uneven=uneven)


@WAY
def test_gradient_of_inputs_between_steps(way):
    """Saliency, adversarial examples: nothing is exchanged, and nothing of it is left over."""

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            x.requires_grad_()
            (slope,) = torch.autograd.grad(loss_fn(model(x), y) * len(y), x)
            loss_fn(model(x.detach() + slope.sign()), y).backward()
            optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way, uneven=True)


def test_an_input_gets_its_own_gradient_unweighed():
    def loop(model, loss_fn, optimizer, batches):
        x, y = batches[0]
        alone, own = copy.deepcopy(model), x.clone().requires_grad_()
        F.cross_entropy(alone(own), y).backward()
        F.cross_entropy(model(x.requires_grad_()), y).backward()
        assert torch.allclose(x.grad, own.grad)

    Training(model=built(mlp), batches=features(7, 3, steps=1), loop=loop).on_ranks(3, uneven=True)


@WAY
def test_gradient_of_parameters_by_autograd_grad_is_refused(way):
    def loop(model, loss_fn, optimizer, batches):
        torch.autograd.grad(loss_fn(model(batches[0][0]), batches[0][1]), list(model.parameters()))

    with pytest.raises(UsageError, match=r"loss\.backward\(\)"):
        Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, way)


def decayed(model, loss_fn, optimizer, batches):
    """A penalty on the parameters themselves, which enters backward beside the model's output."""
    for x, y in batches:
        optimizer.zero_grad()
        (loss_fn(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()


@pytest.mark.parametrize("way", ["replicate", "factor", *CUTS])
def test_penalty_on_parameters(way):
    assert_same(
        Training(model=built(mlp), batches=features(7, 3), loop=decayed), 3, way, uneven=True
    )


@WAY
def test_gradients_with_a_history_are_refused(way):
    def loop(model, loss_fn, optimizer, batches):
        loss_fn(model(batches[0][0]), batches[0][1]).backward(create_graph=True)

    with pytest.raises(UsageError, match=r"create_graph=True|differentiated"):
        Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, way)


@WAY
def test_in_place(way):
    """Activations inside, and what the loop does with the output."""

    def model():
        return nn.Sequential(nn.Linear(7, 5), nn.ELU(inplace=True), nn.Linear(5, 3))

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            out = model(x)
            out /= 2
            F.leaky_relu_(out)
            loss_fn(out, y).backward()
            optimizer.step()

    assert_same(
        Training(model=built(model), batches=features(7, 3), loop=loop), 3, way, uneven=True
    )


class Recursive(nn.Module):
    """Calls itself, as tree models do."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.head = nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        h = torch.tanh(self.leaf(x) if depth == 0 else self(x / 2, depth - 1))
        return self.head(h) if depth == 2 else h


@WAY
def test_a_model_that_calls_itself(way):
    assert_same(Training(model=built(Recursive), batches=features(7, 3)), 3, way, uneven=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = self.cell(x, hidden)
        return self.head(hidden), hidden


@WAY
def test_a_model_fed_with_its_own_output(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            first, hidden = model(x)
            second, hidden = model(x * 2, hidden)
            (loss_fn((first, hidden), y) + loss_fn((second, hidden), y)).backward()
            optimizer.step()

    training = Training(
        model=built(Recurrent),
        batches=features(7, 3),
        loss_fn=lambda output, y: F.cross_entropy(output[0], y),
        loop=loop,
    )
    assert_same(training, 3, way, uneven=True)


def broken(gradient: Tensor) -> Tensor:
    raise ValueError("a look at a gradient failed")


@pytest.mark.parametrize("way", ["replicate", "sliced"])
def test_a_backward_behind_one_that_broke_is_refused_however_it_comes(way):
    """The first ends before any gradient has landed; the next does not come by way of the model's
    output.
    """

    def loop(model, loss_fn, optimizer, batches):
        (x, y), (z, w) = batches[:2]
        looks = [parameter.register_hook(broken) for parameter in model[2].parameters()]
        with pytest.raises(ValueError, match="a look"):
            loss_fn(model(x), y).backward()
        for look in looks:
            look.remove()
        for layer in model:
            z = layer(z)
        with pytest.raises(WorldError, match="the backward before this one"):
            loss_fn(z, w).backward()

    Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, way)


@pytest.mark.parametrize("way", ["replicate", "sliced", "factor"])
def test_a_loss_of_one_layer_behind_a_backward_that_broke_half_way_is_refused(way):
    """The first leaves gradients of the last layer, the next brings those of the first: neither
    makes all there is.
    """

    def loop(model, loss_fn, optimizer, batches):
        (x, y), (z, _) = batches[:2]
        look = model[4].register_full_backward_hook(lambda *_: broken(x))
        with pytest.raises(ValueError, match="a look"):
            loss_fn(model(x), y).backward()
        look.remove()
        with pytest.raises(WorldError, match="the backward before this one"):
            model[0](z).square().mean().backward()

    deep = built(
        lambda: nn.Sequential(
            nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)
        )
    )
    Training(model=deep, batches=features(7, 3), loop=loop).on_ranks(2, way)


@pytest.mark.parametrize("way", ["replicate", "sliced"])
def test_a_graph_of_parameters_that_a_step_has_changed_is_refused(way):
    """As in one process, where backward would take new values for those of its forward."""

    def loop(model, loss_fn, optimizer, batches):
        x, y = batches[0]
        first, second = loss_fn(model(x), y), loss_fn(model(x), y)
        optimizer.zero_grad()
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()

    training = Training(model=built(mlp), batches=features(7, 3), loop=loop)
    training.alone()
    training.on_ranks(2, way)
