"""Every strategy can be undone: apply, train, release give the identical objects as one process has
them, and another plan can be applied to these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from one_process import (
    BUCKETED,
    HERE,
    SMALL,
    Batch,
    Training,
    adamw,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    integers,
    on_threads,
    plain,
    rows_of,
    served_by,
    servers_of,
    sgd,
    state,
)
from ordinary import CountedChannels, Ordinary, becomes, lanes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.facts import Cluster
from shoal.front.session_start import using

WORDS, CLASSES, STEPS = 19, 5, 3
WAYS = list(HERE)


class Net(nn.Module):
    """Something for every strategy: a table, a pair of layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 7, padding_idx=3)
        self.widen, self.narrow = nn.Linear(7, 13), nn.Linear(13, 7)
        self.hidden = nn.Linear(7, 11, bias=False)
        self.head = nn.Linear(11, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.table(ids)
        words = words + self.narrow(torch.relu(self.widen(words)))
        return self.head(torch.tanh(self.hidden(words)).mean(1))


class Tied(Net):
    """Its head has the weight of its table, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(7, 7, bias=False), nn.Linear(7, WORDS)
        self.head.weight = self.table.weight


def batches(number: int) -> list[Batch]:
    return [
        (integers(WORDS, 12, 4, seed=seed), integers(CLASSES, 12, seed=seed))
        for seed in range(number)
    ]


def training(optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]) -> Training:
    return Training(model=built(Net), batches=batches(3 * STEPS), optimizer=optimizer)


def whole_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters, and what the optimizer itself holds of them."""
    held = {
        f"{name} {key}": torch.as_tensor(value).clone()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if value is not None
    }
    return state(model) | held


def in_one_process(script: Training) -> dict[str, Tensor]:
    model = copy.deepcopy(script.model)
    optimizer = script.optimizer(model.parameters())
    plain(model, F.cross_entropy, optimizer, script.batches)
    return whole_state(model, optimizer)


def pins_of(way: str, script: Training, cluster: Cluster) -> dict[str, str]:
    """Every layer that a way serves gets it."""
    if way in BUCKETED:
        return {"*": way}
    served = served_by(way, script.model, F.cross_entropy, script.batches[0], cluster)
    return {"*": BUCKETED[0]} | served


def on_ranks(
    script: Training,
    ranks: int,
    ways: Sequence[str],
    train: Callable[..., None] = plain,
    **how: Any,
) -> list[dict[str, Tensor]]:
    """Each rank's state after some steps in every way, and some by itself on whole batches.

    Layers are in several transfers. Checks between the ways that model and optimizer are what they
    were.
    """
    how = {"search_options": SMALL} | how
    copies = [copy.deepcopy(script.model) for _ in range(ranks)]
    servers = max(servers_of(way, ranks) for way in ways)
    pins = [pins_of(way, script, cluster_of(ranks, servers)) for way in ways]
    of_orders = lanes() + (1 + servers if servers else 0)
    phases = [script.batches[n : n + STEPS] for n in range(0, len(script.batches), STEPS)]

    def work(comm: ThreadComm) -> dict[str, Tensor]:
        model = copies[comm.rank]
        optimizer = script.optimizer(model.parameters())
        before = Ordinary.of(model, optimizer)
        counted = CountedChannels(comm)
        with using(counted, cluster_of(ranks, servers)) as session:
            of_session = list(counted.channels)
            for pinned, phase in zip(pins, phases, strict=False):
                own = [rows_of(batch, comm.rank, ranks) for batch in phase]
                _, loss_fn, _ = shoal.parallelize(
                    model, F.cross_entropy, optimizer, sample=own[0], pins=pinned, **how
                )
                train(model, loss_fn, optimizer, own)
                shoal.unparallelize(model)
                before.assert_again()
                assert shoal.plan_of(model) is None
                assert counted.channels == of_session
                session.comm.gather_objects("all have released", "set-up")
                assert becomes(lanes, of_orders)
                session.comm.gather_objects("all have counted", "set-up")
            plain(model, F.cross_entropy, optimizer, phases[len(ways)])
        return whole_state(model, optimizer)

    return on_threads(ranks, work, servers)


def assert_as_one_process(script: Training, ranks: int, ways: Sequence[str], **how: Any) -> None:
    expected, got = in_one_process(script), on_ranks(script, ranks, ways, **how)
    assert_same_bits(got)
    assert difference(state(script.model), state_of(expected, script.model)) > 1e-3
    assert difference(expected, got[0]) <= 1e-10


def state_of(whole: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    return {name: whole[name] for name in model.state_dict()}


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("way", "another"), list(zip(WAYS, islice(cycle(WAYS), 1, None), strict=False))
)
def test_what_is_released_is_as_in_one_process_and_takes_another_plan(
    way: str, another: str, ranks: int, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
) -> None:
    assert_as_one_process(training(optimizer), ranks, [way, another])


@pytest.mark.parametrize(("way", "another"), [("tied", "replicate"), ("sliced", "tied")])
def test_a_weight_that_modules_share_is_released(way: str, another: str) -> None:
    script = Training(model=built(Tied), batches=batches(3 * STEPS), optimizer=adamw)
    assert_as_one_process(script, 3, [way, another])
