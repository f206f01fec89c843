"""One forward, one backward: exact, with few micro-batches at a time, and no rank waits in vain."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from computed_loops import clipped, plain
from one_process import Batch, adamw, built, difference
from piped import Script, assert_same
from pipeline_trials import PINS, SOON_S, Blocks, batch, errors_of, pins_of, piped, squares
from small_models import KINDS
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import PeerLost, PlanError, RanksDiffer, UsageError
from shoal.pipeline.schedule import Task, most_in_flight, one_forward_one_backward
from shoal.pipeline.schedule_run import ScheduledRun
from shoal_tools.testing.planned_faults import FaultyComm, Kill, Planted, RandomDelay
from shoal_tools.testing.saved_bytes import SavedBytes

slow = pytest.mark.slow
HALVES = {"first": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "head": 1}


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[Task]]]:
    """The rank and the tasks of each scheduled call, in the order in which they were done."""
    found: list[tuple[int, list[Task]]] = []
    compute = ScheduledRun.compute

    def noted(run: ScheduledRun) -> None:
        done: list[Task] = []
        came = run._inbox.note_arrival

        def note(task: Task) -> None:
            done.append(task)
            came(task)

        monkeypatch.setattr(run._inbox, "note_arrival", note)
        compute(run)
        found.append((run._run.comm.rank, done))

    monkeypatch.setattr(ScheduledRun, "compute", noted)
    return found


def early(kind: str, loop: Callable[..., Any] = plain, **options: Any) -> Script:
    """A script for one of the small models, with a compute_loss."""
    found = KINDS[kind]

    def compute_loss(model: nn.Module, of_batch: Batch) -> Tensor:
        x, y = of_batch
        output = model(*x) if isinstance(x, tuple) else model(x)
        loss: Tensor = found.loss_fn(output, y) if found.loss_fn else output[1]
        return loss

    def both(model: Any, returned: Any, optimizer: Any, batches: list[Batch]) -> Any:
        return loop(model, returned or compute_loss, optimizer, batches)

    return Script(
        model=built(found.make),
        batches=found.batches(),
        loss_fn=None,
        loop=both,
        optimizer=adamw,
        options={"compute_loss": compute_loss, "schedule": "1f1b", **options},
    )


@pytest.mark.parametrize(
    ("kind", "loop", "ranks", "parts"),
    [
        ("tied", clipped, 3, 2),
        ("own loss", plain, 2, 1),
        *(
            pytest.param(*case, marks=slow)
            for case in [
                ("mlp", plain, 2, 2),
                ("mlp", plain, 2, 4),
                ("gpt", clipped, 4, 2),
                ("gpt", plain, 4, 1),
                ("tied", clipped, 4, 4),
                ("tied", plain, 2, 2),
                ("own loss, tied", clipped, 3, 1),
                ("vit", plain, 2, 2),
                ("unet", plain, 3, 2),
                ("lstm", plain, 4, 2),
                ("adapted", plain, 2, 2),
                ("frozen first", plain, 3, 2),
            ]
        ),
    ],
)
def test_it_trains_as_one_process(
    kind: str, loop: Any, ranks: int, parts: int, orders: list[Any]
) -> None:
    tried = early(kind, loop, **({} if parts == 1 else {"micro_batches": parts}))
    assert_same(tried, ranks)
    assert len(orders) == ranks * len(tried.batches) * (2 if loop is clipped else 1)


@pytest.mark.parametrize("stations", [2, 3, 4, 7])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("is_tied", [False, True])
def test_each_task_comes_behind_all_that_it_needs(stations: int, parts: int, is_tied: bool) -> None:
    ranks = stations - is_tied
    holders = tuple(station % ranks for station in range(stations))
    brings = tuple(rank for rank in range(ranks) for _ in range(1 if rank == 1 else parts))
    order = one_forward_one_backward(holders, brings)
    assert len({*order}) == len(order) == 2 * stations * len(brings)
    done = set[Task]()
    kept = [0] * stations
    for task in order:
        station, micro, is_back = task
        if not is_back:
            assert station == 0 or Task(station - 1, micro, False) in done
        elif station + 1 < stations:
            assert Task(station + 1, micro, True) in done
        else:
            of_rank = [m for m, rank in enumerate(brings) if rank == brings[micro]]
            assert {Task(station, m, False) for m in of_rank} <= done
        kept[station] += -1 if is_back else 1
        assert kept[station] <= most_in_flight(stations, station, parts)
        done.add(task)
    assert not any(kept)


def test_a_station_keeps_few_micro_batches(orders: list[tuple[int, list[Task]]]) -> None:
    early("gpt", micro_batches=2).on_ranks(3)
    for rank, done in orders:
        kept = most = 0
        for task in done:
            kept += -1 if task.is_back else 1
            most = max(most, kept)
        assert most <= most_in_flight(3, rank, 2) < len(done) / 2


def peaks(schedule: str, parts: int) -> list[int]:
    """The most bytes that autograd keeps on each of two ranks."""

    def loop(rank: int, model: Any, compute: Any, optimizer: Any) -> int:
        compute(model, batch(rank, rows=64)).backward()
        saved = SavedBytes(model.parameters())
        with saved.watch():
            compute(model, batch(rank, rows=64)).backward()
        assert saved.now == 0
        return saved.peak

    options = {"sample": batch(0, rows=64), "micro_batches": parts, "pins": pins_of(HALVES)}
    return trained(loop, schedule=schedule, **options)


def trained(loop: Callable[..., Any], ranks: int = 2, **options: Any) -> list[Any]:
    """What a loop of a small model returns on each rank."""
    options = {"compute_loss": of_squares, "schedule": "1f1b", **options}
    return piped(Blocks(), loop, ranks, None, **options)


def of_squares(model: Any, of_batch: Batch) -> Tensor:
    return squares(model(of_batch[0]), of_batch[1])


def test_it_keeps_fewer_bytes() -> None:
    """Of 8 micro-batches on two ranks the first keeps 5, and the second 4."""
    for rank, (all_of_them, few) in enumerate(
        zip(peaks("all_forward", 4), peaks("1f1b", 4), strict=True)
    ):
        assert few < (0.75 if rank == 0 else 0.65) * all_of_them


def both_ways(loop: Callable[..., Any], model: nn.Module, **options: Any) -> None:
    """Both schedules give the same gradients."""
    options = {"pins": pins_of(HALVES), **options}
    got = [
        piped(copy.deepcopy(model), loop, 2, None, schedule=schedule, **options)
        for schedule in ("all_forward", "1f1b")
    ]
    for one, other in zip(*got, strict=True):
        assert difference(one, other) <= 1e-10


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_hooks_see_whole_gradients_in_backward() -> None:
    def loop(rank: int, model: Any, compute: Any, optimizer: Any) -> Any:
        seen: list[Tensor] = []
        own = [model.first.weight, model.head.weight][rank]
        own.register_hook(lambda grad: seen.append(grad.clone()))
        loss = compute(model, batch(rank))
        own.register_hook(lambda grad: grad * 2)
        assert not seen
        loss.backward()
        (hooked,) = seen
        return {"hooked": hooked, "held": gradients(model)["first.weight"]}

    both_ways(loop, Blocks(), compute_loss=of_squares)


def test_an_output_can_be_read_before_and_after() -> None:
    """Before, the forward runs for it, and micro-batches go back later."""

    def compute_loss(model: Any, of_batch: Batch) -> Any:
        output = model(of_batch[0])
        if of_batch[0].shape[0] == 3:
            assert output.argmax(1).shape == (3,)
        return squares(output, of_batch[1]), output

    def loop(rank: int, model: Any, compute: Any, optimizer: Any) -> Any:
        for rows in (3, 4):
            loss, output = compute(model, batch(rank, rows=rows))
            with torch.no_grad():
                seen = output + 0
            torch.testing.assert_close(squares(seen, batch(rank, rows=rows)[1]), loss.detach())
            loss.backward()
        return gradients(model)

    both_ways(loop, Blocks(), compute_loss=compute_loss)


def test_evaluation_goes_nowhere(orders: list[Any]) -> None:
    def loop(rank: int, model: Any, compute: Any, optimizer: Any) -> None:
        with torch.no_grad():
            compute(model, batch(rank))
        model.eval()
        compute(model, batch(rank)).backward()
        model.train()
        compute(model, batch(rank))  # never goes back
        compute(model, batch(rank, 1)).backward()
        optimizer.step()

    trained(loop)
    assert len(orders) == 4


def test_rows_of_bfloat16_autocast(orders: list[Any]) -> None:
    """A cast of a weight is made once, and each micro-batch goes back through it."""
    found, got = KINDS["mlp"], []

    def compute_loss(model: Any, of_batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(of_batch[0])
        return F.cross_entropy(output.float(), of_batch[1])

    def loop(model: Any, compute: Any, optimizer: Any, batches: list[Batch]) -> Any:
        return plain(model, compute or compute_loss, optimizer, batches)

    for schedule in ("all_forward", "1f1b"):
        tried = Script(
            model=built(found.make, torch.float32),
            batches=[(x.float(), y) for x, y in found.batches()],
            loss_fn=None,
            loop=loop,
            options={"compute_loss": compute_loss, "schedule": schedule},
        )
        pins = {"*": "pipeline:1", "0": "pipeline:0"}
        got += [[state for _, state in tried.on_ranks(2, pins)]]
    assert orders and difference(got[0][0], got[1][0]) < 5e-3


def _twice(rank: int, model: Any, compute: Any, optimizer: Any) -> None:
    loss = compute(model, batch(rank))
    loss.backward(retain_graph=True)
    loss.backward()


def _scaled_otherwise(rank: int, model: Any, compute: Any, optimizer: Any) -> None:
    (compute(model, batch(rank)) * (1 + rank)).backward()


def _of_two_numbers(model: Any, of_batch: Batch) -> Tensor:
    output = model(of_batch[0])
    return squares(output, of_batch[1]) + output.square().mean()


def _with_float16(model: Any, of_batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return of_squares(model, of_batch)


def _a_step(rank: int, model: Any, compute: Any, optimizer: Any) -> None:
    compute(model, batch(rank)).backward()


@pytest.mark.parametrize(
    ("loop", "compute_loss", "kind", "said"),
    [
        (_twice, of_squares, UsageError, "second backward"),
        (_scaled_otherwise, of_squares, RanksDiffer, "scale their losses otherwise"),
        (_a_step, _of_two_numbers, UsageError, "second number with a gradient"),
        (_a_step, _with_float16, UsageError, "before a scaler has scaled the loss"),
    ],
)
def test_what_it_does_not_serve_is_said(
    loop: Any, compute_loss: Any, kind: type[Exception], said: str
) -> None:
    options = {"compute_loss": compute_loss, "schedule": "1f1b"}
    for error in errors_of(Blocks(), loop, loss_fn=None, **options).values():
        assert isinstance(error, kind)
        with pytest.raises(kind, match=said):
            raise error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pins": {"*": "replicate"}}, "is for a pipeline, and the plan has none"),
        ({"compute_loss": None}, "needs a compute_loss"),
        ({"schedule": "gpipe"}, "the order of a schedule is 'all_forward' or '1f1b'"),
        ({"compute_loss": lambda m, b: (m(b[0]) - b[1]).square().sum()}, "this one is a sum"),
    ],
)
def test_it_is_refused_where_it_cannot_be(options: dict[str, Any], said: str) -> None:
    loss_fn = squares if options.get("compute_loss", 0) is None else None
    options = {"compute_loss": of_squares, "schedule": "1f1b", "pins": PINS, **options}
    with pytest.raises((PlanError, UsageError), match=said):
        piped(Blocks(), lambda *_: None, 2, loss_fn, **options)


def test_a_plan_has_it() -> None:
    def loop(rank: int, model: Any, compute: Any, optimizer: Any) -> Any:
        assert "2 micro-batches at most, of 2" in str(shoal.explain(model))
        return shoal.plan_of(model)

    plan, _ = trained(loop)
    assert plan.features["pipeline_schedule"] == {"order": "1f1b"}


def test_random_delays_change_nothing() -> None:
    def loop(rank: int, model: Any, compute: Any, optimizer: Any) -> Any:
        for step, rows in enumerate((4, 1 + rank, 3 - rank)):
            compute(model, batch(rank, step, rows)).backward()
        return model.state_dict() | gradients(model)

    def delayed(comm: Any) -> FaultyComm:
        return FaultyComm(comm, [RandomDelay(0.001, 1)])

    options = {"compute_loss": of_squares, "micro_batches": 2}
    usual = piped(Blocks(), loop, 3, None, schedule="1f1b", **options)
    model = Blocks()
    model.load_state_dict({n: usual[0][n] for n in model.state_dict()})
    late = piped(model, loop, 3, None, delayed, schedule="1f1b", **options)
    exact = piped(copy.deepcopy(model), loop, 3, None, schedule="all_forward", **options)
    assert difference(exact[0], late[0]) <= 1e-10


class _Breaks(nn.Linear):
    """A layer that fails in one of its backwards."""

    left: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.left is not None and output.requires_grad:
            output.register_hook(self._gone_back)
        return output

    def _gone_back(self, grad: Tensor) -> None:
        assert self.left is not None
        self.left -= 1
        if self.left < 0:
            raise Planted("backward")


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=slow), 2])
def test_a_rank_that_fails_in_the_middle_ends_all(lost: int) -> None:
    def loop(rank: int, model: Any, compute: Any, optimizer: Any) -> None:
        compute(model, batch(rank)).backward()
        for module in model.modules():
            if rank == lost and isinstance(module, _Breaks):
                module.left = 1  # the second micro-batch's backward fails
        compute(model, batch(rank, 1)).backward()

    model = Blocks(lambda: _Breaks(6, 6))
    pins = {"first": "pipeline:0", "blocks.0": "pipeline:0", "blocks.[12]": "pipeline:1"}
    pins |= {"blocks.3": "pipeline:2", "head": "pipeline:2"}
    begin = time.monotonic()
    options = {"compute_loss": of_squares, "schedule": "1f1b", "pins": pins}
    errors = errors_of(model, loop, 3, loss_fn=None, **options)
    assert time.monotonic() - begin < SOON_S
    for rank, error in errors.items():
        assert isinstance(error, Planted if rank == lost else PeerLost)
        assert rank == lost or error.rank == lost


@pytest.mark.parametrize("at", [9, *(pytest.param(at, marks=slow) for at in (2, 5, 13, 17, 22))])
def test_a_rank_that_dies_at_a_message_is_named_by_all(at: int) -> None:
    comms: dict[int, FaultyComm] = {}

    def wrapped(comm: Any) -> FaultyComm:
        return comms.setdefault(comm.rank, FaultyComm(comm, []))

    def loop(rank: int, model: Any, compute: Any, optimizer: Any) -> None:
        compute(model, batch(rank)).backward()
        if rank == 1:
            comms[1].suffer(Kill(1, comms[1].operations + at))
        for step in range(1, 3):
            compute(model, batch(rank, step)).backward()

    options = {"compute_loss": of_squares, "schedule": "1f1b"}
    errors = errors_of(Blocks(), loop, 3, loss_fn=None, wrapped=wrapped, **options)
    assert {rank: getattr(errors[rank], "rank", None) for rank in (0, 2)} == {0: 1, 2: 1}
