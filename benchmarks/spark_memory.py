"""Memory of an executor's ranks while a generated DataFrame trains: is the curve flat?

    python benchmarks/spark_memory.py [--rows 1000000] [--ranks 2] [--epochs 3] [--master local[2]]

Each rank looks at itself and at Spark's Python worker that feeds it, every so many steps. Told are
MB of the process alone, which is what has to stay bounded, and MB of files that are mapped into it,
which the system takes back when it wants memory. --out writes all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import functions
from torch import nn

import shoal
from shoal_tools.spark import run, session

WIDTH, CLASSES, LOOKS = 32, 10, 40  # of a row; looks at memory in an epoch
NAMES = ("rank", "rank's files", "worker")


def main() -> None:
    """The driver."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    steps = asked.rows // (asked.batch_size * asked.ranks)
    with session(asked.master, "memory") as spark:
        values = [functions.rand(seed=number).cast("float") for number in range(WIDTH)]
        label = (functions.col("id") % CLASSES).alias("y")
        df = spark.range(asked.rows).select(functions.array(*values).alias("x"), label)
        found = run(
            training(asked.epochs, max(steps // LOOKS, 1)),
            df,
            num_ranks=asked.ranks,
            batch_size=asked.batch_size,
            epochs=asked.epochs,
        )
    told = dict(enumerate(found))
    if asked.out:
        asked.out.write_text(json.dumps(told))
    for rank, looks in told.items():
        print(f"rank {rank}: MB in each epoch, first, least and most of {len(looks)} looks")
        for epoch in range(asked.epochs):
            here = [look[2:] for look in looks if look[0] == epoch]
            shown = (
                f"{name} {column[0]:.0f} {min(column):.0f} {max(column):.0f}"
                for name, column in zip(NAMES, zip(*here, strict=True), strict=True)
            )
            print(f"  epoch {epoch}: " + ", ".join(shown))


def training(epochs: int, every: int) -> Any:
    """What each rank does: it trains, and returns (epoch, step, MB, …) of each look."""

    def megabytes(pid: str, name: str) -> float:
        lines = Path("/proc", pid, "status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

    def train(loader: Any) -> list[tuple[float, ...]]:
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = next(iter(loader))
        sample = batch["x"], batch["y"]
        model, loss_fn, optimizer = shoal.parallelize(
            model, nn.CrossEntropyLoss(), optimizer, sample=sample
        )
        looks = []
        for epoch in range(epochs):
            for step, batch in enumerate(loader):
                optimizer.zero_grad()
                loss_fn(model(batch["x"]), batch["y"]).backward()
                optimizer.step()
                if step % every == 0:
                    own, worker = str(os.getpid()), str(os.getppid())
                    files, alone = megabytes(own, "RssFile"), megabytes(own, "RssAnon")
                    looks.append((epoch, step, alone, files, megabytes(worker, "RssAnon")))
        return looks

    return train


if __name__ == "__main__":
    main()
