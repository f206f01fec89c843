"""Workers that run ahead of one another, within a bound on their staleness."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import (
    adamw,
    built,
    cluster_of,
    integers,
    numbers,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F
from with_servers import mlp, steps, trained

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.transfer import Slice
from shoal.core.errors import PlanError, UsageError
from shoal.core.plan import Plan
from shoal.front.session_start import using
from shoal.planner.search_options import DEFAULT
from shoal.servers.ahead_workers import Shelf
from shoal.servers.servers import serve
from shoal.session.session import current


class Adding:
    """What a shelf asks of an update: here the parameters are the sum of all gradients."""

    def __init__(self) -> None:
        self.value = torch.zeros(5)
        self.steps = 0

    def step(self, gradients: list[Tensor | None], *work: object) -> None:
        (gradient,) = gradients
        self.steps += 1
        if gradient is not None:
            self.value += gradient

    def values(self) -> list[Tensor]:
        return [self.value]


def brought(worker: int, step: int) -> Slice:
    """A gradient of several magnitudes, so that a sum in another order has other bits."""
    return slice_of(
        numbers(5, seed=100 * worker + step, dtype=torch.float32).cpu() * 10.0 ** (worker - 1)
    )


def slice_of(values: Tensor) -> Slice:
    whole = torch.cat([values, torch.tensor([1.0, 0.0, 0.0, 1.0])])
    return Slice(whole, (whole[:5],), whole[5:6], whole[6:8], whole[8:8], whole[8:])


def given(shelf: Shelf, worker: int, step: int) -> Tensor:
    """The parameters that a worker gets at its step."""
    answer = slice_of(torch.zeros(5))
    shelf.step(worker, brought(worker, step), 0, (), answer, lambda: None)
    return answer.values[0].clone()


def test_a_bound_of_0_gives_the_bits_of_the_synchronous_step() -> None:
    workers, number, update = 3, 20, Adding()
    shelf = Shelf([update], workers, 0)

    def work(comm: ThreadComm) -> list[Tensor]:
        got = []
        for step in range(number):
            time.sleep(0.001 * ((step + comm.rank) % 3))
            got.append(given(shelf, comm.rank, step))
        return got

    expected, total = [], torch.zeros(5)
    for step in range(number):
        gradient = brought(0, step).values[0].clone()
        for worker in range(1, workers):
            gradient += brought(worker, step).values[0]
        total += gradient
        expected.append(total.clone())
    for got in run(workers, work, timeout_s=20):
        assert all(map(torch.equal, got, expected))
    assert shelf.observed == {0: workers * number}
    assert update.steps == number


def test_a_step_is_applied_when_all_workers_have_brought_theirs() -> None:
    shelf = Shelf([Adding()], 2, 3)
    zero = torch.zeros(5)
    assert all(torch.equal(given(shelf, 0, step), zero) for step in range(3))  # worker 0 runs ahead
    first = brought(0, 0).values[0] + brought(1, 0).values[0]
    assert torch.equal(given(shelf, 1, 0), first)
    assert torch.equal(given(shelf, 0, 3), first)
    assert shelf.observed == {0: 1, 1: 1, 2: 1, 3: 2}


def test_without_a_bound_every_gradient_is_an_update_as_it_comes() -> None:
    shelf = Shelf([update := Adding()], 2, None)
    assert torch.equal(given(shelf, 0, 0), brought(0, 0).values[0])
    assert torch.equal(given(shelf, 0, 1), brought(0, 0).values[0] + brought(0, 1).values[0])
    given(shelf, 1, 0)
    assert update.steps == 3
    assert shelf.observed == {0: 1, 1: 1, 2: 1}


SLOW = 2  # a worker


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("bound", [1, 3])
def test_no_worker_is_ahead_by_more_than_the_bound(optimizer, bound) -> None:
    """One is slow for good: the others wait for it, and the loss falls all the same."""
    number, batches = 30, 5
    loop = steps(number, lambda rank, step: 0.02 if rank == SLOW else 0.0)
    _, losses, observed = trained(3, 2, loop, optimizer=optimizer, staleness=bound)
    for (histogram,) in observed:
        assert max(histogram) == bound, "the bound was never reached, so nothing was held"
        assert sum(histogram.values()) >= 3 * number
    first, last = (
        sum(sum(own[part]) for own in losses) for part in (slice(batches), slice(-batches, None))
    )
    assert last < first, "the mean loss of all ranks on the same batches"


def test_workers_that_run_ahead_are_answered_by_the_servers_that_own() -> None:
    observed = trained(2, 2, steps(4), staleness=1, placement={"*": 3})[2]
    assert [sum(histogram.values()) > 0 for (histogram,) in observed] == [False, True], (
        "rank 2 owns nothing"
    )
    with pytest.raises(PlanError, match="rank 1, which runs ahead"):
        trained(2, 1, steps(4), staleness=1, placement={"*": 1})


def test_without_a_bound_nobody_waits_for_the_slow_one() -> None:
    """The slow one does not end its third step before the others have ended all of theirs."""
    ended = {rank: threading.Event() for rank in range(SLOW)}

    def pause(rank: int, step: int) -> float:
        if rank == SLOW and step == 2:
            assert all(event.wait(60) for event in ended.values())
        return 0.0

    def loop(*given: Any) -> None:
        assert len(steps(10, pause)(*given)) == 10
        if (event := ended.get(shoal.world().rank)) is not None:
            event.set()

    # in one bucket a layer, which is quick
    _, _, observed = trained(3, 2, loop, staleness=None, search_options=DEFAULT)
    assert max(max(histogram) for (histogram,) in observed) >= 5


@pytest.mark.parametrize("late", [0, 1, 99])
def test_workers_that_run_ahead_are_answered_in_any_order(late: int) -> None:
    plan = trained(2, 2, lambda model, *_: current().attached[model].plan, staleness=1)[1][0]
    assert isinstance(plan, Plan)
    for (histogram,) in trained(2, 2, steps(6), plan=replace(plan, late=late))[2]:
        assert sum(histogram.values()) >= 2 * 6 and max(histogram) <= 1


def test_a_shelf_without_a_worker_goes_on_with_the_others() -> None:
    shelf = Shelf([Adding()], 3, 1)
    given(shelf, 1, 0)
    given(shelf, 2, 0)
    shelf.leave(0)
    both = brought(1, 0).values[0] + brought(2, 0).values[0]
    assert torch.equal(given(shelf, 1, 1), both)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda model, optimizer: model[0].weight.grad, "a gradient is read"),
        (lambda model, optimizer: (assign(model), optimizer.step()), "assigned or cleared"),
        (lambda model, optimizer: optimizer.clip_grad_norm_(1.0), "clip_grad_norm_"),
        (
            lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            "a gradient is read",
        ),
        (lambda model, optimizer: optimizer.state_dict(), "optimizer.state_dict, outside a"),
        (lambda model, optimizer: model(numbers(4, 7)).sum().backward(), "followed by one step"),
    ],
)
def test_what_no_worker_that_runs_ahead_can_have_is_refused(act, says) -> None:
    def loop(
        model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Any
    ) -> None:
        steps(1)(model, loss_fn, optimizer, batches)
        loss_fn(model(batches[0][0]), batches[0][1]).backward()
        with pytest.raises(UsageError, match=says):
            act(model, optimizer)
        raise Ended

    with pytest.raises(Ended):
        trained(2, 1, loop, staleness=2)


def assign(model: nn.Module) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)


class Ended(Exception):
    """The test has seen what it wanted."""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"staleness": -1}, "number of steps"),
        ({"staleness": 1.5}, "number of steps"),
        ({"staleness": 2, "pins": {"*": "replicate"}}, "nothing else can be said"),
        ({"staleness": 2, "strategies": ["factor"]}, "nothing else can be said"),
        ({"staleness": 2, "count": lambda output, target: 1.0}, "weighs the same"),
    ],
)
def test_a_staleness_that_cannot_be_is_refused(how, says) -> None:
    with pytest.raises(UsageError, match=says):
        trained(2, 1, steps(1), **how)


def test_without_servers_a_staleness_is_refused() -> None:
    with pytest.raises(PlanError, match="no servers"):
        trained(2, 0, steps(1), staleness=1)


def test_a_plan_with_a_staleness_needs_servers_for_every_layer() -> None:
    def loop(model: nn.Module, loss_fn: Any, optimizer: Any, batches: Any) -> Plan:
        return current().attached[model].plan

    plan = trained(2, 1, loop, staleness=None)[1][0]
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.staleness is None
    wrong = plan.with_choice(replace(plan.choices[0], strategy="replicate"))
    with pytest.raises(PlanError, match="servers own every layer"):
        trained(2, 1, loop, plan=wrong)
    trained(2, 1, steps(2), plan=replace(plan, staleness=1))
    for how, says in (
        ({"staleness": 1}, "both a plan and staleness"),
        ({"count": lambda output, target: 1.0}, "weighs the same"),
    ):
        with pytest.raises(UsageError, match=says):
            trained(2, 1, steps(1), plan=plan, **how)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(23, 6), nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids)).mean(1))


@pytest.mark.parametrize(
    ("bound", "table"),
    [
        (2, "server_rows"),
        pytest.param(2, "server", marks=pytest.mark.slow),
        pytest.param(None, "server_rows", marks=pytest.mark.slow),
        (None, "server"),
    ],
)
def test_a_checkpoint_is_one_moment_of_workers_that_run_ahead(
    bound: int | None, table: str, tmp_path: Path
) -> None:
    """One is slow, so others are ahead as it is saved; a second job goes on from there."""
    start = built(Words)
    batches = [(integers(23, 4, 3, seed=s), integers(5, 4, seed=9 + s)) for s in range(15)]
    cluster = cluster_of(3, 2)

    def job(folder: Path) -> list[dict[str, Tensor]]:
        """The parameters that each worker has as it goes on."""
        copies = [copy.deepcopy(start) for _ in range(3)]

        def work(comm: ThreadComm) -> Any:
            if comm.rank >= 3:
                return serve(comm)
            with using(comm, cluster):
                model, own = copies[comm.rank], batches[comm.rank :: 3]
                optimizer = adamw(model.parameters())
                objects = {"model": model, "optimizer": optimizer}
                with shoal.Checkpoints(folder, keep=9, **objects) as checkpoints:
                    checkpoints.resume()
                    pins = {"table": table, "head": "server"}
                    shoal.parallelize(
                        model,
                        F.cross_entropy,
                        optimizer,
                        sample=own[0],
                        staleness=bound,
                        pins=pins,
                    )
                    held = {name: value.clone() for name, value in model.state_dict().items()}
                    for x, y in own:
                        optimizer.zero_grad()
                        F.cross_entropy(model(x), y).backward()
                        time.sleep(0.03 if comm.rank == SLOW else 0.0)
                        optimizer.step()
                        checkpoints.step()
                    checkpoints.save()
                    return held

        hosts = cluster.topology.hosts + cluster.servers
        return run(5, work, timeout_s=20, hosts=hosts, servers=2)[:3]

    def saved(steps_made: int) -> dict[str, Tensor]:
        with using(ThreadComm()):
            model = copy.deepcopy(start)
            optimizer = adamw(model.parameters())
            path = tmp_path / f"step-{steps_made:08d}"
            shoal.load(path, model=model, optimizer=optimizer)
        for parameter in model.parameters():
            made = optimizer.state[parameter]["step"].item()
            assert made == (steps_made if bound is not None else 3 * steps_made)
        return model.state_dict()

    job(tmp_path)
    for held in job(tmp_path):
        assert all(map(torch.equal, held.values(), saved(5).values()))
    assert not torch.equal(saved(10)["head.weight"], saved(5)["head.weight"])


def test_what_is_saved_and_what_workers_go_on_with_are_the_same(tmp_path: Path) -> None:
    def loop(
        model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Any
    ) -> dict[str, Tensor]:
        steps(4, lambda rank, step: 0.02 * rank)(model, loss_fn, optimizer, batches)
        shoal.save(tmp_path / "saved", model=model, optimizer=optimizer)
        held = {name: value.clone() for name, value in model.state_dict().items()}
        of_both = shoal.Stateful(model=model, optimizer=optimizer).state_dict()
        assert all(map(torch.equal, of_both["model"].values(), held.values()))
        steps(2)(model, loss_fn, optimizer, batches)
        loss_fn(model(batches[0][0]), batches[0][1]).backward()
        with pytest.raises(UsageError, match=r"save behind optimizer.step\(\)"):
            shoal.save(tmp_path / "between", model=model, optimizer=optimizer)
        optimizer.step()
        return held

    helds = trained(2, 1, loop, optimizer=adamw, staleness=3)[1]
    with using(ThreadComm()):
        model = built(mlp)
        shoal.load(tmp_path / "saved", model=model)
    for held in helds:
        assert isinstance(held, dict)
        assert all(map(torch.equal, held.values(), model.state_dict().values()))
