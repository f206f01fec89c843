"""A small body and a head of 200,000 classes, as in face recognition: 512 features, 32 rows a
rank.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 200_000


def data() -> DataLoader:
    """Noise, by a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    rows, labels = (
        torch.randn(1024, 128, generator=generator),
        torch.randint(NUM_CLASSES, (1024,), generator=generator),
    )
    return DataLoader(TensorDataset(rows, labels), batch_size=32)


def model() -> nn.Module:
    """Two layers and the head: 102,999,872 parameters."""
    return nn.Sequential(
        nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, NUM_CLASSES)
    )


def loss() -> nn.Module:
    """Mean cross entropy."""
    return nn.CrossEntropyLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)
