"""A function that computes the loss of a batch: under every strategy as in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from one_process import (
    ALL_CUTS,
    BUCKETED,
    CUTS,
    OTHERS,
    UNEVEN,
    WAYS,
    Training,
    assert_same,
    built,
    features,
    integers,
    mlp,
)
from torch import Tensor, nn
from torch.nn import functional as F


class Tagger(nn.Module):
    """Tokens to a class for each token, by a layer of every kind that matters, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7, padding_idx=0)
        self.mix = nn.Conv1d(7, 5, 3, padding=1, bias=False)
        self.norm = nn.LayerNorm(5)
        self.hidden = nn.Linear(5, 9, bias=False)
        self.widen, self.narrow = nn.Linear(9, 11), nn.Linear(11, 9, bias=False)
        self.head = nn.Linear(9, 5)

    def forward(self, ids: Tensor) -> Tensor:
        h = F.relu(self.mix(self.embed(ids).transpose(1, 2))).transpose(1, 2)
        h = torch.tanh(self.hidden(self.norm(h)))
        return self.head(h + self.narrow(F.gelu(self.widen(h))))


def texts() -> list[dict[str, Tensor]]:
    """Batches as trainers of language models have them: a third of the labels is ignored."""
    batches = []
    for step in range(6):
        labels = integers(5, 12, 5, seed=step)
        ignored = integers(3, 12, 5, seed=step + 20) == 0
        batches.append(
            {
                "input_ids": integers(13, 12, 5, seed=step + 40),
                "labels": labels.masked_fill(ignored, -100),
            }
        )
    return batches


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As trainers compute it, which take the labels out of the batch."""
    labels = batch.pop("labels")
    logits = model(batch["input_ids"])
    batch["labels"] = labels
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def num_labels(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def plain(model: Any, compute_loss: Any, optimizer: Any, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        optimizer.step()


def accumulated(model: Any, compute_loss: Any, optimizer: Any, batches: Any) -> None:
    """Every second backward sends for two."""
    quiet = getattr(optimizer, "accumulate", nullcontext)
    for number, batch in enumerate(batches):
        with nullcontext() if number % 2 else quiet():
            compute_loss(model, batch).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


LOOPS: dict[str, Callable[..., None]] = {"plain": plain, "accumulated": accumulated}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("way", [*BUCKETED, *OTHERS, *ALL_CUTS])
def test_a_token_loss_that_is_counted(way: str, ranks: int, loop: str) -> None:
    training = Training(
        model=built(Tagger),
        batches=texts(),
        loss_fn=None,
        compute_loss=token_loss,
        count=num_labels,
        loop=LOOPS[loop],
    )
    assert_same(training, ranks, way, uneven=True)


@dataclass(frozen=True)
class Pictures:
    """A batch of a class of the user's own."""

    name: str
    x: Tensor
    y: Tensor


def of_pair(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "tuple": (lambda x, y: (x, y), of_pair),
    "list": (lambda x, y: [x, y], of_pair),
    "dict": (
        lambda x, y: {"name": "pictures", "x": x, "y": y},
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
    ),
    "dataclass": (
        lambda x, y: Pictures("pictures", x, y),
        lambda model, batch: F.cross_entropy(model(batch.x), batch.y),
    ),
    "tensor": (lambda x, y: x, lambda model, batch: model(batch).square().mean()),
}


@UNEVEN
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", [*WAYS, *CUTS])
def test_a_batch_of_every_form(way: str, form: str, uneven: bool) -> None:
    make, compute_loss = FORMS[form]
    training = Training(
        model=built(mlp),
        batches=[make(x, y) for x, y in features(7, 3)],
        loss_fn=None,
        compute_loss=compute_loss,
        loop=plain,
    )
    assert_same(training, 3, way, uneven=uneven)
