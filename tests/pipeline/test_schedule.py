"""One forward, one backward: exact, and few micro-batches at a time."""

from __future__ import annotations

from typing import Any

import pytest
from one_process import Batch, adamw, built
from piped import Script, assert_same
from small_models import KINDS
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from shoal.pipeline.schedule import Task
from shoal.pipeline.scheduled import ScheduledRun

slow = pytest.mark.slow


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, Task]]]:
    """The tasks of each scheduled call, with their ranks, as they are done."""
    found: list[list[tuple[int, Task]]] = []
    compute = ScheduledRun.compute

    def noted(run: ScheduledRun) -> None:
        mine: list[tuple[int, Task]] = []
        came = run._inbox.came
        rank = run._run.comm.rank

        def note(task: Task) -> None:
            mine.append((rank, task))
            came(task)

        monkeypatch.setattr(run._inbox, "came", note)
        compute(run)
        found.append(mine)

    monkeypatch.setattr(ScheduledRun, "compute", noted)
    return found


def plain(model: Any, compute: Any, optimizer: Any, batches: list[Batch]) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = compute(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def clipped(model: Any, compute: Any, optimizer: Any, batches: list[Batch]) -> None:
    """Adds up the gradients of two batches, scales the losses, and clips."""
    for first in range(len(batches)):
        for batch in (batches[first], batches[first - 1]):
            (compute(model, batch) / 2).backward()
        assert clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
        optimizer.zero_grad()


def early(kind: str, loop: Any, **options: Any) -> Script:
    """A script for one of the small models, with a compute_loss."""
    found = KINDS[kind]

    def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        output = model(*x) if isinstance(x, tuple) else model(x)
        loss: Tensor = (
            found.loss_fn(output, y) if found.loss_fn else getattr(output, "loss", output[1])
        )
        return loss

    def both(model: Any, returned: Any, optimizer: Any, batches: list[Batch]) -> Any:
        return loop(model, returned or compute_loss, optimizer, batches)

    options = {"compute_loss": compute_loss, "schedule": "1f1b", **options}
    return Script(
        model=built(found.make),
        batches=found.batches(),
        loss_fn=None,
        loop=both,
        optimizer=adamw,
        options=options,
    )


@pytest.mark.parametrize(
    ("kind", "loop", "ranks", "parts"),
    [
        ("mlp", plain, 2, 2),
        ("tied", clipped, 3, 2),
        ("gpt", clipped, 4, 2),
        ("own loss", plain, 2, 1),
    ],
)
def test_it_trains_as_one_process(
    kind: str, loop: Any, ranks: int, parts: int, orders: list[list[tuple[int, Task]]]
) -> None:
    options = {} if parts == 1 else {"micro_batches": parts}
    script = early(kind, loop, **options)
    assert_same(script, ranks)
    assert len(orders) == ranks * len(script.batches) * (2 if loop is clipped else 1)
