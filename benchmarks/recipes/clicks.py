"""A click-through model: 26 fields looked up in one table of 1,000,000 × 64, three layers, 512 rows
a rank.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

ROWS, WIDTH, FIELDS = 1_000_000, 64, 26


class Clicks(nn.Module):
    """The table, and a perceptron over all fields."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.top = nn.Sequential(
            nn.Linear(FIELDS * WIDTH, 256),
            nn.ReLU(),
            nn.Linear(256, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.table(ids).flatten(1)).squeeze(1)


def data() -> DataLoader:
    """Ids of equal chances, by a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(ROWS, (1 << 14, FIELDS), generator=generator)
    return DataLoader(
        TensorDataset(ids, torch.rand(1 << 14, generator=generator).round()), batch_size=512
    )


def model() -> nn.Module:
    """A new one."""
    return Clicks()


def loss() -> object:
    """Mean binary cross entropy."""
    return binary_cross_entropy_with_logits


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(params, lr=0.1)
