"""The engine on one rank that sends every bucket to itself: what that costs beside plain PyTorch,
and waits for.

    python benchmarks/loopback.py                                      a minute on a GPU;
                                                                       results/loopback.json
    python benchmarks/loopback.py --batch 2 --rounds 2 --steps 1       whether it works at all, on a
                                                                       CPU

ResNet-50 at 224 x 224 on the first GPU, or the CPU where there is none. Every layer is replicated
by all-reduce, in buckets of 25 MiB, over a channel that copies each bucket, adds the copy and
halves the sum, on a lane's own stream. Three models take turns (A B C A B C) from equal weights,
and must be equal to the bit at the end: plain PyTorch, the engine, and plain again, which tells
whether two runs are at all. On a GPU, steps of each are profiled: calls with which a thread of the
host waits for it, and copies to the host. Of these the profiler makes some itself, at its end.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from shoal.contracts.comm import Comm, Pending
from shoal.core.facts import Topology
from shoal.core.plan import Choice, Plan
from shoal.front.recipe import load
from shoal.front.session_start import using
from shoal.profiling.identity import model_digest, trainable_layers
from shoal.session.attach import attach
from shoal.session.job import TrainingJob
from shoal.session.opening import Prepared

HERE = Path(__file__).parent
RECIPE, RESULTS = HERE.parent / "examples" / "resnet50.py", HERE / "results" / "loopback.json"
BUCKET_BYTES = 25 << 20
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH")
Step = Callable[[], None]


class Loopback(Comm):
    """One rank, to whom all that it sends comes back."""

    rank, size, topology, timeout_s = 0, 1, Topology(("here",)), None

    def all_reduce(self, tensor: Tensor) -> None:
        """Add what came and halve the sum, which has the bits of what was sent."""
        tensor.add_(tensor.clone()).mul_(0.5)

    def send(self, tensor: Tensor, to: int) -> Pending:
        raise NotImplementedError("there is nobody to send to")

    def receive(self, tensor: Tensor, source: int) -> Pending:
        raise NotImplementedError("there is nobody to receive from")

    def channel(self, name: str, *, idle: bool = False) -> Loopback:
        """Another of the kind."""
        return Loopback()

    def group(self, ranks: range) -> Loopback:
        """Another of the kind."""
        return Loopback()

    def gather_objects(self, value: Any, purpose: str, *kinds: type) -> list[Any]:
        """This rank's, alone."""
        return [value]

    def close(self) -> None:
        """There is nothing to give back."""


def everything_replicated(model: nn.Module) -> Plan:
    """Every layer by all-reduce, the last layer first."""
    layers = [layer.name for layer in trainable_layers(model)]
    choices = tuple(Choice(name, "replicate", "allreduce") for name in reversed(layers))
    return Plan(1, model_digest(model), choices, BUCKET_BYTES, lanes=1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Step:
    """One step of training."""

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def seconds(step: Step, steps: int) -> float:
    """Seconds a step, of some that follow one another without a wait between them."""
    _finish()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _finish()
    return (time.perf_counter() - start) / steps


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def waits(step: Step, steps: int = 5) -> Counter[str]:
    """How often, in some steps, the host waited for the GPU, by call."""
    _finish()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            step()
    return Counter(
        {event.key: event.count for event in profiled.key_averages() if event.key.startswith(WAITS)}
    )


def main(batch: int, rounds: int, steps: int) -> None:
    """Compare, and print."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    recipe = load(RECIPE)
    models = {"plain": recipe.model().to(device)}
    models |= {name: copy.deepcopy(models["plain"]) for name in ("engine", "plain again")}
    x, y = (
        torch.randn(batch, 3, 224, 224, device=device),
        torch.randint(1000, (batch,), device=device),
    )
    made = {name: recipe.optimizer(model.parameters()) for name, model in models.items()}
    with using(Loopback()) as session:
        job = TrainingJob(models["engine"], None, [made["engine"]], weighs=False)
        attach(session, job, Prepared(everything_replicated(models["engine"])))
        taken = {name: step_of(model, made[name], x, y) for name, model in models.items()}
        for step in taken.values():
            seconds(step, steps)  # warm
        found: dict[str, list[float]] = {name: [] for name in taken}
        for _ in range(rounds):
            for name, step in taken.items():
                found[name].append(seconds(step, steps))
        waited = {name: waits(step) for name, step in taken.items()} if device == "cuda" else {}
    states = {name: model.state_dict() for name, model in models.items()}
    plain = states.pop("plain")
    equal = {
        name: all(torch.equal(plain[key], each[key]) for key in plain)
        for name, each in states.items()
    }
    figures = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "batch": batch,
        "step_s": {name: statistics.median(each) for name, each in found.items()},
        "engine_over_plain": statistics.median(
            b / a for a, b, _ in zip(*found.values(), strict=True)
        ),
        "plain_again_over_plain": statistics.median(
            c / a for a, _, c in zip(*found.values(), strict=True)
        ),
        "equal_bits": equal,
        "waits_in_5_steps": {name: dict(each) for name, each in waited.items()},
    }
    print(json.dumps(figures, indent=1))
    if device == "cuda":
        RESULTS.write_text(json.dumps(figures | {"rounds": found}, indent=1) + "\n")
    if equal["plain again"] and not equal["engine"]:
        raise SystemExit("the engine's weights are not those of plain PyTorch")


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("--batch", 64), ("--rounds", 9), ("--steps", 20)):
        options.add_argument(name, type=int, default=default)
    main(**vars(options.parse_args()))
