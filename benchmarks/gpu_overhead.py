"""What the engine costs on one GPU: plain PyTorch, and the same model under Shoal, in turn.

One process. The engine is forced on over a loopback exchange that copies every bucket and adds the
copy to it, on the lane's stream, as a network would beside the compute. Printed for each model: the
step's median under both, their ratio round by round with a 95 % interval, peak memory, how far the
parameters are apart behind the same steps, and each call of CUDA's that waits, by thread.

    python benchmarks/gpu_overhead.py --rounds 9 --steps 10
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import shoal
from shoal.comm.threads import ThreadComm
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, SplitExchange
from shoal.core.cost import Traffic
from shoal.core.facts import Topology
from shoal.core.plan import Choice, Plan
from shoal.front.joining import using
from shoal.profiling.identity import model_digest, trainable_layers
from shoal.session.attach import attach
from shoal.session.session import current

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT
from resnet50 import ResNet50

_WAITS = ("Synchronize", "cudaMemcpy ", "cudaFree", "cudaHostAlloc")


@dataclass(frozen=True)
class Loopback(SplitExchange):
    """Copies what a network would bring, and adds it: half of the sum each."""

    name: ClassVar[str] = "loopback"

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        nothing = (0.0,) * topology.size
        return Traffic(nothing, nothing, rounds=0)

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        for part in slices:
            part.mul_(0.5)
            part.add_(part.clone())

    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        for part in slices:
            part.copy_(part.clone())


@dataclass(frozen=True)
class Work:
    """A model's training step in mixed precision, on one batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    autocast: bool = True

    def step(self) -> None:
        """Forward, backward, update."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            loss = self.loss_fn(self.model(self.x), self.y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def resnet50(rows: int = 128) -> tuple[nn.Module, Tensor, Tensor]:
    """ResNet-50 on images of 224 x 224, channels last."""
    x = torch.randn(rows, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    model = ResNet50().cuda().to(memory_format=torch.channels_last)
    return model, x, torch.randint(1000, (rows,), device="cuda")


def gpt(rows: int = 8, context: int = 1024) -> tuple[nn.Module, Tensor, Tensor]:
    """GPT-2's smallest size, with a head of its own: 163 M parameters, 124 M without it."""
    model = GPT(50304, context, width=768, num_blocks=12, num_heads=12).cuda()
    model.head.weight = model.letter.weight
    x, y = torch.randint(50304, (2, rows, context), device="cuda")
    return model, x, y


def letters_loss(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of every letter."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def attached(work: Work, strategy: str) -> Work:
    """The same under Shoal's engine, alone in its world."""
    choices = tuple(
        Choice(layer.name, strategy, "loopback") for layer in reversed(trainable_layers(work.model))
    )
    plan = Plan(1, model_digest(work.model), choices, bucket_bytes=25 << 20, lanes=2)
    attach(current(), work.model, work.loss_fn, [work.optimizer], plan, inputs_alike=True)
    return work


def made(name: str, seed: int = 0) -> Work:
    """A model and its optimizer, the same at every call."""
    torch.manual_seed(seed)
    model, x, y = {"resnet50": resnet50, "gpt": gpt}[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Work(model, optimizer, F.cross_entropy if name == "resnet50" else letters_loss, x, y)


def seconds(work: Work, steps: int) -> float:
    """Seconds of a step, to its end on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        work.step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / steps


def waits(work: Work, steps: int = 3) -> dict[str, int]:
    """The calls of some steps in which a thread waits for the GPU."""
    torch.cuda.synchronize()
    main = threading.get_native_id()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            work.step()
    found = Counter(
        f"{event.name()} on {'the main' if event.start_thread_id() == main else 'another'} thread"
        for event in profiled.profiler.kineto_results.events()
        if any(word in event.name() for word in _WAITS)
    )
    torch.cuda.synchronize()
    return dict(found)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of rounds drawn again."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1950]


def compare(name: str, strategy: str, rounds: int, steps: int) -> None:
    """Print the figures of one model under one strategy."""
    plain, peaks, figures = made(name), {}, {"plain": [], "shoal": []}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds(plain, 3)
    peaks["plain"] = torch.cuda.max_memory_allocated() - before
    with using(ThreadComm()):
        other = attached(made(name), strategy)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds(other, 3)
        peaks["shoal"] = torch.cuda.max_memory_allocated() - before
        apart = max(
            float((a - b).abs().max() / a.abs().max().clamp(min=1e-4))
            for a, b in zip(plain.model.parameters(), other.model.parameters(), strict=True)
        )
        for _ in range(rounds):
            figures["plain"].append(seconds(plain, steps))
            figures["shoal"].append(seconds(other, steps))
        ratios = [b / a for a, b in zip(*figures.values(), strict=True)]
        low, high = interval(ratios)
        medians = {who: statistics.median(times) * 1e3 for who, times in figures.items()}
        print(
            f"{name}, {strategy}: plain {medians['plain']:.2f} ms, "
            f"shoal {medians['shoal']:.2f} ms, "
            f"ratio {statistics.median(ratios):.3f} ({low:.3f}-{high:.3f}); apart {apart:.1e}; "
            f"above what is kept {peaks['plain'] / 2**20:.0f} and {peaks['shoal'] / 2**20:.0f} MiB",
            flush=True,
        )
        print("  waits of plain:", waits(plain), "\n  waits of shoal:", waits(other), flush=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            other.step()
            print("  no synchronising call", flush=True)
        except RuntimeError as error:
            print("  synchronises:", str(error).splitlines()[0], flush=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=["resnet50", "gpt"])
    parser.add_argument("--strategies", nargs="+", default=["replicate", "sliced"])
    options = parser.parse_args()
    shoal.register(Loopback)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    for model in options.models:
        for strategy in options.strategies:
            compare(model, strategy, options.rounds, options.steps)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
