"""Pipelines whose values cross as codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import Batch, built
from piped import Script, assert_same, plain, with_evaluation
from small_models import Gpt, of_words, words

import shoal
from shoal.core.errors import PlanError
from shoal.pipeline.route import Outbox

CODED = {"*": "pipeline+bfloat16"}


def script(**how: Any) -> Script:
    model = built(Gpt, torch.float32)
    return Script(model=model, batches=words(), loss_fn=of_words, **how)


def test_a_rank_may_stand_before_the_codec() -> None:
    def loop(model: Any, *_: Any) -> Any:
        return shoal.plan_of(model)

    for pin in ("pipeline+bfloat16:1", "pipeline:1+bfloat16"):
        pins = {"*": pin, "words": "pipeline+bfloat16:0"}
        plan = script(loop=loop, options={"micro_batches": 2}).on_ranks(2, pins)[0][0]
        assert {choice.exchange for choice in plan.choices} == {"+bfloat16:0", "+bfloat16:1"}
        assert "rows of a rank in 2 parts" in str(plan)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}])
def test_codes_train_nearly_as_one_process(options: dict[str, Any]) -> None:
    assert_same(script(options=options), 3, within=2e-3, pins=CODED)
    with pytest.raises(AssertionError):
        assert_same(script(options=options), 3, within=1e-6, pins=CODED)


def test_half_of_the_bytes_cross_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[torch.dtype, int, int]] = []
    send = Outbox.send

    def noted(outbox: Outbox, tensor: torch.Tensor, to: int, *crossing: Any) -> None:
        before = len(outbox._pending)
        send(outbox, tensor, to, *crossing)
        for _, message in outbox._pending[before:]:
            sent.append((message.dtype, message.nbytes, tensor.nbytes))

    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> Any:
        plain(model, loss_fn, optimizer, batches[:1])
        return shoal.codec_report(model) if shoal.plan_of(model) else None

    tried = script(loop=loop)
    monkeypatch.setattr(Outbox, "send", noted)
    first = dict.fromkeys(("words", "places"), "pipeline+bfloat16:0")
    report = tried.on_ranks(2, {"*": "pipeline+bfloat16:1", **first})[0][0]
    coded = [(after, before) for dtype, after, before in sent if dtype is torch.uint8]
    assert len(coded) == 2 * 2  # of each rank's rows, there and back
    assert all(2 * after == before for after, before in coded)
    (row,) = report.rows
    assert row.way == "pipeline+bfloat16" and 2 * row.sent_bytes == row.exact_bytes > 0
    assert 0 < row.step_error < 0.01


def test_evaluation_is_exact() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> list[float]:
        losses = with_evaluation(model, loss_fn, optimizer, [])
        with torch.no_grad():
            losses.append(float(loss_fn(model(batches[0][0]), batches[0][1])))
        return losses

    coded, exact = script(loop=loop).on_ranks(2, CODED), script(loop=loop).on_ranks(2)
    assert [losses for losses, _ in coded] == [losses for losses, _ in exact]


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        ({"*": "pipeline", "head": "pipeline+bfloat16"}, "one codec, or none"),
        ({"*": "pipeline+int8"}, "cannot have the rows"),
        ({"*": "pipeline+bfloat16:7"}, "a rank that there is not"),
        ({"*": "pipeline+bfloat16:x"}, "names the rank"),
    ],
)
def test_what_codes_cannot_be(pins: dict[str, str], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        script().on_ranks(2, pins)
