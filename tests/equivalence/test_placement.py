"""Owners as a placement has them: the same as one process, each parameter where it belongs, and
given whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from one_process import (
    Training,
    adamw,
    assert_same,
    built,
    cluster_of,
    features,
    on_threads,
    rows_of,
    servers_of,
    sgd,
)
from owned import OPTIMIZERS, Normed, assert_same_state, mlp, stepped
from torch import nn, optim
from torch.nn import functional as F

import shoal
from shoal.core.errors import PlanError
from shoal.front.session_start import using
from shoal.planner.search_options import DEFAULT, SearchOptions
from shoal.session.session import current

GIVEN = {"*.weight": 1, "3": 0, "1.*": 1}  # and "0.bias" is cut


# a bucket for each layer: of one or two parameters, so that some owners have none
A_LAYER_EACH = SearchOptions(bucket_bytes=(1,))


def both(parameters: Any) -> list[optim.Optimizer]:
    """SGD with momentum for some, AdamW for the others."""
    parameters = list(parameters)
    return [sgd(parameters[:2]), adamw(parameters[2:])]


def saving(states: dict[bool, list[Any]]) -> Callable[..., None]:
    """A loop that clips, and half-way saves the optimizers' state, trains on, and goes back to
    it.
    """

    def loop(model: nn.Module, loss_fn: Any, optimizers: Any, batches: Any) -> None:
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]

        def train(some: Any) -> None:
            for x, y in some:
                for each in optimizers:
                    each.zero_grad()
                loss_fn(model(x), y).backward()
                assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05
                for each in optimizers:
                    each.step()

        train(batches[:2])
        states[shoal.world().size == 1] = saved = [
            copy.deepcopy(each.state_dict()) for each in optimizers
        ]
        train(batches[2:3])
        for each, state in zip(optimizers, copy.deepcopy(saved), strict=True):
            each.load_state_dict(state)
        train(batches[3:])

    return loop


def assert_same_with_state(training: Training, ranks: int, way: str) -> None:
    """Parameters and optimizer states are those of one process."""
    states: dict[bool, list[Any]] = {}
    assert_same(replace(training, loop=saving(states)), ranks, way)
    for alone, together in zip(states[True], states[False], strict=True):
        assert_same_state(alone, together)


@pytest.mark.parametrize(
    ("placement", "ranks", "way"),
    [
        ("round-robin", 2, "sliced"),
        ("round-robin", 3, "sliced:ring"),
        ("round-robin", 4, "sliced"),
        ("round-robin", 2, "server"),
        ("round-robin", 3, "server"),
        ("hash", 3, "sliced:hierarchical"),
        ("hash", 2, "server"),
        (GIVEN, 2, "sliced, low"),
        (GIVEN, 4, "sliced:ring"),
        (GIVEN, 3, "server"),
    ],
    ids=str,
)
def test_equals_one_process(placement, ranks, way):
    assert_same_with_state(
        Training(
            model=built(mlp),
            batches=features(7, 3),
            optimizer=both,
            placement=placement,
            search_options=DEFAULT if ranks == 2 else A_LAYER_EACH,
        ),
        ranks,
        way,
    )


def test_alone_a_placement_changes_nothing():
    training = Training(model=built(mlp), batches=features(7, 3), optimizer=both, placement="hash")
    assert_same(replace(training, loop=saving({})), 1, "sliced")


def owned(placement: Any, ranks: int = 3, way: str = "sliced") -> tuple[list[str], list[int]]:
    """Names of the parameters in the plan's order, and the elements that each worker has a state
    of.
    """
    model, servers = built(mlp), servers_of(way, ranks)
    copies, (batch, *_) = [copy.deepcopy(model) for _ in range(ranks)], features(7, 3)

    def work(comm: Any) -> tuple[list[str], int]:
        mine, (x, y) = copies[comm.rank], rows_of(batch, comm.rank, ranks)
        with using(comm, cluster_of(ranks, servers)):
            optimizer = sgd(mine.parameters())
            shoal.parallelize(
                mine,
                F.cross_entropy,
                optimizer,
                sample=(x, y),
                pins={"*": way},
                placement=placement,
                search_options=A_LAYER_EACH,
            )
            stepped(mine, F.cross_entropy, optimizer, [(x, y)])
            mine.state_dict()
            attached = current().attached[mine]
            names = [
                name
                for choice in attached.plan.choices
                for name in attached.profile.names[choice.layer]
            ]
            return names, attached.parts[0].state_bytes() // 8

    results = on_threads(ranks, work, servers)
    return results[0][0], [elements for _, elements in results]


def test_each_parameter_is_where_it_is_placed():
    sizes = {name: p.numel() for name, p in mlp().named_parameters()}
    names, held = owned("round-robin")
    assert held == [sum(sizes[name] for name in names[rank::3]) for rank in range(3)]
    assert owned({"*": 2})[1] == [0, 0, sum(sizes.values())]
    assert owned({"0.weight": 0, "1.scale": 0, "3": 0, "0.bias": 2})[1] == [
        sum(sizes.values()) - 5,
        0,
        5,
    ]
    assert owned("hash", 2, "server")[1] == [0, 0], "servers have all of it"
    assert owned({"3.weight": 1}, 3, "server")[1][1] >= sizes["3.weight"], (
        "a worker may own beside servers"
    )


WHOLE: dict[str, Callable[..., Any]] = {
    "Adafactor": partial(optim.Adafactor, lr=0.05),
    "Normed": Normed,
}


@pytest.mark.parametrize("way", ["sliced", "server"])
@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_looks_at_whole_tensors_is_given_whole_tensors(name, way):
    assert_same_with_state(
        Training(
            model=built(mlp),
            batches=features(7, 3),
            optimizer=WHOLE[name],
            placement="round-robin",
            search_options=A_LAYER_EACH,
        ),
        3,
        way,
    )


def test_other_memory_formats_are_kept_by_whole_tensors():
    def lying_otherwise() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3)).to(
            memory_format=torch.channels_last
        )

    batches = [(x.repeat(1, 3).unflatten(1, (2, 3, 3)), y) for x, y in features(6, 3)]
    training = Training(model=built(lying_otherwise), batches=batches, placement="round-robin")
    assert not training.model[0].weight.is_contiguous()
    assert_same_with_state(replace(training, optimizer=both), 2, "sliced")


class JointlyNormed(optim.Optimizer):
    """A step whose length is that of all gradients together."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        length = torch.stack([p.grad.norm() for p in parameters]).norm() if parameters else 1.0
        for parameter in parameters:
            parameter -= 0.1 * parameter.grad / length


@pytest.mark.parametrize(
    ("optimizer", "placement", "says"),
    [
        (
            JointlyNormed,
            "round-robin",
            "JointlyNormed updates several tensors otherwise than each by itself",
        ),
        (
            WHOLE["Adafactor"],
            GIVEN,
            'layer 0: Adafactor(.|\n)*placement="round-robin" gives owners whole parameters',
        ),
    ],
    ids=["joint", "cut"],
)
def test_what_whole_tensors_do_not_help_is_refused(optimizer, placement, says):
    training = Training(
        model=built(mlp), batches=features(7, 3), optimizer=optimizer, placement=placement
    )
    with pytest.raises(PlanError, match=says):
        training.on_ranks(2, "sliced")


@pytest.mark.parametrize("name", ["fused adamw", "adagrad", "asgd"])
def test_an_owner_of_nothing_takes_its_steps(name):
    training = Training(
        model=built(mlp),
        batches=features(7, 3),
        optimizer=OPTIMIZERS[name],
        placement={"*": 1},
        search_options=A_LAYER_EACH,
    )
    assert_same(training, 2, "sliced")
