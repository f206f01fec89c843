"""Optimizers and parameters of which owners are given no pieces, and what ranks may not do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from one_process import (
    Training,
    assert_same,
    built,
    features,
    integers,
    numbers,
)
from owned import Normed, mlp, stepped
from torch import Tensor, nn, optim
from torch.nn import functional as F

import shoal
from shoal.core.errors import PlanError, RanksDiffer, UsageError
from shoal.profiling.updates import whole_updates

WHOLE: dict[str, Callable[..., optim.Optimizer]] = {
    "Adafactor": partial(optim.Adafactor, lr=0.05),
    "Muon": lambda parameters: optim.Muon([p for p in parameters if p.dim() == 2], lr=0.05),
    "Normed": Normed,
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_looks_at_whole_tensors_is_left_to_replicate(owned_way, name):
    training = Training(model=built(mlp), batches=features(7, 3), optimizer=WHOLE[name])
    with pytest.raises(PlanError, match=f"sliced cannot serve layer .*{name}"):
        training.on_ranks(2, owned_way)
    assert_same(training, 2, "replicate")


def warming_up(parameters):
    """Adafactor at the beginning of a warm-up: at a rate of 0 every update of halves is the same as
    of the whole.
    """
    optimizer = optim.Adafactor(parameters, lr=0.05)
    optimizer.param_groups[0]["lr"] = 0.0
    return optimizer


class Counting(optim.SGD):
    """Counts its steps where it finds gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["t"] = group.get("t", 0) + 1
        super().step(closure)


class Around(optim.Optimizer):
    """Leaves the step to another optimizer inside."""

    def __init__(self, params: Any) -> None:
        self.inner = optim.SGD(params, lr=0.1)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Outside(optim.Optimizer):
    """Keeps momentum in an attribute of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.momenta: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ):
            momentum = self.momenta.setdefault(parameter, torch.zeros_like(parameter))
            momentum.mul_(0.9).add_(parameter.grad)
            parameter -= 0.1 * momentum


class LooksFirst(optim.SGD):
    """Looks where its first parameter is."""

    def step(self, closure: Any = None) -> None:
        assert self.param_groups[0]["params"][0].device
        super().step(closure)


class Clipping(optim.SGD):
    """Clips the norm of all gradients, where it is above 10."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 10.0)
        super().step(closure)


SUSPECTS = {
    "warm-up": warming_up,
    "counting": partial(Counting, lr=0.1),
    "around": Around,
    "outside": Outside,
    "looks first": partial(LooksFirst, lr=0.1),
    "clipping": partial(Clipping, lr=0.1),
}


@pytest.mark.parametrize("make", SUSPECTS.values(), ids=SUSPECTS.keys())
def test_a_trial_that_would_show_nothing_is_not_trusted(owned_way, make):
    with pytest.raises(PlanError, match="sliced cannot serve layer"):
        Training(model=built(mlp), batches=features(7, 3), optimizer=make).on_ranks(2, owned_way)


class Centering(optim.SGD):
    """Centers gradients of convolutions, as gradient centralization has it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.dim() > 2):
            if parameter.grad is not None:
                parameter.grad -= parameter.grad.mean((1, 2, 3), keepdim=True)
        super().step(closure)


def test_an_optimizer_that_looks_at_convolutions_is_given_no_pieces(owned_way):
    model = built(lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(18, 3)))
    batches = [(numbers(12, 1, 4, 3, seed=s), integers(3, 12, seed=s)) for s in range(2)]
    with pytest.raises(PlanError, match="updates a tensor otherwise than its parts"):
        Training(model=model, batches=batches, optimizer=partial(Centering, lr=0.1)).on_ranks(
            2, owned_way
        )


class Projecting(optim.SGD):
    """Shrinks a parameter to whose rows its gradient is nearly at right angles, as AdamP does
    something else there.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.dim() > 1):
            cosines = F.cosine_similarity(parameter.grad.flatten(1), parameter.flatten(1))
            if cosines.abs().max() < 0.1 / parameter[0].numel() ** 0.5:
                parameter.mul_(0.9)
        super().step(closure)


def test_an_optimizer_that_looks_at_angles_is_given_no_pieces(owned_way):
    with pytest.raises(PlanError, match="updates a tensor otherwise than its parts"):
        Training(
            model=built(mlp), batches=features(7, 3), optimizer=partial(Projecting, lr=0.1)
        ).on_ranks(2, owned_way)


def test_what_may_join_an_optimizer_of_whole_tensors_is_given_no_pieces():
    model = built(mlp)
    first, *_, last = model.parameters()
    reasons = whole_updates(model.parameters(), [optim.Adafactor([first], lr=0.05)])
    assert "Adafactor" in reasons[last].whole
    assert not reasons[last].joint


class Special(nn.Parameter):
    """A user's own kind of parameter."""


def test_a_parameter_of_a_users_own_class_keeps_it(owned_way):
    def special() -> nn.Module:
        model = mlp()
        model[0].weight = Special(model[0].weight.data)
        return model

    with pytest.raises(PlanError, match="is a Special, not a plain nn"):
        Training(model=built(special), batches=features(7, 3)).on_ranks(2, owned_way)


def test_ranks_that_do_different_things_are_told(owned_way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            loss_fn(model(x), y).backward()
            if shoal.world().rank == 0:
                model[0].weight.grad.norm()  # a collective, and alone
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RanksDiffer, match="something else than"):
        Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, owned_way)


def test_a_copy_or_pickle_of_the_optimizer_is_refused(owned_way):
    def loop(model, loss_fn, optimizer, batches):
        stepped(model, loss_fn, optimizer, batches)
        for take in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match="would lose it"):
                take(optimizer)

    Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, owned_way)
