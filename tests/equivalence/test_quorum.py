"""Rounds with a quorum equal a plain rendering of their rule in one process, late ranks and all.

ranks     shoal: each rank steps on its rows; gates hold a rank back, and a clock of the test's own
          ends the grace time
plain     one process with the weights of each rank, written out below
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from locally import (
    RULES,
    STEPS,
    going_on,
    net,
    on_each,
    on_ranks,
    plain,
    sgd,
    spread,
    train,
    with_norm,
)
from one_process import (
    Batch,
    assert_same_bits,
    call,
    difference,
    features,
    rows_of,
    state,
)
from one_process import plain as steps
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import PlanError, UsageError
from shoal.core.plan import Plan
from shoal.session.session import current
from shoal.strategies.quorum import QuorumTransfer

RANKS = 4
LIMIT_S = 60.0
GRACE_S = 1e7  # only the test's own clock ends it


def quorum_of(rule: str, **how: Any) -> shoal.Outer:
    known = RULES[rule]
    return shoal.Outer(
        **{
            "lr": known.lr,
            "momentum": known.momentum,
            "rule": rule,
            "quorum": 0.75,
            "grace_s": GRACE_S,
        }
        | how
    )


class PlainQuorum:
    """The rule of docs/guide/local-steps.md, "A quorum": weights are one flat tensor a rank."""

    def __init__(self, outer: shoal.Outer, batches: Sequence[Batch]) -> None:
        self.models = [net() for _ in range(RANKS)]
        self.optimizers = [sgd(model.parameters()) for model in self.models]
        self.batches, self.outer = batches, outer
        self.made = [0] * RANKS  # steps so far
        self.rows = [0.0] * RANKS  # rows of steps that are in no round yet
        self.weights = self.flat(0)
        self.base = [self.weights.clone() for _ in range(RANKS)]  # θ_old as each rank knows it
        self.v = torch.zeros_like(self.weights)

    def flat(self, rank: int) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.models[rank].parameters()])

    def put(self, rank: int, weights: Tensor) -> None:
        parameters = list(self.models[rank].parameters())
        parts = weights.split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.data.copy_(part.view(p.shape))

    def step(self, rank: int, times: int) -> None:
        for _ in range(times):
            x, y = rows_of(self.batches[self.made[rank]], rank, RANKS, True)
            self.optimizers[rank].zero_grad()
            F.cross_entropy(call(self.models[rank], x), y).backward()
            self.optimizers[rank].step()
            self.made[rank] += 1
            self.rows[rank] += len(y)

    def close(self, *members: int) -> None:
        total = sum(self.rows[rank] for rank in members)
        apart = [self.rows[rank] / total * (self.weights - self.flat(rank)) for rank in members]
        delta = torch.stack(apart).sum(0)
        lr, momentum = self.outer.lr or 0.0, self.outer.momentum
        if momentum is None:  # block momentum
            momentum = 1 - 1 / RANKS
        if self.outer.rule == "average":
            self.weights = self.weights - lr * delta
        elif self.outer.rule == "nesterov":
            self.v = momentum * self.v + delta
            self.weights = self.weights - lr * (delta + momentum * self.v)
        elif self.outer.rule == "bmuf":
            self.v = momentum * self.v + lr * delta
            self.weights = self.weights - self.v
        else:  # slowmo keeps v / γ, and γ stays
            self.v = momentum * self.v + delta
            self.weights = self.weights - lr * self.v
        for rank in members:
            self.put(rank, self.weights)
            self.base[rank], self.rows[rank] = self.weights, 0.0

    def late(self, rank: int) -> None:
        self.put(rank, self.weights + (self.flat(rank) - self.base[rank]))
        self.base[rank] = self.weights


class Clock:
    """The keeper's clock: it stands still, but for what the test adds."""

    def __init__(self) -> None:
        self.now_s, self.runs = 0.0, False

    def __call__(self) -> float:
        return self.now_s + (time.monotonic() if self.runs else 0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("shoal.strategies.round_keeper.monotonic", clock)
    return clock


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, "a gate never opened"
        time.sleep(0.002)


def transfer_of(model: nn.Module) -> QuorumTransfer:
    found = current().attached[model].engine.transfers
    return next(t for t in found if isinstance(t, QuorumTransfer))


def miss_rounds(count: int, clock: Clock, transfers: Mapping[int, QuorumTransfer]) -> None:
    """Hold up rank 3 until the others have closed so many rounds without it."""
    own = transfers[3]
    wait_for(lambda: quorum_is_here(transfers))
    clock.now_s += 1
    wait_for(own.has_call)
    clock.now_s += GRACE_S  # the grace time is over
    wait_for(lambda: all(transfers[r].version == own.version + count for r in range(3)))


def quorum_is_here(transfers: Mapping[int, QuorumTransfer]) -> bool:
    keeper = transfers[0].office.keeper
    assert keeper is not None
    return keeper.members.met_s is not None and len(keeper.members.here) == RANKS - 1


Gate = Callable[[int, int], None]  # waits, before a rank's step of that number


def on_gates(
    outer: shoal.Outer, batches: Sequence[Batch], counts: Sequence[int], gates: Callable[..., Gate]
) -> tuple[list[Any], list[Any]]:
    """Train each rank for so many steps. Return its own state, and the one in common."""
    transfers: dict[int, QuorumTransfer] = {}
    gate, exchanges = gates(transfers), dict[int, int]()

    def work(comm: ThreadComm, model: nn.Module) -> tuple[Any, Any]:
        rank = comm.rank
        model, loss_fn, optimizer = spread(
            model, rows_of(batches[0], rank, RANKS, True), outer=outer
        )
        transfers[rank] = transfer_of(model)
        for number in range(counts[rank]):
            gate(rank, number)
            steps(model, loss_fn, optimizer, [rows_of(batches[number], rank, RANKS, True)])
        own = state(model)
        lane = current().attached[model].engine.routes.going[0]
        exchanges[rank] = lane._comm.journal.record.begun
        shoal.unparallelize(model)
        return own, state(model)

    own, common = zip(*on_each("abcd", work), strict=True)
    if counts[3] > 6:  # all have come to the last round
        assert len(set(exchanges.values())) == 1, "ranks number their exchanges differently"
    return list(own), list(common)


def assert_plain(expected: PlainQuorum, own: Sequence[Any], common: Sequence[Any]) -> None:
    for rank in range(RANKS):
        assert difference(state(expected.models[rank]), own[rank]) <= 1e-10, f"rank {rank}"
    assert_same_bits(common)
    expected.put(0, expected.weights)
    assert difference(state(expected.models[0]), common[0]) <= 1e-10


@pytest.mark.parametrize(
    "rule",
    ["nesterov", *(pytest.param(r, marks=pytest.mark.slow) for r in ("average", "bmuf", "slowmo"))],
)
def test_late_rank_keeps_its_steps_and_called_rank_makes_fewer(rule: str, clock: Clock) -> None:
    """A round without rank 3, which is late; one with its earlier steps; one it is called to."""
    outer, batches = quorum_of(rule), features(6, 4, steps=12)
    expected = PlainQuorum(outer, batches)
    for rank in range(RANKS):  # round 1: all
        expected.step(rank, 3)
    expected.close(0, 1, 2, 3)
    for rank in range(3):  # round 2: without rank 3
        expected.step(rank, 3)
    expected.step(3, 1)
    expected.close(0, 1, 2)
    expected.step(3, 1)
    expected.late(3)
    for rank in range(RANKS):  # round 3: all, and rank 3 has five steps
        expected.step(rank, 3)
    expected.close(0, 1, 2, 3)
    for rank in range(3):  # round 4: rank 3 is called as it has made one step of three
        expected.step(rank, 3)
    expected.step(3, 2)
    expected.close(0, 1, 2, 3)

    was_late = threading.Event()

    def gates(transfers: dict[int, QuorumTransfer]) -> Gate:
        def gate(rank: int, number: int) -> None:
            own = transfers[rank]
            if rank == 3 and number == 4:
                miss_rounds(1, clock, transfers)
            elif rank == 3 and number == 5:
                was_late.set()
            elif rank == 3 and number == 9:
                wait_for(lambda: quorum_is_here(transfers))
                clock.now_s += GRACE_S / 2 + 1
                wait_for(own.has_call)
            elif rank != 3 and number == 6:
                assert was_late.wait(LIMIT_S)

        return gate

    own, common = on_gates(outer, batches, [12, 12, 12, 10], gates)
    assert_plain(expected, own, common)


def test_rank_that_misses_rounds_goes_on_from_the_newest_weights(clock: Clock) -> None:
    """Rank 3 is held up for two rounds, of which only the first waits for it."""
    outer, batches = quorum_of("nesterov"), features(6, 4, steps=12)
    expected = PlainQuorum(outer, batches)
    for rank in range(RANKS):
        expected.step(rank, 3)
    expected.close(0, 1, 2, 3)
    for _ in range(2):
        for rank in range(3):
            expected.step(rank, 3)
        expected.close(0, 1, 2)
    expected.step(3, 2)
    expected.late(3)
    for rank in range(RANKS):
        expected.step(rank, 3)
    expected.close(0, 1, 2, 3)

    was_late = threading.Event()

    def gates(transfers: dict[int, QuorumTransfer]) -> Gate:
        def gate(rank: int, number: int) -> None:
            if rank == 3 and number == 4:
                miss_rounds(2, clock, transfers)
            elif rank == 3 and number == 5:
                was_late.set()
            elif rank != 3 and number == 9:
                assert was_late.wait(LIMIT_S)

        return gate

    own, common = on_gates(outer, batches, [12, 12, 12, 8], gates)
    assert_plain(expected, own, common)


def test_no_rank_waits_for_one_that_is_lost() -> None:
    """Rank 3 fails while the others wait for it, a quorum of all."""
    outer, batches = quorum_of("average", quorum=1.0), features(6, 4, steps=6)

    def gates(transfers: dict[int, QuorumTransfer]) -> Gate:
        def gate(rank: int, number: int) -> None:
            if rank == 3 and number == 4:
                raise ValueError("this rank fails")

        return gate

    with pytest.raises(ValueError, match="this rank fails") as caught:
        on_gates(outer, batches, [6] * RANKS, gates)
    assert not any("had not ended" in note for note in caught.value.__notes__)


def test_rounds_go_on_without_ranks_that_are_elsewhere(clock: Clock) -> None:
    """Ranks 0 to 2 have made their steps, and wait in `unparallelize`: rank 3 goes on by itself."""
    outer, batches = quorum_of("nesterov"), features(6, 4, steps=9)
    expected = PlainQuorum(outer, batches)
    for rank in range(RANKS):
        expected.step(rank, 3)
    expected.close(0, 1, 2, 3)
    expected.step(3, 6 - 3)
    expected.close(3)
    for rank in range(3):  # they take the newest weights as they meet
        expected.late(rank)

    def gate(rank: int, number: int) -> None:
        clock.runs |= number == 3

    own, common = on_gates(outer, batches, [3, 3, 3, 6], lambda transfers: gate)
    expected.put(0, expected.weights)
    assert_same_bits(common)
    assert difference(state(expected.models[0]), common[0]) <= 1e-10
    assert difference(state(expected.models[3]), own[3]) <= 1e-10


@pytest.mark.parametrize(
    ("rule", "schedule"), [("slowmo", True), pytest.param("bmuf", False, marks=pytest.mark.slow)]
)
def test_rounds_that_all_come_to_are_the_ordinary_rule(rule: str, schedule: bool) -> None:
    batches, outer = features(6, 4, steps=STEPS), quorum_of(rule, warmup_steps=1)
    how = {"uneven": True, "schedule": schedule}
    expected = plain(net, sgd, outer, 3, batches, **how)
    own, common = on_ranks(net, sgd, outer, 3, batches, **how)
    assert_same_bits(common)
    for rank, model in enumerate(expected.models):
        assert difference(state(model), own[rank]) <= 1e-10


@pytest.mark.parametrize(("first", "second"), [(3, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_goes_on_with_other_ranks(first: int, second: int, tmp_path: Path) -> None:
    """A checkpoint, saved within a round, has the weights of its beginning, and v."""
    batches, outer = features(6, 4, steps=STEPS), quorum_of("nesterov")
    before, after = batches[:7], batches[7:] + batches[:4]
    workers = plain(net, sgd, outer, first, before, uneven=True)
    expected = going_on(workers, second, sgd)
    for batch in after:
        expected.step([rows_of(batch, rank, second, True) for rank in range(second)])
    train("abc"[:first], [net() for _ in range(first)], before, saves=tmp_path / "s", outer=outer)
    got = [net() for _ in range(second)]
    train("abc"[:second], got, after, loads=tmp_path / "s", outer=outer)
    for model, other in zip(expected.models, got, strict=True):
        assert difference(state(model), state(other)) <= 1e-10


def test_generations_in_memory_are_refused_because_they_count_steps(tmp_path: Path) -> None:
    def work(comm: ThreadComm, own: nn.Module) -> None:
        spread(own, rows_of(features(6, 4)[0], comm.rank, 2), outer=quorum_of("average"))
        with pytest.raises(UsageError, match="in_memory_every counts steps"):
            shoal.Checkpoints(tmp_path, in_memory_every=5, model=own, epoch=0)
        shoal.unparallelize(own)

    on_each("ab", work, [net(), net()])


def test_plan_with_a_quorum_is_read_as_it_was_written() -> None:
    choices = (shoal.Choice("0", "replicate", "direct"),)
    for outer in (quorum_of("average"), shoal.Outer(rule="average")):
        plan = Plan(2, "", choices, bucket_bytes=1 << 20, lanes=1, local_steps=3, outer=outer)
        assert Plan.from_json(plan.to_json()) == plan
        assert ("quorum" in plan.to_json()) == (outer.quorum is not None)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"pins": {"*": "replicate:direct+int8"}}, "weights travel exactly"),
        ({"make_model": with_norm}, 'buffers="local"'),
    ],
    ids=["codec", "buffers"],
)
def test_refuses(how: dict[str, Any], words: str) -> None:
    how = {"make_model": net} | how
    models = [make() for make in [how.pop("make_model")] * 2]

    def work(comm: ThreadComm, own: nn.Module) -> None:
        sample = rows_of(features(6, 4)[0], comm.rank, 2)
        spread(own, sample, outer=quorum_of("average"), **how)

    with pytest.raises(PlanError, match=words):
        on_each("ab", work, models)
