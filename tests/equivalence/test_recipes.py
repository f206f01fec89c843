"""The loops of docs/guide/recipes.md: on two ranks as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import (
    State,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    numbers,
    on_threads,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.front.session_start import using

STEPS = 4
Rows = Callable[[Tensor], Tensor]  # a rank's rows of a tensor


def gan(rows: Rows) -> State:
    """A generator and its critic, which is frozen meanwhile."""
    generator = built(lambda: nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 2)))
    critic = built(lambda: nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 1)))
    for_generator, for_critic = sgd(generator.parameters()), sgd(critic.parameters())

    def critic_loss(critic: Any, real: Tensor, fake: Tensor) -> Tensor:
        return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

    def generator_loss(generator: Any, noise: Tensor) -> Tensor:
        return F.softplus(-critic(generator(noise))).mean()

    _, of_critic, _ = shoal.parallelize(critic, None, for_critic, compute_loss=critic_loss)
    _, of_generator, _ = shoal.parallelize(
        generator, None, for_generator, compute_loss=generator_loss
    )
    for step in range(STEPS):
        real, noise = rows(numbers(12, 2, seed=step)), rows(numbers(12, 5, seed=step + 50))
        for_critic.zero_grad()
        of_critic(critic, real, generator(noise).detach()).backward()
        for_critic.step()
        critic.requires_grad_(False)
        for_generator.zero_grad()
        of_generator(generator, noise).backward()
        for_generator.step()
        critic.requires_grad_(True)
    return {**state(generator), **{f"critic.{name}": v for name, v in state(critic).items()}}


def policy(rows: Rows) -> State:
    """Policy gradients with a centre of all ranks, and an average of the weights."""
    model = built(lambda: nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)))
    optimizer = sgd(model.parameters())

    def loss(model: Any, states: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
        chosen = F.log_softmax(model(states), 1).gather(1, actions[:, None])[:, 0]
        return -(chosen * advantages).mean()

    _, of_policy, _ = shoal.parallelize(
        model, None, optimizer, compute_loss=loss, strategies=["replicate", "sliced", "factor"]
    )
    teacher = copy.deepcopy(model).requires_grad_(False)
    for step in range(STEPS):
        states = rows(numbers(12, 4, seed=step))
        with torch.no_grad():
            actions = model(states).argmax(1)
        rewards = (actions == (states.sum(1) > 0)).double()
        centre = shoal.mean(float(rewards.mean()), weight=len(rewards))
        optimizer.zero_grad()
        of_policy(model, states, actions, rewards - centre).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return {**state(model), **{f"teacher.{name}": v for name, v in state(teacher).items()}}


def clip(rows: Rows) -> State:
    """Rows that are compared with those of all ranks, by a temperature that learns."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pictures, self.texts = nn.Linear(7, 4), nn.Linear(5, 4)
            self.scale = nn.Parameter(torch.tensor(2.0))

    def loss(model: Any, pictures: Tensor, texts: Tensor) -> Tensor:
        left = F.normalize(model.pictures(pictures), dim=1)
        right = F.normalize(model.texts(texts), dim=1)
        logits = model.scale.exp() * shoal.gather(left) @ shoal.gather(right).T
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    model = built(Towers)
    optimizer = sgd(model.parameters())
    _, of_pairs, _ = shoal.parallelize(model, None, optimizer, compute_loss=loss, weigh="ranks")
    for step in range(STEPS):
        optimizer.zero_grad()
        pictures, texts = rows(numbers(12, 7, seed=step)), rows(numbers(12, 5, seed=step + 50))
        of_pairs(model, pictures, texts).backward()
        optimizer.step()
    return state(model)


def detect(rows: Rows) -> State:
    """Pictures in a list, with a dict for each, and a dict of losses."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.box = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)

        def forward(self, pictures: Any, targets: Any) -> dict[str, Tensor]:
            found = torch.stack([F.relu(self.body(each)).mean((1, 2)) for each in pictures])
            boxes = torch.stack([target["boxes"].mean(0) for target in targets])
            return {"box": F.mse_loss(self.box(found), boxes)}

    def loss(model: Any, pictures: Any, targets: Any) -> Any:
        losses = model(pictures, targets)
        return sum(losses.values()), {name: float(each.detach()) for name, each in losses.items()}

    model = built(Detector)
    optimizer = sgd(model.parameters())
    _, of_pictures, _ = shoal.parallelize(
        model, None, optimizer, compute_loss=loss, count=lambda pictures, targets: len(pictures)
    )
    for step in range(STEPS):
        which = rows(torch.arange(12)).tolist()
        pictures = [numbers(3, 6 + n % 3, 5, seed=99 * step + n) for n in which]
        targets = [{"boxes": numbers(1 + n % 3, 4, seed=99 * step + n)} for n in which]
        optimizer.zero_grad()
        of_pictures(model, pictures, targets)[0].backward()
        optimizer.step()
    return state(model)


@pytest.mark.quick
@pytest.mark.parametrize("recipe", [gan, policy, clip, detect])
def test_it_goes_as_in_one_process(recipe: Callable[[Rows], State]) -> None:
    with using(ThreadComm()):
        expected = recipe(lambda tensor: tensor)

    def work(comm: ThreadComm) -> State:
        with using(comm, cluster_of(2)):
            return recipe(lambda tensor: (tensor[:5], tensor[5:])[comm.rank])

    ranks = on_threads(2, work)
    assert_same_bits(ranks)
    assert difference(expected, ranks[0]) <= 1e-10
