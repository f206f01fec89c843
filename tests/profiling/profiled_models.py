"""Small models, each with one thing in it that a profile must notice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Text(nn.Module):
    """Token ids to logits: an embedding, borrowed attention weights, a root parameter, dropout and
    an unused layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.zeros(5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) + self.position
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(self.drop(self.norm(h)))


class Image(nn.Module):
    """Pixels to classes: convolutions, running statistics, a frozen layer, and a counter that
    forward raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 6, 3, stride=2, groups=2)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = self.grouped(F.relu(self.norm(self.stem(x)))).mean((2, 3))
        return self.head(self.frozen(h))


class OwnLoss(nn.Module):
    """Takes keyword arguments and returns its own loss, in the form asked for."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.fc = nn.Linear(4, 3)

    def forward(self, features: Tensor, labels: Tensor) -> Any:
        loss = F.cross_entropy(self.fc(features), labels)
        return {
            "scalar": loss,
            "dict": {"loss": loss, "logits": None},
            "attribute": WithLoss(loss),
        }[self.form]


class WithLoss:
    """An output object as language model libraries return it."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def token_loss(output: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def ids() -> Tensor:
    """A batch of two rows of five tokens."""
    return torch.arange(10).view(2, 5)


def pixels() -> tuple[Tensor, Tensor]:
    """A batch of four 8×8 images and their classes."""
    return torch.linspace(-1, 1, 256).view(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
