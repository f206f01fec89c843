"""Tables whose rows are at servers: the same as one process, whatever a loop does with them."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    Loop,
    State,
    Training,
    adamw,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    integers,
    plain,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F
from torch.optim import Optimizer

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer, UsageError
from shoal.runtime.servers import serve
from shoal.runtime.session import using

ROWS, WIDTH = 23, 5
PINS = {"table": "server_rows", "head": "replicate"}


class Words(nn.Module):
    """A table whose mean over some ids goes into a head."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=padding)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids)).mean(1))


class Twice(Words):
    """The same table, called twice."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head((self.table(ids) * self.table(ids.flip(1) // 2)).mean(1))


class Rarely(Words):
    """A table that is called with those rows alone whose first id is even."""

    def forward(self, ids: Tensor) -> Tensor:
        found = (ids / ROWS).sum(1, keepdim=True).double().repeat(1, WIDTH)
        even = ids[:, 0] % 2 == 0
        if even.any():
            found[even] = self.table(ids[even]).mean(1)
        return self.head(found)


def batches(steps: int = 5) -> list[Batch]:
    """Ids of which some come twice and most not at all, and classes."""
    return [
        (integers(ROWS, 12, 4, seed=s) // (1 + s % 2), integers(3, 12, seed=s))
        for s in range(steps)
    ]


def together(
    model: nn.Module,
    loop: Callable[..., Any],
    workers: int = 3,
    servers: int = 2,
    *,
    optimizer: Callable[..., Optimizer] = sgd,
    uneven: bool = False,
    given: list[Batch] | None = None,
    **how: Any,
) -> tuple[list[State], list[Any], list[list[Counter[int]]]]:
    """States of workers, what their loops returned, and what servers observed."""
    copies, cluster = [copy.deepcopy(model) for _ in range(workers)], cluster_of(workers, servers)
    how = {"pins": PINS} | how

    def work(comm: ThreadComm) -> Any:
        if comm.rank >= workers:
            return serve(comm)
        mine, own = (
            copies[comm.rank],
            [rows_of(batch, comm.rank, workers, uneven) for batch in given or batches()],
        )
        with using(comm, cluster) as session:
            its = optimizer(mine.parameters())
            _, loss_fn, _ = shoal.parallelize(mine, F.cross_entropy, its, sample=own[0], **how)
            assert session.attached[mine].plan.choice("table").strategy == "server_rows"
            return loop(mine, loss_fn, its, own), state(mine)

    hosts = cluster.topology.hosts + cluster.servers
    results = run(workers + servers, work, timeout_s=20, hosts=hosts, servers=servers)
    return [r[1] for r in results[:workers]], [r[0] for r in results[:workers]], results[workers:]


def assert_same(model: nn.Module, loop: Loop = plain, **how: Any) -> None:
    """Workers get what one process gets, with the same bits."""
    expected = Training(
        model=model,
        batches=how.get("given") or batches(),
        optimizer=how.get("optimizer", sgd),
        loop=loop,
    ).alone()
    got, _, _ = together(model, loop, **how)
    assert_same_bits(got)
    assert difference(state(model), expected) > 1e-3, "training changed nothing"
    assert difference(expected, got[0]) <= 1e-10


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_workers_and_servers_get_what_one_process_gets(
    workers: int, servers: int, optimizer: Any
) -> None:
    assert_same(built(Words), workers=workers, servers=servers, optimizer=optimizer)


def test_a_fused_optimizer_meets_no_parameter_without_state_beside_others() -> None:
    assert_same(
        built(Words), optimizer=lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9, fused=True)
    )


def test_uneven_rows_are_weighted() -> None:
    assert_same(built(Words), uneven=True)


@pytest.mark.parametrize("make", [Twice, lambda: Words(padding=0)], ids=["called twice", "padding"])
def test_a_table_is_used_otherwise(make: Callable[[], nn.Module]) -> None:
    assert_same(built(make), optimizer=adamw)


def accumulating(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for first, second in zip(its[::2], its[1::2], strict=False):
        optimizer.zero_grad()
        loss_fn(model(first[0]), first[1]).backward()
        loss_fn(model(second[0]), second[1]).backward()
        optimizer.step()


def without_clearing(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.step()


def clearing_to_zero(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()


def torch_clips(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def optimizer_clips(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    clip = getattr(optimizer, "clip_grad_norm_", None) or (
        lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)
    )
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        assert clip(0.05) > 0.05
        optimizer.step()


def editing_gradients(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        model.table.weight.grad[3:9] *= 0.5
        model.table.weight.grad = model.table.weight.grad * 2
        optimizer.step()
        loss_fn(model(x), y).backward()  # on top of what is there
        optimizer.step()


def editing_values(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        plain(model, loss_fn, optimizer, [(x, y)])
        with torch.no_grad():
            model.table.weight.clamp_(-0.5, 0.5)
            model.table.weight.mul_(0.9)


def penalising(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        loss = loss_fn(model(x), y) + 0.1 * model.table.weight.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def saving_and_loading(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    plain(model, loss_fn, optimizer, its[:2])
    saved, learned = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    plain(model, loss_fn, optimizer, its[2:4])
    model.load_state_dict(saved)
    optimizer.load_state_dict(learned)
    plain(model, loss_fn, optimizer, its[2:])


def starting_anew(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    saved, nothing = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    plain(model, loss_fn, optimizer, its[:3])
    model.load_state_dict(saved)
    optimizer.load_state_dict(nothing)
    plain(model, loss_fn, optimizer, its[2:])


def clipping_what_adds_up(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for number, (x, y) in enumerate(its):
        loss_fn(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def scheduling(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for x, y in its:
        plain(model, loss_fn, optimizer, [(x, y)])
        scheduler.step()


def evaluating_on_one(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        plain(model, loss_fn, optimizer, [(x, y)])
        if shoal.world().rank == 0:
            with torch.no_grad():
                model(x)
            model.state_dict()


LOOPS = [
    accumulating,
    without_clearing,
    clearing_to_zero,
    torch_clips,
    optimizer_clips,
    editing_gradients,
    editing_values,
    penalising,
    saving_and_loading,
    starting_anew,
    clipping_what_adds_up,
    scheduling,
    evaluating_on_one,
]


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_gets_what_it_gets_in_one_process(loop: Loop, optimizer: Any) -> None:
    assert_same(built(Words), loop, optimizer=optimizer)


def test_within_accumulate_gradients_add_up() -> None:
    def sends_once(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        with optimizer.accumulate():
            loss_fn(model(its[0][0]), its[0][1]).backward()
        loss_fn(model(its[1][0]), its[1][1]).backward()
        optimizer.step()

    expected = Training(model=built(Words), batches=batches(2), loop=accumulating).alone()
    got, _, _ = together(built(Words), sends_once)
    assert difference(expected, got[0]) <= 1e-10


@pytest.mark.parametrize(
    "loop", [plain, clearing_to_zero, clipping_what_adds_up, editing_gradients]
)
def test_a_table_that_no_rank_uses_stays_and_one_that_some_use_moves(loop: Loop) -> None:
    given = batches()
    # the rows, of 4 a rank
    for step, even in enumerate([range(12), range(0), range(2), range(10, 12), range(0)]):
        given[step][0][:, 0] = 1
        given[step][0][list(even), 0] = 2
    if loop is editing_gradients:
        given = [given[0], given[2], given[3]]  # there is one to edit
    assert_same(built(Rarely), loop, given=given, optimizer=adamw)


def by_torch(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Save and load by torch's checkpoint functions, which make a step where an optimizer seems to
    have no state.
    """
    plain(model, loss_fn, optimizer, its[:2])
    optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    plain(model, loss_fn, optimizer, its[2:4])
    optimizer.zero_grad()
    set_optimizer_state_dict(model, optimizer, saved)
    plain(model, loss_fn, optimizer, its[2:])


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_torchs_checkpoint_functions_leave_the_state_of_a_table_alone(optimizer: Any) -> None:
    model = built(Words)
    model.head.requires_grad_(False)
    assert_same(model, by_torch, optimizer=optimizer, pins={"table": "server_rows"})


def test_one_optimizer_has_two_models() -> None:
    def both(models: Any, optimizer: Any, loss_fn: Any, its: list[Batch]) -> None:
        for x, y in its:
            optimizer.zero_grad()
            for model in models:
                loss_fn(model(x), y).backward()
            optimizer.step()

    made = [built(Words), built(Twice)]
    expected = copy.deepcopy(made)
    both(
        expected,
        adamw([p for model in expected for p in model.parameters()]),
        F.cross_entropy,
        batches(),
    )
    cluster = cluster_of(2, 1)

    def work(comm: ThreadComm) -> Any:
        if comm.rank == 2:
            return serve(comm)
        mine, own = copy.deepcopy(made), [rows_of(batch, comm.rank, 2) for batch in batches()]
        with using(comm, cluster):
            optimizer = adamw([p for model in mine for p in model.parameters()])
            for model in mine:
                shoal.parallelize(model, F.cross_entropy, optimizer, sample=own[0], pins=PINS)
            both(mine, optimizer, F.cross_entropy, own)
            return [state(model) for model in mine]

    got, *_ = run(3, work, timeout_s=20, hosts=("a", "b", "c"), servers=1)
    for one, other in zip(expected, got, strict=True):
        assert difference(state(one), other) <= 1e-10


def test_workers_hold_nothing_of_a_table() -> None:
    def held(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> tuple[int, int]:
        plain(model, loss_fn, optimizer, its)
        memory = shoal.memory(model)
        return memory.parameters, memory.optimizer_state

    head = (WIDTH * 3 + 3) * 8
    _, returned, _ = together(built(Words), held, optimizer=adamw)
    assert returned == [(head, 2 * head + 2 * 4)] * 3


def test_state_is_in_one_process_form() -> None:
    def saved(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> Any:
        plain(model, loss_fn, optimizer, its)
        return optimizer.state_dict()["state"]

    alone = built(Words)
    optimizer = adamw(alone.parameters())
    expected = saved(alone, F.cross_entropy, optimizer, batches())
    for got in together(built(Words), saved, optimizer=adamw)[1]:
        assert got.keys() == expected.keys()
        for index, state_of in expected.items():
            for name, value in state_of.items():
                torch.testing.assert_close(got[index][name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("bound", [1, 3, None])
def test_workers_run_ahead_of_one_another(bound: int | None) -> None:
    def many(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> list[float]:
        losses = []
        for step in range(30):
            x, y = its[step % len(its)]
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            time.sleep(0.02 if shoal.world().rank == 2 else 0.0)  # slow for good
            optimizer.step()
            losses.append(loss.item())
        return losses

    learnable = [(x, x[:, 0] % 3) for x, _ in batches()]
    _, losses, observed = together(
        built(Words), many, given=learnable, pins={"table": "server_rows"}, staleness=bound
    )
    for each in losses:
        assert sum(each[-5:]) < 0.95 * sum(each[:5])
    for histograms in observed:
        reached = [max(histogram) for histogram in histograms]
        assert max(reached) == bound if bound else max(reached) > 3, (
            "nobody ran ahead, so nothing was held"
        )
        # one server has few of the ids
        assert all(sum(histogram.values()) >= 45 for histogram in histograms)


def test_what_needs_one_gradient_is_refused_where_workers_run_ahead() -> None:
    def clips(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        loss_fn(model(its[0][0]), its[0][1]).backward()
        with pytest.raises(UsageError, match="no one gradient"):
            _ = model.table.weight.grad
        optimizer.step()

    together(built(Words), clips, pins={"table": "server_rows"}, staleness=2)


def test_ranks_that_want_different_things_hear_of_it() -> None:
    def apart(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        loss_fn(model(its[0][0]), its[0][1]).backward()
        if shoal.world().rank == 1:
            with torch.no_grad():
                model.table.weight.mul_(2)
        else:
            _ = model.table.weight.grad

    with pytest.raises(RanksDiffer, match=r"another thing of table table\.weight"):
        together(built(Words), apart)


def test_a_rank_that_looks_at_gradients_alone_hears_of_it() -> None:
    def alone(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        for x, y in its:
            loss_fn(model(x), y).backward()
            if shoal.world().rank == 0:
                _ = model.table.weight.grad
            optimizer.step()

    with pytest.raises(
        RanksDiffer, match=r"rank 0 asks for 'read gradients' .* rank \d went on without"
    ):
        together(built(Words), alone)


def test_a_change_in_place_is_refused_where_gradients_are_on() -> None:
    def changes(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            model.table.weight.mul_(2)

    together(built(Words), changes)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    def early(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        loss_fn(model(its[0][0]), its[0][1]).backward()
        if shoal.world().rank != 1:
            _ = model.table.weight.grad

    with pytest.raises(RanksDiffer, match="rank 1 has ended, but rank"):
        together(built(Words), early)


def test_an_id_that_is_no_row_is_refused() -> None:
    def outside(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        with torch.no_grad(), pytest.raises(IndexError, match="not one of the table's 23 rows"):
            model(torch.full((2, 2), ROWS))

    together(built(Words), outside)
