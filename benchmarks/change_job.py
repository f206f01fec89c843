"""The job of changes.py: a small model that trains in float64, and says which rows it has taken.

    python benchmarks/change_job.py WAY OPTIMIZER EPOCHS PACE_S FOLDER RESULT [ENOUGH]

It ends after so many epochs, or after one in which the file ENOUGH was there. Nothing in it is
about hosts that come and go: it has `shoal.Checkpoints`, as any script. Checkpoints are on the
disk, twice a second, or in memory, each CHANGES_IN_MEMORY_EVERY steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.core.facts import Link
from shoal.session.session import current

WAYS = {
    "replicate": {"*": "replicate"},
    "sliced": {"*": "sliced"},
    "factor": {"0": "replicate", "1": "factor", "3": "factor"},
    "head": {"0": "replicate", "1": "replicate", "3": "head"},
    "embedding": {"0": "embedding", "1": "column", "3": "row"},
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
ROWS, BATCH = 132, 12


def say(what: str, **more: Any) -> None:
    """Print a line for the harness."""
    line = {"is": what, "at": time.time(), "rank": int(os.environ.get("RANK", "0")), **more}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Rows(Dataset[Any]):
    """Rows that know their numbers."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, int, int]:
        return row, (row * 37) % 64, (row * 11) % 8


def is_enough(path: str) -> bool:
    """Whether rank 0 sees that file."""
    return bool(current().comm.gather_objects(bool(path) and os.path.exists(path), "enough")[0])


def main(
    way: str, optimizer_name: str, epochs: str, pace: str, folder: str, out: str, enough: str = ""
) -> None:
    """Train to the end, and leave the parameters in the file `out`."""
    say("script", crew=os.environ.get("SHOAL_JOB", ""))
    world = shoal.init(lost_after_s=float(os.environ.get("CHANGES_LOST_S", "5")))
    say("init", ranks=world.size)
    if os.environ.get("CHANGES_LINKS") != "measured":  # to be quick
        hosts = tuple(f"h{number}" for number in range(world.size))
        current().cluster = shoal.Cluster(shoal.Topology(hosts), Link(1e-4, 1e8), 1.0)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    model.double()
    loss_fn, optimizer = nn.CrossEntropyLoss(), OPTIMIZERS[optimizer_name](model.parameters())
    own_order = torch.Generator().manual_seed(2)
    loader = shoal.shard(
        DataLoader(Rows(), batch_size=BATCH, shuffle=True, generator=own_order), batch="global"
    )
    objects = {"model": model, "optimizer": optimizer, "loader": loader}
    every = int(os.environ.get("CHANGES_IN_MEMORY_EVERY", "0"))
    rarely = {"every_s": 3600.0, "in_memory_every": every} if every else {"every_s": 0.5}
    with shoal.Checkpoints(folder, local=True, **rarely, **objects) as checkpoints:
        checkpoints.resume()
        say("resumed", step=checkpoints.steps)
        sample = torch.zeros(BATCH, dtype=torch.int64), torch.zeros(BATCH, dtype=torch.int64)
        shoal.parallelize(model, loss_fn, optimizer, sample=sample, pins=WAYS[way])
        say("parallelized")
        for _ in range(loader.epoch, int(epochs)):
            if is_enough(enough):
                break
            for rows, x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                say("step", step=checkpoints.steps + 1, rows=rows.tolist(), ranks=world.size)
                time.sleep(float(pace))
                checkpoints.step()
        weights = model.state_dict()
        if world.is_main:
            torch.save(weights, out)
    say("end", steps=checkpoints.steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
