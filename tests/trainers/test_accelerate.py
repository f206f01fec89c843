"""`ShoalAccelerator` on ranks trains as `Accelerator` does alone, and its errors say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starting import on_ranks
from torch import nn
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate")

import shoal  # noqa: E402
from shoal.integrations.accelerate import ShoalAccelerator  # noqa: E402
from shoal.integrations.checks import check_version  # noqa: E402

ROWS = 22


@pytest.fixture
def accelerator() -> Iterator[Any]:
    made = ShoalAccelerator(cpu=True)
    yield made
    made.free_memory()
    made.state._reset_state(reset_partial_state=True)


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def parallelised(accelerator: Any) -> None:
    model, optimizer = pair()
    shoal.parallelize(model, None, optimizer)
    accelerator.prepare(model, optimizer)


def wrapped(accelerator: Any) -> None:
    model, optimizer = pair()
    accelerator.prepare(nn.DataParallel(model), optimizer)


def on_meta(accelerator: Any) -> None:
    accelerator.prepare(nn.Linear(4, 2, device="meta"))


def without_optimizer(accelerator: Any) -> None:
    accelerator.prepare(nn.Linear(4, 2))(torch.ones(1, 4))


def without_function(accelerator: Any) -> None:
    model, _ = accelerator.prepare(*pair())
    accelerator.compute_loss(model, torch.ones(1, 4))


def counted(accelerator: Any) -> None:
    accelerator.take_options({"count": len})
    model, _ = accelerator.prepare(*pair())
    model(torch.ones(1, 4))


def beside(accelerator: Any) -> None:
    accelerator.take_options({"compute_loss": lambda model, batch: model(batch).mean()})
    model, _ = accelerator.prepare(*pair())
    model(torch.ones(1, 4))


def other_version(accelerator: Any) -> None:
    check_version("accelerate", "1.14.2", (1, 15), (2,))


@pytest.mark.parametrize(
    ("wrong", "line", "remedy"),
    [
        (parallelised, "is parallelised already", "leave shoal.parallelize out"),
        (wrapped, "DataParallel is around the model already", "the module itself"),
        (on_meta, "on a meta device", "to_empty"),
        (without_optimizer, "no optimizer of its parameters", "accelerator.prepare(model, opt"),
        (without_function, "has no function to call", "ShoalAccelerator(compute_loss=f)"),
        (counted, "there is a count", "compute_loss=f, count=g"),
        (beside, "called beside the compute_loss", "accelerator.compute_loss(model, batch)"),
        (other_version, "this version of accelerate", "pip install 'accelerate>=1.15,<2'"),
    ],
)
def test_errors_say_what_to_do(
    accelerator: Any, wrong: Callable[[Any], None], line: str, remedy: str
) -> None:
    with pytest.raises(shoal.UsageError) as raised:
        wrong(accelerator)
    assert line in str(raised.value).splitlines()[0]
    assert remedy in str(raised.value)


def test_the_first_call_with_gradients_parallelises(accelerator: Any) -> None:
    model, _ = accelerator.prepare(*pair())
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert not shoal.is_parallelized(model)
    model(torch.ones(1, 4))
    assert shoal.is_parallelized(model)
    accelerator.free_memory()
    assert not shoal.is_parallelized(model)


def test_preparing_twice_does_nothing_more(accelerator: Any) -> None:
    """Point 7 of the contract: also for a loader that was sharded before."""
    loader = shoal.shard(DataLoader(torch.arange(10.0), batch_size=2))
    once = accelerator.prepare(loader)
    assert accelerator.prepare(once) is once
    assert [row for batch in once for row in batch.tolist()] == list(range(10))
    model, optimizer = accelerator.prepare(*pair())
    again = accelerator.prepare(model, optimizer)
    assert again == (model, optimizer)
    assert len(accelerator.first_calls) == 1


def test_accelerate_itself_leaves_a_sharded_loader_alone(accelerator: Any) -> None:
    loader = shoal.shard(DataLoader(torch.arange(10.0), batch_size=2))
    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader


def test_the_loader_tells_its_end(accelerator: Any) -> None:
    """So that a last short window steps, also in a pass that skips or goes on."""
    loader = accelerator.prepare(DataLoader(torch.arange(10.0), batch_size=4))
    for batches, expected in (
        (loader, [False, False, True]),
        (accelerator.skip_first_batches(loader, 2), [True]),
    ):
        assert [accelerator.gradient_state.end_of_dataloader for _ in batches] == expected
        assert not accelerator.gradient_state.in_dataloader


def test_a_registered_loader_goes_on_at_the_next_row(tmp_path: Path) -> None:
    whole = rows_trained(tmp_path)
    assert sorted(whole) == sorted([*range(20)] * 2)
    first = rows_trained(tmp_path, stop=3)
    assert first + rows_trained(tmp_path, going_on=True) == whole


def rows_trained(folder: Path, *, stop: int = 0, going_on: bool = False) -> list[float]:
    """Train on shuffled rows for two epochs, or save the state after some steps."""
    accelerator = ShoalAccelerator(cpu=True)
    torch.manual_seed(5)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.arange(20.0)[:, None], batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(loader)
    if going_on:
        accelerator.load_state(folder)
    rows: list[float] = []
    for _ in range(loader.epoch, 2):
        for batch in loader:
            rows += batch.flatten().tolist()
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if stop and len(rows) == 2 * stop:
                accelerator.save_state(folder)
                accelerator.free_memory()
                return rows
    accelerator.free_memory()
    return rows


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run accelerate_cases.py alone and on two ranks."""
    folder = tmp_path_factory.mktemp("accelerate")
    return on_ranks("accelerate_cases.py", folder=folder)


PLACES = [(1, 0), (2, 0), (2, 1)]
RANKS = [pytest.mark.processes, pytest.mark.slow, pytest.mark.minutes, pytest.mark.timeout(300)]


class TestOnRanks:
    """A model that returns its loss, streams, schedules, evaluation, several models."""

    pytestmark = RANKS

    @pytest.mark.parametrize("case", ["words", "stream", "two"])
    def test_weights_are_those_of_one_process(self, records: Any, case: str) -> None:
        for place in PLACES[1:]:
            for name, value in records[1, 0][case]["weights"].items():
                found = records[place][case]["weights"][name]
                torch.testing.assert_close(found, value, atol=1e-10, rtol=0)

    def test_bfloat16_is_as_near_as_in_ddp(self, records: Any) -> None:
        """Half of a batch is rounded otherwise than a whole one, by Shoal and by DDP alike."""
        for place in PLACES[1:]:
            own = records[place]["bf16"]["weights"]
            for other in (records[1, 0]["bf16"], records[place]["bf16 by DDP"]):
                for name, value in other["weights"].items():
                    torch.testing.assert_close(own[name], value, atol=2e-2, rtol=0)

    @pytest.mark.parametrize("case", ["words", "stream"])
    def test_windows_and_rates_are_those_of_one_process(self, records: Any, case: str) -> None:
        """Six batches in windows of four are two steps, the second of them short."""
        for place in PLACES:
            assert records[place][case]["steps"] == 4
            assert records[place][case]["rate"] == records[1, 0][case]["rate"]

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_every_row_is_evaluated_once_in_order(self, records: Any, when: str) -> None:
        expected = records[1, 0]["words"][when][0]
        for place in PLACES:
            found, losses, names = records[place]["words"][when]
            assert torch.equal(found, expected)
            assert len(losses) == names == ROWS

    def test_hooks_run_on_all_ranks_and_models_are_given_back(self, records: Any) -> None:
        for place in PLACES:
            assert records[place]["words"]["hooked"] == ["called"]
            assert records[place]["words"]["ordinary"]
