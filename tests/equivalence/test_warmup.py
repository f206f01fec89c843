"""Warm-up of local steps: the first ones are the ordinary exact steps, then rounds begin.

ranks     shoal, in one parallelize call
plain     one process: whole batches first, then a model for each rank, or for each host
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from locally import (
    ROUND,
    STEPS,
    Grouped,
    adamw,
    going_on,
    islands_of,
    net,
    on_each,
    plain,
    sgd,
    shares,
    spread,
    steps,
    train,
    with_norm,
)
from one_process import State, assert_same_bits, difference, features, rows_of, state
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import RanksDiffer, UsageError

WARMUP = 3


def all_of(model: nn.Module, optimizer: Optimizer) -> State:
    """Weights, buffers and the optimizer's state."""
    of_optimizer = optimizer.state_dict()["state"]
    moments = {
        f"{number} {name}": value.detach().clone()
        for number, values in of_optimizer.items()
        for name, value in values.items()
    }
    return state(model) | moments


@pytest.mark.parametrize(
    ("rule", "hosts", "islands"),
    [
        ("nesterov", "abc", False),
        ("average", "aab", True),
        *(
            pytest.param(rule, hosts, islands, marks=pytest.mark.slow)
            for rule in ("nesterov", "bmuf", "slowmo")
            for hosts, islands in (("a", False), ("ab", False), ("aabb", True), ("aab", False))
        ),
    ],
)
def test_the_first_steps_are_those_of_one_process(rule: str, hosts: str, islands: bool) -> None:
    """Behind each step weights and moments are compared, in the warm-up and in rounds."""
    outer = shoal.Outer(rule=rule, islands=islands, warmup_steps=WARMUP)
    batches, ranks = features(6, 4, steps=WARMUP + STEPS), len(hosts)
    workers = plain(net, adamw, outer, ranks, [], hosts=hosts if islands else None)
    groups = islands_of(hosts) if islands else [(rank,) for rank in range(ranks)]
    seen = train(hosts, [net() for _ in hosts], batches, make=adamw, outer=outer, each=all_of)
    for step, batch in enumerate(batches):
        workers.step(shares(batch, hosts, islands=islands))
        now = [of_rank[step] for of_rank in seen]
        if step < WARMUP:
            assert_same_bits(now)
        for model, optimizer, group in zip(workers.models, workers.optimizers, groups, strict=True):
            for rank in group:
                assert difference(all_of(model, optimizer), now[rank]) <= 1e-10, step


def test_buffers_are_those_of_exact_steps_first() -> None:
    hosts, batches = "aab", features(6, 4, steps=WARMUP + ROUND)
    outer = shoal.Outer(rule="average", islands=True, warmup_steps=WARMUP)
    models = [copy.deepcopy(with_norm()) for _ in hosts]
    optimizers = [sgd(model.parameters()) for model in models]
    expected = Grouped(models, optimizers, outer, ROUND, WARMUP, groups=islands_of(hosts))
    got = [copy.deepcopy(with_norm()) for _ in hosts]
    seen = train(hosts, got, batches, outer=outer, each=lambda model, _: state(model))
    for step, batch in enumerate(batches):
        expected.step(shares(batch, hosts, islands=False))
        for rank, model in enumerate(expected.models):
            assert difference(state(model), seen[rank][step]) <= 1e-10, step


@pytest.mark.parametrize(
    ("first", "second", "made"),
    [
        ("abc", "aab", 2),
        ("ab", "abc", WARMUP + 2),
        pytest.param("aab", "a", 1, marks=pytest.mark.slow),
        pytest.param("a", "ab", WARMUP, marks=pytest.mark.slow),
        pytest.param("aabb", "abc", WARMUP + 4, marks=pytest.mark.slow),
    ],
)
def test_goes_on_with_other_ranks(first: str, second: str, made: int, tmp_path: Path) -> None:
    """Saved in the middle of the warm-up, at its end, and behind it."""
    batches = features(6, 4, steps=WARMUP + STEPS)
    outer = shoal.Outer(warmup_steps=WARMUP)
    together = {hosts: 1 < len(set(hosts)) < len(hosts) for hosts in (first, second)}
    before, after = batches[:made], batches[made:]
    workers = plain(net, adamw, outer, len(first), [], hosts=first if together[first] else None)
    for batch in before:
        workers.step(shares(batch, first, islands=together[first]))
    groups = islands_of(second) if together[second] else [(rank,) for rank in range(len(second))]
    expected = going_on(workers, len(groups), adamw)
    for batch in after:
        expected.step(shares(batch, second, islands=together[second]))
    how: dict[str, Any] = {"make": adamw, "outer": outer}
    train(first, [net() for _ in first], before, saves=tmp_path / "saved", **how)
    got = [net() for _ in second]
    train(second, got, after, loads=tmp_path / "saved", **how)
    for model, group in zip(expected.models, groups, strict=True):
        for rank in group:
            assert difference(state(model), state(got[rank])) <= 1e-10


def test_a_checkpoint_of_the_warmup_brings_it_back(tmp_path: Path) -> None:
    """Loaded by a run that is past its own: what is left of the warm-up is made again."""
    batches, saved = features(6, 4, steps=WARMUP + STEPS), tmp_path / "saved"
    outer = shoal.Outer(rule="average", warmup_steps=WARMUP)
    expected = plain(net, sgd, outer, 2, batches, uneven=True)

    def work(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, 2, True) for batch in batches]
        model, loss_fn, optimizer = spread(model, mine[0], outer=outer)
        steps(model, loss_fn, optimizer, mine[:1])
        shoal.save(saved, model=model, optimizer=optimizer)
        steps(model, loss_fn, optimizer, mine[1:])
        shoal.load(saved, model=model, optimizer=optimizer)
        steps(model, loss_fn, optimizer, mine[1:])
        return state(model)

    for model, got in zip(expected.models, on_each("ab", work), strict=True):
        assert difference(state(model), got) <= 1e-10


def test_in_the_warmup_everything_is_everybodys() -> None:
    """Gradients are global, and so are the weights that are looked at, or given back."""
    batch, alone = features(6, 4)[0], net()
    F.cross_entropy(alone(batch[0]), batch[1]).backward()

    def work(comm: ThreadComm, model: nn.Module) -> State:
        x, y = rows_of(batch, comm.rank, 2, True)
        outer = shoal.Outer(warmup_steps=WARMUP)
        model, loss_fn, optimizer = spread(model, (x, y), outer=outer)
        loss_fn(model(x), y).backward()
        for own, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-10, atol=1e-12)
        optimizer.step()
        own = state(model)
        with shoal.global_weights(model):
            assert_same_bits([own, state(model)])
        shoal.unparallelize(model)
        assert_same_bits([own, state(model)])
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        return own

    assert_same_bits(on_each("ab", work))


def test_behind_the_warmup_nothing_hangs_on_gradients() -> None:
    def hooks(model: nn.Module, _: Any) -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())

    outer = shoal.Outer(warmup_steps=WARMUP)
    models = [net(), net()]
    seen = train("ab", models, features(6, 4, steps=WARMUP + 1), outer=outer, each=hooks)
    assert seen[0] == [4] * (WARMUP - 1) + [0, 0]


def test_a_layer_that_is_frozen_at_the_switch_is_trained_later(tmp_path: Path) -> None:
    """Frozen from before a checkpoint is loaded until behind the switch to islands."""
    hosts, batches = "aab", features(6, 4, steps=WARMUP + ROUND)
    outer = shoal.Outer(rule="average", islands=True, warmup_steps=WARMUP)

    def work(comm: ThreadComm, model: nn.Module) -> tuple[list[Tensor], State]:
        mine = [rows_of(batch, comm.rank, len(hosts)) for batch in batches]
        model, loss_fn, optimizer = spread(model, mine[0], outer=outer)
        first = next(model.parameters())
        first.requires_grad_(False)
        shoal.save(tmp_path / "saved", model=model, optimizer=optimizer)
        shoal.load(tmp_path / "saved", model=model, optimizer=optimizer)
        seen = []
        for step, batch in enumerate(mine):
            if step == WARMUP + 1:
                assert not first.requires_grad
                first.requires_grad_(True)
            steps(model, loss_fn, optimizer, [batch])
            seen.append(first.detach().clone())
        return seen, state(model)

    got = on_each(hosts, work)
    for seen, _ in got:
        assert all(torch.equal(seen[0], later) for later in seen[: WARMUP + 1])
        assert not torch.equal(seen[WARMUP], seen[-1])
    assert_same_bits([of_all for _, of_all in got])  # a round has ended


def test_an_island_that_never_began_leaves_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, batch = "aab", features(6, 4)[0]
    opened: list[tuple[ThreadComm, str]] = []
    closed: list[ThreadComm] = []
    channel, close = ThreadComm.channel, ThreadComm.close

    def opening(comm: ThreadComm, name: str, **how: bool) -> ThreadComm:
        its = channel(comm, name, **how)
        opened.append((its, name))
        return its

    def closing(comm: ThreadComm) -> None:
        closed.append(comm)
        close(comm)

    monkeypatch.setattr(ThreadComm, "channel", opening)
    monkeypatch.setattr(ThreadComm, "close", closing)

    def work(comm: ThreadComm, model: nn.Module) -> None:
        mine = rows_of(batch, comm.rank, len(hosts))
        outer = shoal.Outer(islands=True, warmup_steps=WARMUP)
        model, _, _ = spread(model, mine, outer=outer)
        shoal.unparallelize(model)

    on_each(hosts, work)
    of_islands = [(comm, name) for comm, name in opened if "-island" in name]
    assert [name for comm, name in of_islands if comm not in closed] == []
    assert {name.rpartition("-")[2] for _, name in of_islands} >= {"counts"}


def test_in_the_warmup_ranks_are_compared() -> None:
    """A learning rate that one rank changes by itself is told, as in exact steps."""
    batches = features(6, 4, steps=3)

    def work(comm: ThreadComm, model: nn.Module) -> None:
        mine = [rows_of(batch, comm.rank, 2) for batch in batches]
        outer = shoal.Outer(warmup_steps=WARMUP)
        model, loss_fn, optimizer = spread(model, mine[0], outer=outer)
        with pytest.raises(RanksDiffer, match="lr"):
            for batch in mine:
                steps(model, loss_fn, optimizer, [batch])
                optimizer.param_groups[0]["lr"] = 0.1 + comm.rank

    on_each("ab", work)


@pytest.mark.slow
def test_codecs_wait_for_the_rounds() -> None:
    """The warm-up is exact, whatever the plan says of what is sent."""
    outer = shoal.Outer(rule="average", warmup_steps=WARMUP)
    batches = features(6, 4, steps=WARMUP)
    expected = plain(net, sgd, outer, 3, batches, uneven=True)
    models = [net() for _ in "abc"]
    train("abc", models, batches, outer=outer, pins={"*": "replicate:direct+int8"})
    for model in models:
        assert difference(state(expected.models[0]), state(model)) <= 1e-10


@pytest.mark.slow
def test_a_step_is_one_of_each_optimizer() -> None:
    def both(parameters: Any) -> Any:
        weight, *others = parameters
        return [sgd([weight]), sgd(others)]

    outer = shoal.Outer(rule="average", warmup_steps=WARMUP)
    batches = features(6, 4, steps=WARMUP + STEPS)
    expected = plain(net, sgd, outer, 2, batches, uneven=True)

    def work(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, 2, True) for batch in batches]
        model, loss_fn, optimizers = spread(model, mine[0], make=both, outer=outer)
        for x, y in mine:
            model.zero_grad()
            loss_fn(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        return state(model)

    for model, got in zip(expected.models, on_each("ab", work), strict=True):
        assert difference(state(model), got) <= 1e-10


@pytest.mark.parametrize("steps", [-1, 2.5, True, "many", None])
def test_warmup_is_a_number_of_steps(steps: Any) -> None:
    with pytest.raises(UsageError, match="warmup_steps is a number of steps, at least 0"):
        shoal.Outer(warmup_steps=steps)


GROWING = shoal.Outer(warmup_steps=2, grows=True)  # two exact steps, then rounds of 1, 2, 3, 3


@pytest.mark.parametrize("hosts", ["ab", pytest.param("abc", marks=pytest.mark.slow)])
def test_rounds_grow(hosts: str) -> None:
    batches = features(6, 4, steps=2 + 1 + 2 + 3 + 3)
    workers = plain(net, adamw, GROWING, len(hosts), [])
    seen = train(hosts, [net() for _ in hosts], batches, make=adamw, outer=GROWING, each=all_of)
    met = []
    for step, batch in enumerate(batches):
        workers.step(shares(batch, hosts, islands=False))
        now = [of_rank[step] for of_rank in seen]
        if difference(*({k: v for k, v in own.items() if "." in k} for own in now[:2])) == 0:
            met.append(step)
        for number, (model, optimizer) in enumerate(
            zip(workers.models, workers.optimizers, strict=True)
        ):
            assert difference(all_of(model, optimizer), now[number]) <= 1e-10, step
    assert met == [0, 1, 2, 4, 7, 10], "steps after which all ranks have the same weights"


@pytest.mark.parametrize("made", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_growing_rounds_go_on_with_other_ranks(made: int, tmp_path: Path) -> None:
    """Saved as a round of two steps ends; the next one has three."""
    batches = features(6, 4, steps=2 + 1 + 2 + 3 + 3)
    workers = plain(net, adamw, GROWING, 2, [])
    for batch in batches[:made]:
        workers.step(shares(batch, "ab", islands=False))
    expected = going_on(workers, 3, adamw)
    for batch in batches[made:]:
        expected.step(shares(batch, "abc", islands=False))
    how: dict[str, Any] = {"make": adamw, "outer": GROWING}
    train("ab", [net(), net()], batches[:made], saves=tmp_path / "saved", **how)
    got = [net() for _ in "abc"]
    train("abc", got, batches[made:], loads=tmp_path / "saved", **how)
    for model, own in zip(expected.models, got, strict=True):
        assert difference(state(model), state(own)) <= 1e-10
