"""Steps on GPUs over Ethernet: no network, DDP over NCCL, and ways of Shoal.

Run it as a job of `shoal lab`, whose hosts may share one GPU: NCCL takes each rank for a host of
its own, and reaches it through the lab's link.

    shoal lab --hosts 2 --rate 1gbit -- python benchmarks/gpu_ethernet.py --model gpt2

GPT-2 of 124 M on 8 × 512 tokens a rank, or ResNet-50 on 64 images a rank: bfloat16 autocast, fused
AdamW. Each way trains in turn in the same processes. Rank 0 prints a line for each: the median step
in seconds, what was predicted, the seconds of set-up, and the memory on the GPU at a step's peak.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.contracts.strategy import Strategy
from shoal.core.registry import of
from shoal_tools.contenders.ddp_hooks import hook_by_name
from shoal_tools.contenders.peers import Workload, ddp

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT
from resnet50 import ResNet50

RANK = int(os.environ.get("RANK", "0"))
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"  # where there is no GPU, to try the script on small models
AUTOCAST = True  # bfloat16, as on GPUs
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """What every way trains: builders, and a batch."""

    model: Callable[[], nn.Module]
    loss: Loss
    batch: tuple[Tensor, Tensor]


def letters_loss(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of every token."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def gpt2(rows: int, context: int = 512) -> Task:
    """GPT-2's smallest size, of which the head shares the letters'."""

    letters, width, blocks = (50304, 768, 12) if HAS_GPU else (64, 48, 2)

    def model() -> nn.Module:
        made = GPT(letters, 1024, width=width, num_blocks=blocks, num_heads=12).to(DEVICE)
        made.head.weight = made.letter.weight
        return made

    x, y = torch.randint(letters, (2, rows, context), device=DEVICE)
    return Task(model, letters_loss, (x, y))


def resnet50(rows: int) -> Task:
    """ResNet-50 on images of 224 x 224, channels last."""

    def model() -> nn.Module:
        return ResNet50().to(DEVICE, memory_format=torch.channels_last)

    side = 224 if HAS_GPU else 32
    x = torch.randn(rows, 3, side, side, device=DEVICE).to(memory_format=torch.channels_last)
    return Task(model, F.cross_entropy, (x, torch.randint(1000, (rows,), device=DEVICE)))


class Autocast(nn.Module):
    """A model under autocast, as scripts write it around forward and loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=AUTOCAST):
            out: Tensor = self.model(x)
        return out


Step = Callable[[], None]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Fused, as on every GPU."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def stepping(model: nn.Module, loss_fn: Loss, optimizer: Any, task: Task) -> Step:
    """One step of the ordinary loop."""
    x, y = task.batch

    def step() -> None:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@dataclass
class Made:
    """A way that is ready: its step, what was predicted, and how it is undone."""

    step: Step
    predicted_s: float
    undo: Callable[[], None]


def plain(task: Task) -> Made:
    """Each rank alone."""
    model = Autocast(task.model())
    return Made(stepping(model, task.loss, adamw(model.parameters()), task), 0.0, lambda: None)


def by_ddp(task: Task, hook: str | None = None) -> Made:
    """DDP with all its promises made; over NCCL."""
    work = Workload(lambda: Autocast(task.model()), task.loss, adamw, task.batch)
    peer = ddp(work, 25, hook_by_name(hook) if hook else None)
    return Made(lambda: peer.step(*task.batch), 0.0, peer.close)


def by_shoal(task: Task, **options: Any) -> Made:
    """Shoal, by its own plan."""
    model = Autocast(task.model())
    optimizer, x_y = adamw(model.parameters()), task.batch
    model, loss_fn, optimizer = shoal.parallelize(
        model, task.loss, optimizer, sample=x_y, **options
    )
    plan = shoal.plan_of(model)
    predicted_s = 0.0 if plan is None else plan.predicted_s
    if plan is not None and RANK == 0:
        ways = Counter(choice.way for choice in plan.choices)
        print("   ", dict(ways), f"{plan.bucket_bytes / 2**20:.0f} MiB", flush=True)
    return Made(stepping(model, loss_fn, optimizer, task), predicted_s, partial(undone, model))


def undone(model: nn.Module) -> None:
    """Give the model back, and say what its steps were made of."""
    outcome = shoal.outcome(model)
    if RANK == 0:
        print("   ", str(outcome).replace("\n", "\n    "), flush=True)
    shoal.unparallelize(model)


EACH = [name for name in of(Strategy) if name != "pipeline"]  # strategies of single layers
WAYS: dict[str, Callable[[Task], Made]] = {
    "plain": plain,
    "ddp": by_ddp,
    "ddp:fp16": lambda task: by_ddp(task, "fp16"),
    "auto": by_shoal,
    "exact": lambda task: by_shoal(task, strategies=EACH),
    "codecs": lambda task: by_shoal(task, strategies=EACH, codecs="all"),
    "local": lambda task: by_shoal(task, local_steps=16),
    "pipeline": lambda task: by_shoal(task, pins={"*": "pipeline"}),
    "parts": lambda task: by_shoal(task, pins={"*": "pipeline"}, micro_batches=4),
}


def synchronize() -> None:
    """Wait for the GPU."""
    if HAS_GPU:
        torch.cuda.synchronize()


def timed(step: Step, steps: int) -> float:
    """The median seconds of a step, each to its end on the GPU."""
    took = []
    for _ in range(steps):
        synchronize()
        began_s = time.perf_counter()
        step()
        synchronize()
        took.append(time.perf_counter() - began_s)
    return statistics.median(took)


def measure(name: str, task: Task, steps: int, limit_s: float) -> None:
    """Print the line of one way."""
    torch.manual_seed(0)
    faulthandler.dump_traceback_later(limit_s, repeat=False, exit=False)
    began_s = time.perf_counter()
    made = WAYS[name](task)
    synchronize()
    ready_s = time.perf_counter() - began_s
    made.step()
    if name != "plain":
        made.step()
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    step_s = timed(made.step, steps)
    peak = torch.cuda.max_memory_allocated() / 2**30 if HAS_GPU else 0.0
    faulthandler.cancel_dump_traceback_later()
    if RANK == 0 or name == "plain":  # hosts may be unlike
        ratio = f"{step_s / made.predicted_s:.2f}" if made.predicted_s else "-"
        print(
            f"{name}: {step_s:.4f} s a step, predicted {made.predicted_s:.4f} (measured ÷ "
            f"predicted {ratio}), set-up {ready_s:.1f} s, peak {peak:.2f} GiB",
            flush=True,
        )
    made.undo()
    del made
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()


def be_apart() -> None:
    """Have NCCL take ranks that share a GPU for two hosts, which only have the link."""
    os.environ.setdefault("NCCL_HOSTID", f"host{RANK}")
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        os.environ.setdefault(name, "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["gpt2", "resnet50"], default="gpt2")
    parser.add_argument("--rows", type=int, help="of a rank: by default 8 texts, 64 images")
    parser.add_argument("--ways", nargs="+", default=["plain", "ddp", "exact", "codecs"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=60, help="then stacks are printed")
    options = parser.parse_args()
    torch.set_num_threads(2)
    be_apart()
    shoal.init(timeout_s=120)
    task = gpt2(options.rows or 8) if options.model == "gpt2" else resnet50(options.rows or 64)
    if RANK == 0:
        card = torch.cuda.get_device_name() if HAS_GPU else "no GPU"
        print(card, "torch", torch.__version__, options.model, flush=True)
    for way in options.ways:
        measure(way, task, options.steps, options.limit_s)


if __name__ == "__main__":
    main()
