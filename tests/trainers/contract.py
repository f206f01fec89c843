"""The contract of adapters: seven points that hold under every trainer that hosts Shoal.

    1  loss       the loss is a function of the model and a batch
    2  first      the first batch parallelises the model, which is ordinary until then
    3  gather     all ranks take part in a state, and rank 0 alone writes it
    4  epoch      every row comes once an epoch, and every rank takes as many steps
    5  no_sync    gradients inside of an accumulation window stay on their rank
    6  clipping   the norm that is clipped is that of whole gradients
    7  once       nothing is wrapped or sharded twice

A host is one file in hosts/, with a class `Host` there. `ranks.py` runs all tasks of a host in one
start of two ranks, and again in one process by the trainer alone. `test_contract.py` compares.
To add a host, write its file and its name into HOSTS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import shoal

# file in hosts/, and the package that it needs
HOSTS = {
    "lightning": "pytorch_lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
}

ROWS, GLOBAL_BATCH, WIDTH, CLASSES = 27, 4, 6, 10  # the last batch is uneven: 3 rows


class Rows(Dataset[dict[str, Tensor]]):
    """Made-up rows, each with its number."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(5)
        self.x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=made)
        self.y = torch.randint(CLASSES, (ROWS,), generator=made)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.x[row], "y": self.y[row], "row": torch.tensor(row)}


class Net(nn.Module):
    """A small classifier in float64, the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first = nn.Linear(WIDTH, 8, dtype=torch.float64)
            self.middle = nn.Linear(8, 8, dtype=torch.float64)
            self.head = nn.Linear(8, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def compute_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the loss of a batch, as each host's step does (point 1)."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer that every host trains by."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.01)


@dataclass(frozen=True)
class Task:
    """A training that a host is asked for, on the rows in their order.

    Args:
        pins: of the plan, by layer names as the host's model has them.
        epochs: number of passes over the rows.
        accumulate: number of batches in a step.
        clip: norm to clip gradients to; None: do not.
        stop_at: number of steps after which the state is saved. A new trainer then goes on from it.
        sharded: whether the loader that the host is given went through `shoal.shard` already.
    """

    pins: Mapping[str, str] | None = None
    epochs: int = 2
    accumulate: int = 1
    clip: float | None = None
    stop_at: int | None = None
    sharded: bool = False


TASKS = {
    "auto": Task(),
    "sliced": Task({"*": "sliced"}),
    "factor": Task({"*": "factor"}),
    "head": Task({"*": "replicate", "*head": "head"}),
    "pipeline": Task({"*": "pipeline"}),
    "accumulated": Task({"*": "replicate"}, accumulate=2),
    "clipped": Task({"*": "sliced", "*middle": "column"}, clip=0.1),
    "resumed": Task({"*": "sliced"}, stop_at=3),
    "sharded": Task(sharded=True),
}


@dataclass
class Watch:
    """A record of one training on this rank. A host calls its methods as it trains."""

    rows: list[list[int]] = field(default_factory=list)  # of each batch
    ordinary: list[bool] = field(default_factory=list)  # whether the model had no plan, by batch
    grads: list[float] = field(default_factory=list)  # a sum of gradients behind each backward
    strategies: list[str] = field(default_factory=list)  # of the plan, once training has ended
    weights: dict[str, Tensor] = field(default_factory=dict)  # once training has ended
    files: list[str] = field(default_factory=list)  # that this rank alone has written

    def batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        """Note a batch, before its loss is computed."""
        self.rows.append(batch["row"].tolist())
        self.ordinary.append(shoal.plan_of(model) is None)

    def backward(self, net: Net) -> None:
        """Note gradients, behind a backward."""
        grad = net.first.weight.grad
        self.grads.append(float("nan") if grad is None else float(grad.sum()))

    def end(self, model: nn.Module, net: Net) -> None:
        """Note the plan and the weights, while the model is parallelised still."""
        plan = shoal.plan_of(model)
        self.strategies = [] if plan is None else [choice.strategy for choice in plan.choices]
        self.weights = {name: value.clone() for name, value in net.state_dict().items()}


class Host(ABC):
    """A trainer that Shoal's adapter is put into.

    With more than one rank it trains by the adapter, else by the trainer as it comes.
    """

    @abstractmethod
    def train(self, task: Task, folder: Path) -> Watch:
        """Train a new `Net` on `Rows`, and return what this rank has seen of it.

        Args:
            task: what to train. A batch has GLOBAL_BATCH rows of all ranks.
            folder: an empty folder for checkpoints, which all ranks share.
        """

    @abstractmethod
    def twice(self) -> str:
        """Give the adapter a model that is parallelised already, and return the error's text."""
