"""Ways of training that benchmarks/race.py compares, by name, and its task on pictures.

exact    int8    low_rank                    gradients in every step, in codes or not
local                                        rounds of 16 local steps, rule "nesterov", no lag
local H=4 average                            other lengths of a round, other rules
local first    local first=100    local grows    exact steps first, a quarter of them by default;
                                             rounds of 1, 2, 4 steps first
local lag                                    weights are under way for one round
local int4    local sparse_bits(share=0.0625,bits=4)    rounds in a codec
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Any

import torch
from accuracy import Task, task_named
from curves import Curve
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

EXACT = "exact"
ROUND = 16
JUDGED = 3  # judgements at a run's end, whose mean counts
_RULES = ("average", "bmuf", "slowmo")


def length_of(way: str) -> int:
    """The local steps of a way's round; 1 without."""
    words = way.split()
    if words[0] != "local":
        return 1
    return next((int(word[2:]) for word in words if word.startswith("H=")), ROUND)


def options_of(way: str, steps: int) -> dict[str, Any]:
    """What `parallelize` is asked for by a way, of a run of so many steps."""
    if way == EXACT:
        return {"pins": {"*": "replicate:allreduce"}}
    words = way.split()
    if words[0] != "local":
        exchange = "replicate:allreduce" if way == "low_rank" else "sliced:direct"
        return {"pins": {"*": f"{exchange}+{way}"}}
    length, first = length_of(way), 0
    rule, lag, grows, codec = "nesterov", 0, False, ""
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name == "first":
            first = int(value or steps // 4)
        elif word == "grows":
            grows = True
        elif word == "lag":
            lag = length
        elif word in _RULES:
            rule = word
        elif name != "H":
            codec = word
    lossy = shoal.Lossy(
        local_steps=length,
        outer=shoal.Outer(rule=rule, lag=lag),
        first=shoal.Beginning(first, grows=grows),
    )
    return {"lossy": lossy, "pins": {"*": f"replicate:direct+{codec}"} if codec else {}}


class Residual(nn.Module):
    """Two convolutions around their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def textures(rows: int = 32) -> Task:
    """A small ResNet that tells waves of eight directions apart, in noise."""

    def pictures(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        kinds = torch.randint(8, (count,), generator=random)
        angles = kinds * (torch.pi / 8) + 0.1 * torch.randn(count, generator=random)
        lengths = 2 + 3 * torch.rand(count, generator=random)
        phases = 6.3 * torch.rand(count, generator=random)
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        along = x * angles.cos().view(-1, 1, 1) + y * angles.sin().view(-1, 1, 1)
        waves = (6.3 * along / lengths.view(-1, 1, 1) + phases.view(-1, 1, 1)).sin()
        noise = 1.5 * torch.randn(count, 16, 16, generator=random)
        return (waves + noise)[:, None], kinds

    held_out = pictures(1024, torch.Generator().manual_seed(-1))

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(seed)
        while True:
            yield pictures(rows, random)

    @torch.no_grad()
    def judge(model: nn.Module) -> float:
        return float(F.cross_entropy(model(held_out[0]), held_out[1]))

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            Residual(16),
            nn.Conv2d(16, 32, 3, 2, padding=1),
            nn.ReLU(),
            Residual(32),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 8),
        )

    return Task(network, F.cross_entropy, batches, judge, "held-out loss", 400)


def task_of(name: str) -> Task:
    return textures() if name == "textures" else task_named(name)


def prices(
    task: Task, curves: Mapping[str, Mapping[str, Curve]]
) -> dict[str, tuple[float, float, int]]:
    """For each way its end, the mean of its prices by seed, and how many seeds there are.

    A way that is better than exact at its end has the price 1.
    """
    found = {}
    for way, by_seed in curves.items():
        ends = {
            seed: mean(value for _, value in curve[-JUDGED:]) for seed, curve in by_seed.items()
        }
        of_seeds = [price_of(task, curves[EXACT][seed], end) for seed, end in ends.items()]
        if ends:
            found[way] = mean(ends.values()), mean(of_seeds), len(of_seeds)
    return found


def price_of(task: Task, exact: Curve, end: float) -> float:
    """How many times the samples exact steps would need less for the same end.

    A curve that is not smooth may have had its own end before: exact steps have the price 1.
    """
    own = mean(value for _, value in exact[-JUDGED:])
    reached = _reached(task, exact, end)
    return max(1.0, _reached(task, exact, own) / reached) if reached else float("inf")


def _reached(task: Task, exact: Curve, end: float) -> float:
    """The steps after which exact steps were as good for the first time; 0 if that is not known."""
    means = [
        (exact[at][0], mean(value for _, value in exact[max(0, at - JUDGED + 1) : at + 1]))
        for at in range(len(exact))
    ]
    for (before, worse), (step, value) in itertools.pairwise(means):
        if task.worse(value, end) <= 0 <= task.worse(worse, end) and value != worse:
            return before + (step - before) * (worse - end) / (worse - value)
    return exact[-1][0] if task.worse(end, means[-1][1]) <= 0 else 0.0
