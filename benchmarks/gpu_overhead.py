"""What the engine costs on one GPU: plain PyTorch, and the same model under Shoal, in turn.

One process. The engine is forced on over a loopback exchange that copies every bucket and takes the
mean of both, on the lane's stream, as a network would beside the compute. DDP stands beside it,
alone in its world. Printed for each: the step's median, its ratio to plain PyTorch round by round
with a 95 % interval, memory, and each call of CUDA's that waits, by thread; and how far parameters
are apart behind the same steps.

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import shoal
from shoal.comm.threads import ThreadComm
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, SplitExchange
from shoal.core.cost import Traffic
from shoal.core.facts import Topology
from shoal.core.plan import Choice, Plan
from shoal.front.session_start import using
from shoal.profiling.identity import model_digest, trainable_layers
from shoal.session.attach import attach
from shoal.session.job import TrainingJob
from shoal.session.opening import Prepared
from shoal.session.session import current

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT
from resnet50 import ResNet50

_WAITS = ("Synchronize", "cudaMemcpy ", "cudaFree", "cudaHostAlloc")


@dataclass(frozen=True)
class Loopback(SplitExchange):
    """Copies what a network would bring, and takes the mean of both: the bits stay as they are."""

    name: ClassVar[str] = "loopback"

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        nothing = (0.0,) * topology.size
        return Traffic(nothing, nothing, rounds=0)

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        for part in slices:
            part.lerp_(part.clone(), 0.5)

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


def resnet50(rows: int = 256) -> tuple[nn.Module, Tensor, Tensor]:
    """ResNet-50 on images of 224 x 224, channels last."""
    x = torch.randn(rows, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    model = ResNet50().cuda().to(memory_format=torch.channels_last)
    return model, x, torch.randint(1000, (rows,), device="cuda")


def gpt(rows: int = 16, context: int = 1024) -> tuple[nn.Module, Tensor, Tensor]:
    """GPT-2's smallest size: 124 M parameters, of which the head shares the letters'."""
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
    plan = Plan(1, model_digest(work.model), choices, bucket_bytes=50 << 20, lanes=2)
    job = TrainingJob(work.model, work.loss_fn, [work.optimizer])
    attach(current(), job, Prepared(plan, inputs_alike=True))
    return work


def made(name: str, rows: int | None) -> Work:
    """A model and its optimizer, the same at every call."""
    torch.manual_seed(0)
    make = {"resnet50": resnet50, "gpt": gpt}[name]
    model, x, y = make() if rows is None else make(rows)
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


def peak(work: Work) -> int:
    """Bytes on the GPU at a step's peak, above what is kept between steps."""
    seconds(work, 1)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds(work, 1)
    return torch.cuda.max_memory_allocated() - before


def kept(make: Callable[[], Work]) -> tuple[Work, int]:
    """A work behind three steps, and the bytes that it has on the GPU."""
    before = torch.cuda.memory_allocated()
    work = make()
    for _ in range(3):
        work.step()
    torch.cuda.synchronize()
    return work, torch.cuda.memory_allocated() - before


def apart(one: nn.Module, other: nn.Module) -> float:
    """How far two models' parameters are apart: the norm of the difference over the norm."""
    both = zip(one.parameters(), other.parameters(), strict=True)
    pairs = [(a.detach(), b.detach()) for a, b in both]
    difference = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    return float(difference / torch.stack([a.norm() for a, _ in pairs]).norm())


def in_ddp(work: Work) -> Work:
    """The same in DDP, alone in its world."""
    model = DistributedDataParallel(work.model, gradient_as_bucket_view=True, static_graph=True)
    return replace(work, model=model)


def compare(name: str, rows: int | None, strategy: str, rounds: int, steps: int) -> None:
    """Print the figures of one model under one strategy."""
    with using(ThreadComm()):
        contenders, bytes_kept = {}, {}
        makers: dict[str, Callable[[], Work]] = {
            "plain": partial(made, name, rows),
            "shoal": lambda: attached(made(name, rows), strategy),
            "ddp": lambda: in_ddp(made(name, rows)),
        }
        for who, make in makers.items():
            contenders[who], bytes_kept[who] = kept(make)
        again, _ = kept(makers["plain"])
        error = apart(contenders["plain"].model, contenders["shoal"].model)
        noise = apart(contenders["plain"].model, again.model)
        del again
        figures: dict[str, list[float]] = {who: [] for who in contenders}
        for _ in range(rounds):
            for who, work in contenders.items():
                figures[who].append(seconds(work, steps))
        print(f"{name}, {strategy}; shoal is {error:.1e} from plain, plain from itself {noise:.1e}")
        for who, work in contenders.items():
            ratios = [a / b for a, b in zip(figures[who], figures["plain"], strict=True)]
            low, high = interval(ratios)
            print(
                f"  {who}: {statistics.median(figures[who]) * 1e3:.2f} ms, "
                f"{statistics.median(ratios):.3f} of plain ({low:.3f}-{high:.3f}), "
                f"{bytes_kept[who] / 2**20:.0f} MiB kept, {peak(work) / 2**20:.0f} MiB above; "
                f"waits: {waits(work)}",
                flush=True,
            )
        torch.cuda.set_sync_debug_mode("error")
        try:
            contenders["shoal"].step()
            print("  no synchronising call", flush=True)
        except RuntimeError as error:
            print("  synchronises:", str(error).splitlines()[0], flush=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, help="of a batch: by default 256 images, 16 texts")
    parser.add_argument("--models", nargs="+", default=["resnet50", "gpt"])
    parser.add_argument("--strategies", nargs="+", default=["replicate", "sliced"])
    options = parser.parse_args()
    shoal.register(Loopback)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29555", rank=0, world_size=1)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    for model in options.models:
        for strategy in options.strategies:
            compare(model, options.rows, strategy, options.rounds, options.steps)
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
