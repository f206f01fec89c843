"""Trains for some steps, saves, and goes on elsewhere: on other ranks, under another plan.

    first     ranks, a way, steps 1 … 3 ──▶ a checkpoint in mid-epoch, and on to step 8: the truth
    second    other ranks, another way, from the checkpoint ──▶ step 8

Global batches do not depend on the number of ranks. Of 46 rows the last one has 10, so that rows
are uneven on 3 and 4 ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from one_process import SMALL, built, cluster_of, integers, sgd, state
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using
from shoal.servers.servers import serve

ROWS, BATCH, WORDS, WIDTH, CLASSES = 46, 12, 23, 6, 5
BEFORE, AFTER = 3, 5  # steps; an epoch has 4


class Net(nn.Module):
    """Something for every strategy: a table, two layers that are a pair, and an end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 9), nn.Linear(9, 7)
        self.tail = nn.Sequential(nn.Tanh(), nn.Linear(7, CLASSES))

    def forward(self, ids: Tensor) -> Tensor:
        words = torch.tanh(self.table(ids)).mean(1)
        return self.tail(self.second(torch.relu(self.first(words))))


@dataclass(frozen=True)
class Way:
    """How a model is spread: pins, what else `parallelize` takes, and hosts beside the workers."""

    pins: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    servers: int = 0
    tail: int = 0
    whole: bool = False  # whether each update sees whole parameters


_REST = {"*": "replicate:direct"}
WAYS = {
    "replicate": Way({"*": "replicate:direct"}, whole=True),
    "ring": Way({"*": "replicate:ring"}, whole=True),
    "factor": Way(_REST | {"first": "factor", "second": "factor", "tail.1": "factor"}, whole=True),
    "owners of parts": Way({"*": "sliced:direct"}, {"search_options": SMALL}),
    "owners of wholes": Way({"*": "sliced:direct"}, {"placement": "round-robin"}, whole=True),
    "low memory": Way({"*": "sliced:ring"}, {"memory": "low", "search_options": SMALL}),
    "column": Way(_REST | {"first": "column", "tail.1": "column"}),
    "row": Way(_REST | {"second": "row"}),
    "pair": Way(_REST | {"first": "column_pair", "second": "row_pair"}),
    "embedding": Way(_REST | {"table": "embedding"}),
    "head": Way(_REST | {"tail.1": "head"}),
    "servers": Way({"*": "server"}, {"search_options": SMALL}, servers=2),
    "tables": Way(_REST | {"table": "server_rows"}, servers=2),
    "tail": Way(_REST | {"tail.*": "stage"}, tail=1),
}


def adamw(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": sgd,
    "AdamW": adamw,
    "Adafactor": partial(optim.Adafactor, lr=0.05),
}


@dataclass
class Script:
    """One rank's training script."""

    model: nn.Module
    optimizer: optim.Optimizer
    scheduler: optim.lr_scheduler.LRScheduler
    loader: Any
    ids: list[list[int]] = field(default_factory=list)  # of each step
    batches: Iterator[Any] | None = None

    @classmethod
    def of(cls, make: Callable[..., optim.Optimizer], model: nn.Module) -> Script:
        optimizer = make(model.parameters())
        rows = DataLoader(data(), batch_size=BATCH, shuffle=True)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return cls(model, optimizer, scheduler, shoal.shard(rows, batch="global"))

    @property
    def saved(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        names = ("model", "optimizer", "scheduler", "loader")
        return {name: getattr(self, name) for name in names}

    def train(self, loss_fn: Any, steps: int) -> None:
        """So many steps, over the ends of epochs."""
        if self.batches is None:
            self.batches = self._forever()
        for ids, x, y in islice(self.batches, steps):
            self.ids.append(ids.tolist())
            loss = loss_fn(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self.loader


def data() -> TensorDataset:
    words = integers(WORDS, ROWS, 4, seed=1)
    return TensorDataset(torch.arange(ROWS), words, integers(CLASSES, ROWS, seed=2))


@dataclass(frozen=True)
class Outcome:
    """What a rank has at the end."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    rate: float
    ids: list[list[int]]  # of each step


Loop = Callable[[Script, Any], None]


def on_ranks(
    make: Callable[..., optim.Optimizer],
    ranks: int,
    way: Way,
    loop: Loop,
    before: Callable[[Script], None] = lambda script: None,
    workers: tuple[str, ...] = (),
) -> list[Outcome]:
    """Each rank's outcome of a loop; `before` runs before `parallelize`, `workers` name hosts."""
    beside = way.servers + way.tail if ranks > 1 else 0
    start = built(Net)
    copies = [copy.deepcopy(start) for _ in range(ranks + beside)]
    cluster = cluster_of(ranks, way.servers if beside else 0)
    if workers:
        cluster = replace(cluster, topology=shoal.Topology(workers))
    if beside and way.tail:
        cluster = replace(cluster, tail=tuple(f"tail{t}" for t in range(way.tail)))
    sample = tuple(tensor[:BATCH] for tensor in data().tensors[1:])

    def work(comm: ThreadComm) -> Outcome | None:
        if comm.rank >= ranks and way.servers:
            return serve(comm)
        with using(comm, cluster):
            script, loss_fn = Script.of(make, copies[comm.rank]), nn.CrossEntropyLoss()
            before(script)
            with suppress(SystemExit):
                shoal.parallelize(
                    script.model,
                    loss_fn,
                    script.optimizer,
                    sample=tuple(t[comm.rank :: ranks] for t in sample),
                    pins=way.pins if ranks > 1 else None,
                    **way.options,
                )
                loop(script, loss_fn)
                return Outcome(
                    state(script.model),
                    copy.deepcopy(script.optimizer.state_dict()),
                    script.optimizer.param_groups[0]["lr"],
                    script.ids,
                )
        return None

    hosts = cluster.topology.hosts + cluster.servers + cluster.tail
    kinds = {"servers": way.servers, "tail": way.tail} if beside else {}
    outcomes = run(ranks + beside, work, timeout_s=20, hosts=hosts, **kinds)[:ranks]
    return [outcome for outcome in outcomes if outcome is not None]


def saving(folder: Path, steps: int = AFTER) -> Loop:
    """A loop that saves in mid-epoch, and goes on."""

    def loop(script: Script, loss_fn: Any) -> None:
        script.train(loss_fn, BEFORE)
        shoal.save(folder, **script.saved, epoch=1, best=0.25)
        script.train(loss_fn, steps)

    return loop


def going_on(folder: Path, steps: int = AFTER) -> Loop:
    """A loop that goes on from there."""

    def loop(script: Script, loss_fn: Any) -> None:
        assert shoal.load(folder, **script.saved, best=0.0) == {"best": 0.25}
        script.train(loss_fn, steps)

    return loop
