"""A perceptron of 3 million parameters, 256 rows a rank: as many rows as make sending them no
gain.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, WIDTH, PIXELS = 10, 1024, 784


def data() -> DataLoader:
    """Noise, by a fixed seed."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(1 << 13, PIXELS, generator=draw)
    return DataLoader(
        TensorDataset(rows, torch.randint(CLASSES, (1 << 13,), generator=draw)), batch_size=256
    )


def layers() -> list[nn.Module]:
    """All of it."""
    widths = (PIXELS, WIDTH, WIDTH, WIDTH)
    hidden = [
        part for taken, given in pairwise(widths) for part in (nn.Linear(taken, given), nn.ReLU())
    ]
    return [*hidden, nn.Linear(WIDTH, CLASSES)]


def model() -> nn.Module:
    """A new one."""
    return nn.Sequential(*layers())


def loss() -> nn.Module:
    """Mean cross entropy."""
    return nn.CrossEntropyLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(params, lr=1e-3)
