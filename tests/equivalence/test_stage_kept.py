"""Values that a model keeps besides its output, where hosts without rows hold its end."""

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
        self.inputs = self.hidden = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.inputs = x
        self.hidden = torch.sigmoid(self.gate(x))
        self.seen["hidden"] = self.hidden
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


def test_a_loss_through_a_hook_on_the_front_trains() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            by_hook(model, loss_fn, batch).backward()
            optimizer.step()

    assert_same(built(Keeping), loop, workers=2)


LOOKS: dict[str, Looks] = {
    "attribute": lambda model: model.hidden,
    "dict": lambda model: model.seen["hidden"],
}


@pytest.mark.parametrize("case", LOOKS)
def test_a_tensor_that_forward_keeps_is_refused_with_the_way_out(case: str) -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
        beside(LOOKS[case])(model, loss_fn, batches[0]).backward()

    with pytest.raises(UsageError, match=r"forward has kept(.|\n)*let forward return it"):
        together(built(Keeping), loop, workers=2)


def test_a_hook_may_change_what_goes_on() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
        model.body.register_forward_hook(lambda module, args, output: 2 * output)
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    assert_same(built(Net), loop, given=features(WIDTH, CLASSES))
