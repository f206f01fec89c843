"""Eight fully connected layers of 4 MB each on little data: next to no compute, so that a step is
its exchange.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, LAYERS, CLASSES = 1024, 8, 10


def data() -> DataLoader:
    """Made up rows, eight a rank."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4096, WIDTH, generator=generator)
    return DataLoader(
        TensorDataset(rows, torch.randint(CLASSES, (len(rows),), generator=generator)),
        batch_size=8,
        shuffle=True,
    )


def model() -> nn.Module:
    """33.6 MB of weights."""
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def loss() -> nn.Module:
    """Mean cross entropy."""
    return nn.CrossEntropyLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)
