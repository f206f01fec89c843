"""What a model keeps beside its output is of one micro-batch where its end is elsewhere: no loss
goes through it unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import Batch, built, features
from torch import Tensor, nn
from with_tail import CLASSES, WIDTH, Net, assert_same, together

from shoal.core.errors import UsageError

Looks = Callable[[Any], Tensor]


class Keeping(Net):
    """A net that keeps what it computes, and what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.seen: dict[str, Tensor] = {}
        self.over_calls: list[Tensor] = []
        self.inputs = self.hidden = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.inputs = x
        self.hidden = torch.sigmoid(self.gate(x))
        self.seen["hidden"] = self.hidden
        self.over_calls.append(self.hidden.mean())
        return self.tail(self.body(x * self.hidden))


def by_hook(model: Any, loss_fn: Any, batch: Batch) -> Tensor:
    given: list[Tensor] = []
    handle = model.gate.register_forward_hook(lambda module, args, output: given.append(output))
    loss = loss_fn(model(batch[0]), batch[1])
    handle.remove()
    return loss + given[0].square().mean()


def beside(look: Looks) -> Callable[[Any, Any, Batch], Tensor]:
    def loss_of(model: Any, loss_fn: Any, batch: Batch) -> Tensor:
        loss = loss_fn(model(batch[0]), batch[1])
        return loss + look(model).square().mean()

    return loss_of


LOSSES = {
    "attribute": (beside(lambda model: model.hidden), "attribute hidden"),
    "dict": (beside(lambda model: model.seen["hidden"]), "attribute seen"),
    "list": (beside(lambda model: torch.stack(model.over_calls)), "attribute over_calls"),
    "hook": (by_hook, "a forward hook on gate"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_through_what_is_kept_is_refused(case: str) -> None:
    loss_of, where = LOSSES[case]

    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
        loss_of(model, loss_fn, batches[0]).backward()

    with pytest.raises(UsageError, match="keeps of one micro-batch") as caught:
        together(built(Keeping), loop)
    assert where in str(caught.value) and 'pins={"tail.1": "replicate"' in str(caught.value)


def test_what_is_kept_may_be_looked_at_and_rows_are_the_batchs() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            assert torch.equal(model.inputs, x)
            assert 0 < model.hidden.mean().item() < 1
            optimizer.step()

    assert_same(built(Keeping), loop)


def test_a_hook_may_change_what_goes_on() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
        model.body.register_forward_hook(lambda module, args, output: 2 * output)
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    assert_same(built(Net), loop, given=features(WIDTH, CLASSES))
