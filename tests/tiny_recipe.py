"""A recipe whose step takes a millisecond: for the tests of the command line."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def data() -> tuple[DataLoader, DataLoader]:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(x, (x.sum(1) > 0).long())
    return DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=16)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def loss() -> nn.Module:
    return nn.CrossEntropyLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def accuracy(output: Tensor, target: Tensor) -> tuple[int, int]:
    return int((output.argmax(1) == target).sum()), len(target)
