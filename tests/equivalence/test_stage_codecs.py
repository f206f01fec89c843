"""The end of a model on hosts of its own, where what crosses to them and back are codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import Loop, State, assert_same_bits, built, difference, plain, state
from torch import nn
from with_tail import Net, together

import shoal
from shoal.core.errors import PlanError

# half of a step of 8 bits, and of 11: at most, of a value
MOST = {"bfloat16": 2**-8, "float16": 2**-11}
EXACT = {"body.*": "replicate", "tail.*": "stage"}


def reporting(model: nn.Module, loss_fn: Any, optimizer: Any, batches: Any) -> shoal.CodecReport:
    plain(model, loss_fn, optimizer, batches)
    return shoal.codec_report(model)


def trained(pins: dict[str, str], loop: Loop = reporting, **how: Any) -> tuple[State, Any]:
    states, results = together(built(Net, torch.float32), loop, pins=pins, given=given(), **how)
    assert_same_bits(states)
    return states[0], results[0]


def given() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(12, 6, generator=generator), torch.randint(5, (12,), generator=generator))
        for _ in range(5)
    ]


@pytest.mark.parametrize(
    ("codec", "way", "tail", "micro_batches"),
    [("bfloat16", "", 1, 2), ("float16", ":sliced", 2, 1)],
)
def test_training_is_near_the_exact_run_and_the_report_says_how_far(
    codec: str, way: str, tail: int, micro_batches: int
) -> None:
    how: dict[str, Any] = {"tail": tail, "micro_batches": micro_batches}
    exact, nothing = trained(EXACT, **how)
    coded, report = trained(EXACT | {"tail.*": f"stage+{codec}{way}"}, **how)
    assert not nothing.rows
    moved = difference(state(built(Net, torch.float32)), exact)
    assert 0 < difference(exact, coded) < 4 * MOST[codec] * moved
    (row,) = report.rows
    assert row.way == f"pipeline+{codec}" and row.layer == "3 layers on hosts"
    assert row.step_error is not None and 0 < row.step_error < MOST[codec]
    assert row.sent_bytes < row.exact_bytes


def test_an_evaluation_is_exact() -> None:
    def judged(model: nn.Module, loss_fn: Any, optimizer: Any, batches: Any) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            out: torch.Tensor = torch.zeros(()) + model(batches[0][0])
        return out

    _, exact = trained(EXACT, judged)
    _, coded = trained(EXACT | {"tail.*": "stage+bfloat16"}, judged)
    assert torch.equal(exact, coded)


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"tail.*": "stage+int8"}, "int8 cannot have the rows(.|\n)*bfloat16"),
        ({"tail.*": "stage", "tail.1": "stage+bfloat16"}, "has one codec, or none"),
    ],
)
def test_what_cannot_be_is_refused(pins: dict[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        trained({"body.*": "replicate"} | pins)
