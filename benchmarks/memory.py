"""What one of four ranks holds of a model of 100 MB under AdamW, by strategy and `memory=`.

    .venv/bin/python benchmarks/memory.py                 four local ranks
    sudo .venv/bin/python benchmarks/memory.py 1gbit      four hosts in a lab at that rate

12.6 million parameters in float64, in 48 layers; buckets of 4 MiB, three in flight. Each line is a
job of its own: two steps to warm up, then the process's peak is reset (Linux), and four more. The
last columns are that peak above what the process held before it made the model, the largest
relative difference of a parameter to one process on the global batch, and whether the bits are
those of the line before.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.contracts.launcher import Job
from shoal.session.session import current
from shoal_tools.launch.lab import Lab
from shoal_tools.launch.local import Local

RANKS, LAYERS, WIDTH, ROWS, RATE = 4, 48, 512, 8, 1e-3
WARM_UP, STEPS = 2, 4
# to plan for: the pins decide
CLUSTER = shoal.Cluster(shoal.Topology(("host",) * RANKS), shoal.Link(1e-4, 125e6))
WAYS: dict[str, dict[str, Any]] = {
    "one process": {},
    "replicate": {"pins": {"*": "replicate:direct"}},
    "sliced": {"pins": {"*": "sliced:direct"}},
    'sliced, memory="low"': {"pins": {"*": "sliced:direct"}, "memory": "low"},
}


def resident(what: str) -> int:
    """The process's resident bytes now ("VmRSS") or at most ("VmHWM")."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{what}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[tuple[Tensor, Tensor]]
) -> None:
    optimizer.zero_grad()
    for x, y in parts:
        (F.mse_loss(model(x), y) / len(parts)).backward()
    optimizer.step()


def train(way: str, folder: Path) -> None:
    """What each rank runs: it leaves its figures, and rank 0 its parameters."""
    world = shoal.init()
    small = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    # loads what PyTorch loads late
    step(small, torch.optim.AdamW(small.parameters()), [batch(0, 0)])
    before = resident("VmRSS")
    torch.manual_seed(0)
    layers = (
        layer
        for _ in range(LAYERS)
        for layer in (nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())
    )
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    sample, options = batch(world.rank, 0), dict(WAYS[way])
    if world.size > 1:
        plan = shoal.plan(
            model, F.mse_loss, optimizer, sample=sample, cluster=CLUSTER, pins=options.pop("pins")
        )
        options["plan"] = replace(plan, bucket_bytes=4 << 20)
        current().cluster = CLUSTER
    shoal.parallelize(model, F.mse_loss, optimizer, sample=sample, **options)
    began = time.perf_counter()
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
            began = time.perf_counter()
        step(
            model,
            optimizer,
            [batch(r, number) for r in (range(RANKS) if world.size == 1 else [world.rank])],
        )
    print(
        f"rank {world.rank}: {(time.perf_counter() - began) / STEPS:.2f} s a step", file=sys.stderr
    )
    held = replace(shoal.memory(model), process_peak=resident("VmHWM") - before)
    (folder / f"{world.rank}.json").write_text(json.dumps(asdict(held)))
    if world.rank == 0:
        torch.save(model.state_dict(), folder / "parameters.pt")


def measured(way: str, folder: Path, rate: str | None) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Each figure on the rank where it is most, and the parameters after training."""
    ranks = 1 if way == "one process" else RANKS
    folder.mkdir()
    job = Job((sys.executable, str(Path(__file__).resolve()), way, str(folder)), ranks)
    launcher = Lab(hosts=ranks, rate=rate) if rate and ranks > 1 else Local()
    if launcher.launch(job).exit_code:
        sys.exit(1)
    figures: list[dict[str, Any]] = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {kind: max(each[kind] for each in figures) for kind in figures[0]}, torch.load(
        folder / "parameters.pt"
    )


def main(rate: str | None) -> None:
    """Run every way and print a table."""
    print(
        "| MB on a rank | parameters | gradients | optimizer state | buckets | process | "
        "difference | bits |"
    )
    print("|---|---|---|---|---|---|---|---|")
    alone: dict[str, Tensor] = {}
    previous: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, way in enumerate(WAYS):
            figures, after = measured(way, Path(folder) / str(number), rate)
            alone = alone or copy.copy(after)
            worst = max(
                float((a - after[n]).abs().max() / max(float(a.abs().max()), RATE))
                for n, a in alone.items()
            )
            same = previous and all(torch.equal(a, previous[name]) for name, a in after.items())
            cells = " | ".join(f"{nbytes / 1e6:.1f}" for nbytes in figures.values())
            print(f"| {way} | {cells} | {worst:.0e} | {'the same' if same else ''} |", flush=True)
            previous = after


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(sys.argv[1], Path(sys.argv[2]))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
