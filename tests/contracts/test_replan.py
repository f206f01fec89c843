"""A plan can be changed in the middle of training, by `unparallelize` and `parallelize`."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from one_process import (
    Batch,
    State,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    mlp,
    on_threads,
    plain,
    rows_of,
    state,
)
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.plan import Plan
from shoal.front.session_start import using

RANKS = 3
PINS = [{"*": "replicate:ring"}, {"*": "sliced"}, {"0": "column", "2": "factor"}, {"2": "head"}]
MODEL = built(mlp)
BATCHES = features(7, 3, steps=2 * len(PINS))


def prepared(model: nn.Module) -> tuple[Optimizer, LRScheduler]:
    """An optimizer, and a schedule that goes on over all plans."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, StepLR(optimizer, step_size=3, gamma=0.5)


def train(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, batches: list[Batch]
) -> None:
    for batch in batches:
        plain(model, F.cross_entropy, optimizer, [batch])
        schedule.step()


def alone() -> State:
    model = copy.deepcopy(MODEL)
    train(model, *prepared(model), BATCHES)
    return state(model)


def replanned(comm: ThreadComm) -> State:
    """Trains two steps under every plan, all with the same objects."""
    model = copy.deepcopy(MODEL)
    optimizer, schedule = prepared(model)
    own = [rows_of(batch, comm.rank, RANKS) for batch in BATCHES]
    with using(comm, cluster_of(RANKS)):
        for number, pins in enumerate(PINS):
            shoal.parallelize(model, F.cross_entropy, optimizer, sample=own[0], pins=pins)
            train(model, optimizer, schedule, own[2 * number : 2 * number + 2])
            shoal.unparallelize(model)
    return state(model)


def test_the_plan_changes_in_mid_training_and_nothing_else_does() -> None:
    got = on_threads(RANKS, replanned)
    assert_same_bits(got)
    assert difference(alone(), got[0]) <= 1e-10


def test_a_plan_is_edited_in_mid_training() -> None:
    def edited(comm: ThreadComm) -> tuple[State, list[int]]:
        model, lanes = copy.deepcopy(MODEL), []
        optimizer, schedule = prepared(model)
        own = [rows_of(batch, comm.rank, RANKS) for batch in BATCHES]
        plan: Plan | str = "auto"
        with using(comm, cluster_of(RANKS)):
            for batch in own:
                shoal.parallelize(model, F.cross_entropy, optimizer, sample=own[0], plan=plan)
                found = shoal.plan_of(model)
                assert found is not None
                lanes.append(found.lanes)
                plan = replace(found, lanes=1 + found.lanes % 2)
                train(model, optimizer, schedule, [batch])
                shoal.unparallelize(model)
        return state(model), lanes

    states, lanes = zip(*on_threads(RANKS, edited), strict=True)
    assert {1, 2} <= set(lanes[0])
    assert difference(alone(), states[0]) <= 1e-10
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
