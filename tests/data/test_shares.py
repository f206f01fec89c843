"""Rows that follow the speed of ranks, by clocks of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.passes import Passes
from shoal.data.deal import Deal, cut_by
from shoal.data.sharded import shard_loader
from shoal.data.shares import Speed
from shoal.front.session_start import using

pytestmark = pytest.mark.quick
WHOLE = 24  # rows of a global batch


class Machine:
    """A rank's processor: takes seconds for rows, and waits."""

    def __init__(self, rows_per_s: float) -> None:
        self.rows_per_s, self.now_s, self.waited = rows_per_s, 0.0, 0.0

    def clock(self) -> float:
        return self.now_s

    def waited_s(self) -> float:
        return self.waited

    def works(self, rows: int) -> None:
        self.now_s += rows / self.rows_per_s

    def waits(self, seconds: float) -> None:
        self.now_s += seconds
        self.waited += seconds


def speed_of(comm: ThreadComm, machine: Machine) -> Speed:
    passes = Passes()
    passes.waits.add(machine)
    return Speed(comm, passes, machine.clock)


Step = Callable[[int, Machine, int], None]  # its number, who works, on how many rows


def cut(machines: list[Machine], steps: int, step: Step, ahead: int = 0) -> list[list[list[int]]]:
    """By rank: how each of its global batches was cut, in a pass of so many steps.

    The last rank cuts `ahead` batches before it works on them, as workers of a loader do.
    """

    def work(comm: ThreadComm) -> list[list[int]]:
        machine = machines[comm.rank]
        speed = speed_of(comm, machine)
        before = ahead if comm.rank == comm.size - 1 else 0
        cuts: list[list[int]] = []
        for number in range(steps):
            speed.asked(number)
            while len(cuts) <= min(number + before, steps - 1):
                cuts.append(cut_by(WHOLE, comm.size, speed.at(0, len(cuts))))
            rows = cuts[number][comm.rank]
            speed.given(torch.zeros(rows))
            step(number, machine, rows)
        return cuts

    return run(len(machines), work, timeout_s=20)


def plainly(number: int, machine: Machine, rows: int) -> None:
    machine.works(rows)


@pytest.mark.parametrize(
    ("speeds", "shares"),
    [([1.0, 3.0], [6, 18]), ([2.0, 1.0, 1.0], [12, 6, 6]), ([1.0, 2.0, 4.0, 5.0], [2, 4, 8, 10])],
)
def test_rows_follow_speed(speeds: list[float], shares: list[int]) -> None:
    machines = [Machine(speed) for speed in speeds]
    first, *others = cut(machines, 40, plainly)
    assert all(other == first for other in others), "all ranks cut alike"
    assert first[:5] == [cut_by(WHOLE, len(speeds), None)] * 5
    assert first[5:] == [shares] * 35


def test_what_a_rank_waits_for_others_is_no_work() -> None:
    def step(number: int, machine: Machine, rows: int) -> None:
        machine.works(rows)
        machine.waits(100.0)

    first, _ = cut([Machine(1.0), Machine(3.0)], 20, step)
    assert first[-1] == [6, 18]


def test_the_first_step_warms_up() -> None:
    def step(number: int, machine: Machine, rows: int) -> None:
        machine.works(rows)
        machine.now_s += 1000.0 * (number == 0)

    first, _ = cut([Machine(1.0), Machine(3.0)], 20, step)
    assert first[5:] == [[6, 18]] * 15


def test_shares_follow_a_machine_that_slows_down() -> None:
    def step(number: int, machine: Machine, rows: int) -> None:
        if number == 16 and machine.rows_per_s == 3.0:
            machine.rows_per_s = 1.0
        machine.works(rows)

    first, second = cut([Machine(1.0), Machine(3.0)], 40, step)
    assert first == second
    assert first[16:32] == [[6, 18]] * 16
    assert first[32:] == [[12, 12]] * 8


def test_a_rank_that_is_ahead_has_cut_no_batch_otherwise() -> None:
    """New shares begin with the first batch that no rank has cut."""
    first, second = cut([Machine(1.0), Machine(3.0)], 40, plainly, ahead=7)
    assert first == second
    assert first[5 + 7 - 1] == [12, 12]
    assert first[5 + 7] == [6, 18]


def test_a_clock_that_stands_still_changes_nothing() -> None:
    first, _ = cut([Machine(1.0), Machine(float("inf"))], 20, plainly)
    assert first == [[12, 12]] * 20


def test_a_process_alone_takes_all_rows() -> None:
    assert cut([Machine(2.0)], 20, plainly) == [[[WHOLE]] * 20]


def by_speed(comm: ThreadComm, machine: Machine, loader: Any, passes: Passes) -> Any:
    """This rank's rows of a loader, by speed."""
    passes.waits.add(machine)
    deal = Deal(comm.rank, comm.size, together=True, shares=Speed(comm, passes, machine.clock))
    return shard_loader(loader, deal, 3, passes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_row_comes_once_an_epoch(ranks: int) -> None:
    machines = [Machine(1.0 + rank) for rank in range(ranks)]

    def work(comm: ThreadComm) -> list[list[list[int]]]:
        machine, passes = machines[comm.rank], Passes()
        loader = by_speed(comm, machine, DataLoader(range(500), WHOLE, shuffle=True), passes)
        epochs = []
        for _ in range(3):
            steps = []
            for batch in loader:
                passes.forward()
                machine.works(len(batch))
                passes.backward()
                steps.append(batch.tolist())
            epochs.append(steps)
        return epochs

    taken = run(ranks, work, timeout_s=20)
    for epoch in zip(*taken, strict=True):
        steps = list(zip(*epoch, strict=True))  # as many on every rank
        rows = [row for step in steps for part in step for row in part]
        assert sorted(rows) == list(range(500))
        assert [sum(map(len, step)) for step in steps] == [WHOLE] * 20 + [20]
    last = [len(rank[-1][-2]) for rank in taken]
    assert last == cut_by(WHOLE, ranks, [1.0 + rank for rank in range(ranks)])


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.long())


def trained(comm: ThreadComm, model: nn.Module, machine: Machine) -> tuple[list[Tensor], int]:
    """Parameters after an epoch, and this rank's rows of its last whole batch."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(500, 4, dtype=torch.float64, generator=generator)
    loader = DataLoader(TensorDataset(numbers, numbers.sum(1) > 0), WHOLE, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    cluster = Cluster(Topology(("host",) * comm.size), Link(1e-4, 1e8))
    with using(comm, cluster) as session:
        own = by_speed(comm, machine, loader, session.passes)
        sample = numbers[: 3 + comm.rank], torch.zeros(3 + comm.rank)
        _, computed, _ = shoal.parallelize(model, loss_fn, optimizer, sample=sample)
        taken = []
        for x, y in own:
            optimizer.zero_grad()
            computed(model(x), y).backward()
            optimizer.step()
            machine.works(len(x))
            taken.append(len(x))
        return [parameter.detach().clone() for parameter in model.parameters()], taken[-2]


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_by_speed_is_that_of_one_process(ranks: int) -> None:
    def seconds_are_long(rank: int) -> Machine:
        return Machine((1.0 + 2 * rank) / 1e6)  # so that what ranks really wait is nothing

    models = [nn.Linear(4, 2).double() for _ in range(ranks + 1)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    expected, _ = trained(ThreadComm(), models[-1], seconds_are_long(0))
    got = run(ranks, lambda c: trained(c, models[c.rank], seconds_are_long(c.rank)), timeout_s=20)
    assert [rows for _, rows in got] == cut_by(WHOLE, ranks, [1.0 + 2 * r for r in range(ranks)])
    for parameters, _ in got:
        for a, b in zip(expected, parameters, strict=True):
            assert float((a - b).abs().max()) <= 1e-10 * max(float(a.abs().max()), 0.1)
