"""Learning rates for a larger batch: by rule, after a warm-up, beside other schedulers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.front.session_start import using

pytestmark = pytest.mark.quick


def optimizer() -> SGD:
    weight, bias = nn.Linear(4, 2).parameters()
    return SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.02}])


def rates(made: SGD, scheduler: Any, steps: int) -> list[float]:
    """Of the first group before each step."""
    found = []
    for _ in range(steps):
        found.append(float(made.param_groups[0]["lr"]))
        made.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_rates_are_scaled(rule: str, factor: float) -> None:
    made = optimizer()
    scheduler = shoal.scaled_lr(made, batch=256, base_batch=64, rule=rule)
    assert rates(made, scheduler, 4) == pytest.approx([0.1 * factor] * 4)
    assert made.param_groups[1]["lr"] == pytest.approx(0.02 * factor)


def test_warm_up_rises_evenly_from_the_base_rate() -> None:
    made = optimizer()
    scheduler = shoal.scaled_lr(made, batch=512, base_batch=64, warmup_steps=4)
    assert rates(made, scheduler, 7) == pytest.approx([0.1, 0.275, 0.45, 0.625, 0.8, 0.8, 0.8])


def test_a_smaller_batch_has_no_warm_up() -> None:
    made = optimizer()
    scheduler = shoal.scaled_lr(made, batch=16, base_batch=64, warmup_steps=4)
    assert rates(made, scheduler, 3) == pytest.approx([0.025] * 3)


def test_a_schedule_goes_on_behind_the_warm_up() -> None:
    made = optimizer()
    warm = shoal.scaled_lr(made, batch=128, base_batch=64, warmup_steps=2)
    both = lr_scheduler.SequentialLR(
        made, [warm, lr_scheduler.ExponentialLR(made, 0.5)], milestones=[2]
    )
    assert rates(made, both, 5) == pytest.approx([0.1, 0.15, 0.2, 0.1, 0.05])


def test_a_schedule_beside_it_is_chained() -> None:
    made = optimizer()
    warm = shoal.scaled_lr(made, batch=128, base_batch=64)
    both = lr_scheduler.ChainedScheduler([warm, lr_scheduler.StepLR(made, 2, 0.5)], made)
    assert rates(made, both, 5) == pytest.approx([0.2, 0.2, 0.1, 0.1, 0.05])


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    made = SGD(nn.Linear(4, 2).parameters(), lr=torch.tensor(0.1))
    shoal.scaled_lr(made, batch=128, base_batch=64)
    assert isinstance(made.param_groups[0]["lr"], torch.Tensor)
    assert float(made.param_groups[0]["lr"]) == pytest.approx(0.2)


def test_what_is_saved_goes_on() -> None:
    made, again = optimizer(), optimizer()
    scheduler = shoal.scaled_lr(made, batch=512, base_batch=64, warmup_steps=4)
    before = rates(made, scheduler, 2)
    other = shoal.scaled_lr(again, batch=512, base_batch=64, warmup_steps=4)
    again.load_state_dict(made.state_dict())
    other.load_state_dict(scheduler.state_dict())
    assert before + rates(again, other, 3) == pytest.approx([0.1, 0.275, 0.45, 0.625, 0.8])


@pytest.mark.parametrize("first", ["optimizer", "scheduler"])
@pytest.mark.parametrize("steps", [2, 6])
def test_rates_follow_the_batch_of_a_run_that_goes_on_with_more_ranks(
    first: str, steps: int
) -> None:
    made, again = optimizer(), optimizer()
    scheduler = shoal.scaled_lr(made, batch=128, base_batch=64, warmup_steps=4)
    rates(made, scheduler, steps)
    other = shoal.scaled_lr(again, batch=512, base_batch=64, warmup_steps=4)
    if first == "scheduler":
        other.load_state_dict(scheduler.state_dict())
    again.load_state_dict(made.state_dict())
    if first == "optimizer":
        other.load_state_dict(scheduler.state_dict())
    undisturbed = optimizer()
    alone = shoal.scaled_lr(undisturbed, batch=512, base_batch=64, warmup_steps=4)
    expected = rates(undisturbed, alone, steps + 5)[steps:]
    assert rates(again, other, 5) == pytest.approx(expected)
    assert again.param_groups[1]["lr"] == pytest.approx(0.02 * 8)


def test_rates_follow_beside_another_schedule_and_back_to_the_first_batch() -> None:
    def both(batch: int) -> tuple[SGD, Any]:
        made = optimizer()
        warm = shoal.scaled_lr(made, batch=batch, base_batch=64)
        return made, lr_scheduler.ChainedScheduler([warm, lr_scheduler.StepLR(made, 3, 0.5)], made)

    found, (made, scheduler) = [], both(256)
    for batch in (128, 256, 64):
        found += rates(made, scheduler, 2)
        (old, state), (made, scheduler) = (made, scheduler.state_dict()), both(batch)
        scheduler.load_state_dict(state)
        made.load_state_dict(old.state_dict())
    assert found == pytest.approx([0.4, 0.4, 0.2, 0.1, 0.2, 0.2])


def test_both_batches_are_said(caplog: pytest.LogCaptureFixture) -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm):
            shoal.scaled_lr(optimizer(), batch=512, base_batch=64, warmup_steps=4)

    with caplog.at_level(logging.INFO, "shoal"):
        run(4, work, timeout_s=20)
    assert [record.getMessage() for record in caplog.records] == [
        "batch of all ranks 512 (128 a rank on 4 ranks), base batch 64: learning rates × 8 "
        "(linear), after a warm-up of 4 steps"
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "batch is a number of rows"),
        ({"base_batch": -3}, "base_batch is a number of rows"),
        ({"batch": float("nan")}, "batch is a number of rows"),
        ({"rule": "cubic"}, "one of linear, sqrt"),
        ({"warmup_steps": -1}, "number of steps"),
        ({"warmup_steps": 2.5}, "number of steps"),
    ],
)
def test_bad_input(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shoal.scaled_lr(optimizer(), **({"batch": 128, "base_batch": 64} | options))


def test_no_optimizer() -> None:
    with pytest.raises(UsageError, match="not a torch optimizer"):
        shoal.scaled_lr([optimizer()], batch=128, base_batch=64)  # type: ignore[arg-type]
