"""Two ranks, one of which has a third of its processor: even rows against shares="speed".

    .venv/bin/python benchmarks/shares.py [--steps 160] [--turns 3]

Rank 0 has core 0. Rank 1 has core 1 together with two processes that compute without end. Both ways
take turns, with the same global batches (batch="global"). Printed are milliseconds a step, medians
of the second half of each run, how rows are shared at the end, and by how much the weights differ
from those of one process that takes the same batches, in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from multiprocessing import Process
from typing import Any, TextIO

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset

import shoal

_ROWS, _WIDTH = 96, 512  # of a batch of all ranks, and of the model


def train(way: str, steps: int, told: TextIO) -> None:
    """One rank; rank 0 tells what came of it."""
    world = shoal.init()
    if world.size > 1:
        os.sched_setaffinity(0, {world.rank})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(_ROWS * steps, _WIDTH, dtype=torch.float64)
    data = TensorDataset(x, x[:, :8].sum(1, keepdim=True))
    loader = DataLoader(data, _ROWS, shuffle=True)
    shares = "speed" if way == "speed" else None
    loader = shoal.shard(loader, batch="global", shares=shares)
    hidden = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*hidden, nn.Linear(_WIDTH, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, loss_fn, optimizer = shoal.parallelize(
        model, nn.MSELoss(), optimizer, sample=data[: _ROWS // 2]
    )
    took_s, rows, begin_s = [], 0, time.perf_counter()
    for inputs, target in loader:
        loss_fn(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        rows = len(inputs)
        took_s.append(time.perf_counter() - begin_s)
        begin_s += took_s[-1]
    everyone = shoal.gather(torch.tensor([rows]))
    weights = [value.tolist() for value in model.state_dict().values()]
    if world.rank == 0:
        step_ms = 1000 * statistics.median(took_s[steps // 2 :])
        said = {"step_ms": step_ms, "rows": torch.as_tensor(everyone).flatten().tolist()}
        told.write(json.dumps(said | {"weights": weights}))


def burn() -> None:
    """Compute without end on core 1."""
    os.sched_setaffinity(0, {1})
    while True:
        pass


def measured(way: str, steps: int, ranks: int) -> dict[str, Any]:
    """A run of so many ranks, forked from here so that nothing is imported again."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reading, writing = os.pipe()
    children = []
    for rank in range(ranks):
        if child := os.fork():
            children.append(child)
            continue
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": way,
            "GLOO_SOCKET_IFNAME": "lo",
            "SHOAL_TOKEN": "secret",
        }
        with os.fdopen(writing, "w") as told:
            train(way, steps, told)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        found: dict[str, Any] = json.loads(told.read())
    for child in children:
        os.waitpid(child, 0)
    return found


def furthest(one: object, other: object) -> float:
    """The largest difference between two models' weights."""
    if isinstance(one, list) and isinstance(other, list):
        return max(furthest(a, b) for a, b in zip(one, other, strict=True))
    assert isinstance(one, float) and isinstance(other, float)
    return abs(one - other)


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    alone = measured("alone", asked.steps, ranks=1)
    burning = [Process(target=burn, daemon=True) for _ in range(2)]
    for each in burning:
        each.start()
    try:
        for _ in range(asked.turns):
            for way in ("even", "speed"):
                found = measured(way, asked.steps, ranks=2)
                apart = furthest(found["weights"], alone["weights"])
                print(
                    f"{way:6} {found['step_ms']:7.2f} ms a step, rows {found['rows']}, "
                    f"weights differ by {apart:.1e}",
                    flush=True,
                )
    finally:
        for each in burning:
            each.terminate()


if __name__ == "__main__":
    main()
