"""A recipe with a layer for each way to serve one, small, in a chain.

EVERY_WAY=sparse gives one table sparse gradients. Servers and tails do not take those.
"""

import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS = 60  # of the table with sparse gradients, by which its optimizer knows it
LINEARS = 8
SPARSE = os.environ.get("EVERY_WAY") == "sparse"


class Chain(nn.Module):
    """Two tables, batch norm, a pair of layers, and some linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rows = nn.Embedding(50, 16), nn.Embedding(ROWS, 16, sparse=SPARSE)
        self.norm = nn.BatchNorm1d(16)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(LINEARS))
        self.out = nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.table(ids).mean(1) + self.rows(ids).mean(1))
        hidden = self.narrow(torch.tanh(self.wide(hidden)))
        for linear in self.linears:
            hidden = hidden + torch.tanh(linear(hidden))
        out: Tensor = self.out(hidden)
        return out


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(50, (96, 4), generator=generator)
    return DataLoader(TensorDataset(ids, ids.sum(1) % 5), batch_size=12, shuffle=False)


def model() -> nn.Module:
    """The same in every process and on every thread: threads share the numbers that torch draws."""
    made, generator = Chain(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return made


def loss() -> nn.Module:
    return nn.CrossEntropyLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    params = list(params)
    groups = [
        {"params": [p for p in params if len(p) != ROWS], "momentum": 0.9},
        {"params": [p for p in params if len(p) == ROWS]},
    ]
    return torch.optim.SGD(groups, lr=0.1)
