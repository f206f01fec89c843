"""`optimizer.state` changed by hand between steps, as restarts and pruning of moments do: what one
process gets, also where the state is with owners, servers or the ranks of a cut layer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from one_process import Training, adamw, assert_same, built, cluster_of, features, rows_of, sgd
from owned import mlp, stepped
from torch import nn, optim
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.front.session_start import using
from shoal.optim.far_state import FarState


def held(optimizer: optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def zero(optimizer: Any) -> None:
    for p in held(optimizer):
        optimizer.state[p]["exp_avg"].zero_()
        optimizer.state[p]["exp_avg_sq"].data.zero_()


def anew(optimizer: Any) -> None:
    for p in held(optimizer):
        optimizer.state[p]["exp_avg"] = torch.ones_like(p)
        optimizer.state[p].update(exp_avg_sq=torch.ones_like(p))


def clear(optimizer: Any) -> None:
    optimizer.state.clear()


def other_state(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def drop_one(optimizer: Any) -> None:
    del optimizer.state[held(optimizer)[0]]


def empty_some(optimizer: Any) -> None:
    optimizer.state[held(optimizer)[0]] = {}
    optimizer.state[held(optimizer)[-1]].clear()


def prune(optimizer: Any) -> None:
    """By quantiles, so that a part of a tensor is not pruned as the whole is."""
    for state in optimizer.state.values():
        values = state["exp_avg"]
        values[values.abs() < values.abs().quantile(0.7)] = 0


def replace(optimizer: Any) -> None:
    for p in held(optimizer):
        if optimizer.state.get(p):
            optimizer.state[p] = {name: 2 * value for name, value in optimizer.state[p].items()}


def reload(optimizer: Any) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    assert not optimizer.state_dict()["state"]
    optimizer.load_state_dict(saved)


def shrink_and_save(optimizer: Any) -> None:
    """A state_dict has what was done by hand before it, and a change after it counts, too."""
    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    optimizer.state[held(optimizer)[0]]["exp_avg"].mul_(0.5)
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["exp_avg"], 0.5 * before)
    optimizer.state[held(optimizer)[0]]["exp_avg"].mul_(0.5)


CHANGES = [
    zero, anew, clear, other_state, drop_one, empty_some, prune, replace, reload, shrink_and_save
]  # fmt: skip


@pytest.mark.parametrize("way", ["sliced", "sliced, low, small", "server, small", "column"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_count_as_in_one_process(way, change):
    def loop(model, loss_fn, optimizer, batches):
        for number, batch in enumerate(batches):
            stepped(model, loss_fn, optimizer, [batch])
            if number == 1:
                change(optimizer)

    model = wide if way == "column" else mlp
    training = Training(model=built(model), batches=features(7, 3), optimizer=adamw, loop=loop)
    assert_same(training, 3, way)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3))


@pytest.mark.parametrize("way", ["sliced", "column"])
def test_what_is_read_is_the_whole_state(way):
    def loop(model, loss_fn, optimizer, batches):
        for batch in batches:
            stepped(model, loss_fn, optimizer, [batch])
            for number, p in enumerate(held(optimizer)):
                state = optimizer.state[p]
                assert len(state) == 3 and "exp_avg" in state and state.get("other") is None
                assert state["exp_avg"].shape == p.shape
                model.seen[number] += state["exp_avg"].norm() + state["exp_avg_sq"].abs().max()

    def seeing() -> nn.Module:
        model = wide()
        model.register_buffer("seen", torch.zeros(8))
        return model

    training = Training(model=built(seeing), batches=features(7, 3), optimizer=adamw, loop=loop)
    assert_same(training, 3, way)


def on_ranks(work: Any, way: str = "sliced") -> list[Any]:
    models = [built(wide) for _ in range(2)]

    def rank(comm: ThreadComm) -> Any:
        model = models[comm.rank]
        with using(comm, cluster_of(2)):
            optimizer = adamw(model.parameters())
            batches = [rows_of(batch, comm.rank, 2) for batch in features(7, 3)]
            pins = {"*": "sliced", "0": way}
            shoal.parallelize(model, F.cross_entropy, optimizer, sample=batches[0], pins=pins)
            stepped(model, F.cross_entropy, optimizer, batches[:1])
            return work(model, optimizer, batches)

    return run(2, rank)


@pytest.mark.parametrize("way", ["sliced", "column"])
def test_a_change_of_what_was_read_before_a_step_is_refused(way):
    def work(model, optimizer, batches):
        kept = optimizer.state[model[0].weight]["exp_avg"]
        stepped(model, F.cross_entropy, optimizer, batches)
        kept.zero_()
        with pytest.raises(UsageError, match="read before the last step"):
            stepped(model, F.cross_entropy, optimizer, batches)

    on_ranks(work, way)


def test_nothing_is_brought_unless_somebody_looks_and_nothing_stays():
    def work(model, optimizer, batches):
        weight = model[2].weight
        entry = optimizer.state[weight]
        assert isinstance(entry, FarState) and not dict.__len__(entry)
        before = shoal.memory(model).optimizer_state
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq"} == set(dict(entry))
        entry["mine"] = 1
        assert shoal.memory(model).optimizer_state > before
        stepped(model, F.cross_entropy, optimizer, batches)
        assert optimizer.state[weight] is entry and dict.__len__(entry) == 1 and entry["mine"] == 1
        assert shoal.memory(model).optimizer_state == before
        assert type(copy.deepcopy(entry)) is dict and len(copy.deepcopy(entry)) == 4

    on_ranks(work)


@pytest.mark.parametrize("way", ["sliced", "column"])
def test_an_ordinary_optimizer_again_after_unparallelize(way):
    def work(model, optimizer, batches):
        optimizer.state[model[0].weight]["exp_avg"].zero_()
        optimizer.state[model[2].weight]["mine"] = 1
        shoal.unparallelize(model)
        assert all(type(state) is dict for state in optimizer.state.values())
        assert not optimizer.state[model[0].weight]["exp_avg"].any()
        assert optimizer.state[model[0].bias]["exp_avg"].any()
        assert optimizer.state[model[2].weight]["mine"] == 1

    on_ranks(work, way)


def test_slow_weights_beside_the_state_of_a_cut_layer():
    """As Lookahead has them."""

    def loop(model, loss_fn, optimizer, batches):
        for batch in batches:
            stepped(model, loss_fn, optimizer, [batch])
            for parameter in model.parameters():
                slow = optimizer.state[parameter].setdefault("slow", parameter.detach().clone())
                with torch.no_grad():
                    slow.add_(parameter.detach() - slow, alpha=0.5)
                    parameter.copy_(slow)

    training = Training(model=built(wide), batches=features(7, 3), optimizer=sgd, loop=loop)
    assert_same(training, 3, "column")
