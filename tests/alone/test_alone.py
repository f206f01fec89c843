"""A rank that evaluates, saves or reads alone, as `if rank == 0:` does: training goes on, exactly.

The other ranks wait in the next forward, or are at the end of their program.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer, UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.engine import attendance, shared_parts
from shoal.engine.shared_parts import SharedParts
from shoal.front.session_start import using
from shoal.tensors.sharded_parameter import OverRanks

LAYERS = ("0", "2", "4")
WAYS = {
    "column": ("column", "replicate", "replicate"),
    "row": ("replicate", "row", "replicate"),
    "pair": ("column_pair", "row_pair", "replicate"),
    "head": ("replicate", "sliced", "head"),
    "sliced": ("sliced", "sliced", "sliced"),
    "factor": ("factor", "factor", "factor"),
    "pipeline": ("pipeline:0", "pipeline:1", "pipeline:1"),
    "embedding": ("embedding", "replicate", "replicate"),
    "tied": ("tied", "replicate", "tied"),
}
OF_IDS = ("embedding", "tied")
READS = [way for way in WAYS if way not in ("sliced", "factor")]  # ways in which weights are apart
STEPS = 3
Seen = dict[str, Any]
Habit = Callable[[nn.Module, Any, Tensor], Seen]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def quickly_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a rank that waits elsewhere not to come, at the first look."""
    monkeypatch.setattr(attendance, "_ELSEWHERE_S", 0.0)
    monkeypatch.setattr("shoal.comm.threads._LOOK_S", 0.05)
    monkeypatch.setattr("shoal.engine.lanes._POLL_S", 0.05)


def built(way: str) -> nn.Module:
    torch.manual_seed(5)
    first: list[nn.Module] = [nn.Linear(6, 8)]
    if way in OF_IDS:
        first = [nn.Embedding(11, 8)]
    last = nn.Linear(8, 11 if way == "tied" else 3)
    if way == "tied":
        last.weight = first[0].weight
    layers = [*first, nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), last]
    return nn.Sequential(*layers).double()


def batch(way: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(100 * rank + step)
    y = torch.randint(3, (4,), generator=draws)
    if way in OF_IDS:
        return torch.randint(11, (4,), generator=draws), y
    return torch.randn(4, 6, generator=draws, dtype=torch.float64), y


def evaluates(model: nn.Module, optimizer: Any, x: Tensor) -> Seen:
    model.eval()
    with torch.no_grad():
        outputs = [model(x), model(x[:2])]
    model.train()
    return {"first": outputs[0].clone(), "second": outputs[1].clone()}


def saves(model: nn.Module, optimizer: Any, x: Tensor) -> Seen:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    states = saved["optimizer"]["state"]
    return {
        **saved["model"],
        **{f"{n}.{key}": value for n, state in states.items() for key, value in state.items()},
    }


def copies(model: nn.Module, optimizer: Any, x: Tensor) -> Seen:
    return dict(copy.deepcopy(model).state_dict())


def pickles(model: nn.Module, optimizer: Any, x: Tensor) -> Seen:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=False).state_dict())


def generates(model: nn.Module, optimizer: Any, x: Tensor) -> Seen:
    with torch.inference_mode():
        for _ in range(3):
            best = model(x).argmax(1)
            x = x + best.view(-1, *[1] * (x.dim() - 1))
            x = x % 11 if x.dtype == torch.int64 else x
    return {"last": x.clone()}


def measures(model: nn.Module, optimizer: Any, x: Tensor) -> Seen:
    with torch.no_grad():
        return {
            "right": (model(x).argmax(1) == 1).sum(),
            "norm": sum(p.norm() for p in model.parameters()),
        }


HABITS: dict[str, Habit] = {
    habit.__name__: habit for habit in (evaluates, saves, copies, pickles, generates, measures)
}


def trained(
    model: nn.Module, loss_fn: Any, optimizer: Any, batches: Iterator[Any], habit: Habit | None
) -> list[Seen]:
    """The ordinary loop, with a habit behind the first step and the last."""
    seen = []
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        if habit is not None and step in (0, STEPS - 1):
            seen.append(habit(model, optimizer, x[:4]))
    return seen


def in_one_process(way: str, habit: Habit, ranks: int) -> tuple[list[Seen], Seen]:
    model = built(way)
    of_ranks = [[batch(way, rank, step) for step in range(STEPS)] for rank in range(ranks)]
    joined = (
        tuple(map(torch.cat, zip(*batches, strict=True))) for batches in zip(*of_ranks, strict=True)
    )
    seen = trained(model, nn.CrossEntropyLoss(), Adam(model.parameters(), 0.01), joined, habit)
    return seen, dict(model.state_dict())


def cluster_of(ranks: int) -> Cluster:
    hosts = tuple(f"host{rank}" for rank in range(ranks))
    return Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)


def on_ranks(way: str, work: Callable[..., Any], ranks: int = 2, **options: Any) -> list[Any]:
    """Each rank's result of `work(rank, model, loss_fn, optimizer)` on a model in parts."""
    whole = built(way)  # ranks share torch's random numbers

    def of_rank(comm: ThreadComm) -> Any:
        with using(comm, cluster_of(ranks)):
            model = copy.deepcopy(whole)
            model, loss_fn, optimizer = shoal.parallelize(
                model,
                nn.CrossEntropyLoss(),
                Adam(model.parameters(), 0.01),
                sample=batch(way, comm.rank, 0),
                pins=dict(zip(LAYERS, WAYS[way], strict=True)),
                **options,
            )
            return work(comm.rank, model, loss_fn, optimizer)

    return run(ranks, of_rank, timeout_s=20)


def assert_equal(seen: Seen, expected: Seen) -> None:
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(seen[name].double(), value.double(), rtol=0, atol=1e-10), name


def assert_trains_on(way: str, habit: Habit, ranks: int) -> None:
    """The first rank alone has the habit. It sees the same as in one process, and so do all."""
    expected, at_the_end = in_one_process(way, habit, ranks)

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> tuple[list[Seen], Seen]:
        batches = (batch(way, rank, step) for step in range(STEPS))
        seen = trained(model, loss_fn, optimizer, batches, None if rank else habit)
        return seen, dict(model.state_dict()) if not rank else {}

    (seen, state), *_ = on_ranks(way, work, ranks)
    for one, other in zip(seen, expected, strict=True):
        assert_equal(one, other)
    assert_equal(state, at_the_end)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_does_it_alone_and_training_goes_on(way: str, habit: str, ranks: int) -> None:
    assert_trains_on(way, HABITS[habit], ranks)


@pytest.mark.parametrize("way", ["pair", "pipeline"])
def test_it_is_told_once_and_nothing_is_kept(way: str, caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        for step in range(STEPS):
            x, y = batch(way, rank, step)
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            if rank == 0 and step < 2:
                evaluates(model, optimizer, x)

    with caplog.at_level(logging.WARNING, "shoal"):
        on_ranks(way, work)
    told = [record.message for record in caplog.records if "alone came to" in record.message]
    assert len(told) == 1
    assert "rank 0 alone" in told[0] and " MB in " in told[0]


def test_ranks_with_unlike_numbers_of_batches_evaluate_exactly() -> None:
    """Together as long as all have batches, and then each alone."""
    x, _ = batch("column", 9, 9)
    expected = [built("column")(x + number) for number in range(4)]

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> list[Tensor]:
        with torch.no_grad():
            return [model(x + number).clone() for number in range(1 + rank)]

    for outputs in on_ranks("column", work, 3):
        for output, wanted in zip(outputs, expected, strict=False):
            assert torch.allclose(output, wanted, rtol=0, atol=1e-10)


def test_a_model_that_is_only_used_is_served_by_ranks_that_have_left_it() -> None:
    whole, (x, _) = built("column"), batch("column", 0, 0)

    def of_rank(comm: ThreadComm) -> Tensor | None:
        with using(comm, cluster_of(2)):
            model = copy.deepcopy(whole)
            shoal.parallelize(model, None, None, sample=(x, None), pins={"0": "column"})
            if comm.rank:
                del model
                gc.collect()
                return None
            with torch.no_grad():
                return model(x).clone()

    output, _ = run(2, of_rank, timeout_s=20)
    assert torch.allclose(output, whole(x), rtol=0, atol=1e-10)


def test_all_ranks_together_read_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is alone, also behind a call in which one was."""

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> Seen:
        x, y = batch("row", rank, 0)
        loss_fn(model(x), y).backward()
        optimizer.step()
        if rank == 0:
            evaluates(model, optimizer, x)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        return saves(model, optimizer, x)

    first, second = on_ranks("row", work)
    assert_equal(first, second)
    assert len([each for each in caplog.records if "alone came to" in each.message]) == 1


def test_a_rank_reads_behind_its_step_while_others_are_late() -> None:
    """The others send parts once they have done the step, too."""
    come = threading.Event()

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> Seen:
        x, y = batch("column", rank, 0)
        loss_fn(model(x), y).backward()
        if rank:
            come.wait(10)
        optimizer.step()
        if rank:
            return {}
        threading.Timer(0.5, come.set).start()
        return dict(model.state_dict())

    model = built("column")
    of_ranks = [batch("column", rank, 0) for rank in range(2)]
    x, y = map(torch.cat, zip(*of_ranks, strict=True))
    nn.CrossEntropyLoss()(model(x), y).backward()
    Adam(model.parameters(), 0.01).step()
    seen, _ = on_ranks("column", work)
    assert_equal(seen, dict(model.state_dict()))


@pytest.mark.parametrize(("way", "layer"), [("column", 0), ("head", 4)], ids=["cut", "and owned"])
def test_values_that_others_have_changed_since_are_an_error(way: str, layer: int) -> None:
    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        x, y = batch(way, rank, 0)
        loss_fn(model(x), y).backward()
        optimizer.step()
        if rank:
            with torch.no_grad():
                model[layer].weight.mul_(2.0)
        else:
            model.state_dict()

    with pytest.raises(RanksDiffer, match="of which rank 1 has other ones") as caught:
        on_ranks(way, work)
    assert "after step 1, 1 changes later" in str(caught.value)


class PausingAdam(Adam):
    """Pauses in the middle of a step, once it is told to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pauses: Callable[[], object] = bool

    def step(self, closure: Any = None) -> Any:
        self.pauses()
        return super().step(closure)


@pytest.mark.parametrize("way", ["column", "pipeline"])
def test_nothing_is_read_in_the_middle_of_a_step(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(f"{__name__}.Adam", PausingAdam)
    inside = threading.Event()

    def pause() -> None:
        inside.set()
        time.sleep(1.0)

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        x, y = batch(way, rank, 0)
        loss_fn(model(x), y).backward()
        optimizer.step()
        if rank:
            optimizer.pauses = pause
            optimizer.step()
        else:
            inside.wait(10)
            model.state_dict()

    with pytest.raises(RanksDiffer, match="rank 1: after step 2, 0 changes later"):
        on_ranks(way, work)


@pytest.mark.parametrize("way", ["column", "pipeline"])
def test_a_whole_that_does_not_fit_is_refused_and_nothing_is_lost(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_parts, "_free_bytes", lambda device: 100)

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        x, y = batch(way, rank, 0)
        if rank == 0:
            with pytest.raises(UsageError, match="which do not fit") as caught:
                evaluates(model, optimizer, x)
            assert "0.0001 MB free" in str(caught.value)
            model.train()
        loss_fn(model(x), y).backward()  # goes on all the same
        optimizer.step()

    on_ranks(way, work)


def test_a_limit_of_memory_is_kept_by_wholes() -> None:
    weight = torch.zeros(100, 100, dtype=torch.float64)
    cut = OverRanks("weight", weight, 0, [100], ThreadComm())
    parts = [(cut, cut, weight)]
    limited = [SharedParts(nn.Linear(1, 1), None, limit) for limit in (None, 80_000, 79_999)]
    assert [each.missing(parts) for each in limited[:2]] == ["", ""]
    assert limited[2].missing(parts) == "0.08 MB, and a memory_limit of 0.08 MB"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["column", "pipeline"])
def test_others_that_wait_outside_of_shoal_are_taken_not_to_come(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "_PATIENCE_S", 0.5)
    barrier = threading.Barrier(2)

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> Seen | None:
        seen = None
        for step in range(2):
            x, y = batch(way, rank, step)
            loss_fn(model(x), y).backward()
            optimizer.step()
            seen = None if rank else saves(model, optimizer, x)
            barrier.wait(10)
        return seen

    assert on_ranks(way, work)[0] is not None
