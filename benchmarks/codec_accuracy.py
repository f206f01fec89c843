"""What codecs cost in accuracy: the same samples in the same order, exact and with each codec.

    .venv/bin/python benchmarks/codec_accuracy.py digits --out digits.json
    .venv/bin/python benchmarks/codec_accuracy.py text --seeds 3 --steps 1500 --out text.json

    digits   a small convolutional network on scikit-learn's digits: test accuracy
    text     a character-level GPT on the source of Python's own modules: loss on a part that is
             held out

Four ranks are threads of this process, so links play no part. Takes minutes a run on a quiet
machine. Writes the curves as JSON, and prints a table: mean of the seeds, and its standard error.
"""

from __future__ import annotations

import argparse
import copy
import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.codec import Codec
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.registry import of
from shoal.front.joining import using

RANKS = 4
CONTEXT, WIDTH, HEADS, BLOCKS, CHARACTERS = 64, 128, 4, 3, 128


class Block(nn.Module):
    """Attention and a perceptron, each around its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        split = self.heads(self.norms[0](x)).view(rows, length, 3, HEADS, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).reshape(rows, length, -1))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class GPT(nn.Module):
    """The next character after each."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.characters(x) + self.places(torch.arange(x.shape[1]))
        out: Tensor = self.head(self.norm(self.blocks(hidden)))
        return out


def next_character(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Task:
    """What is trained, and how it is judged."""

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]  # of a seed, whole ones
    judge: Callable[[nn.Module], float]
    learning_rate: float


def text(rows: int = 32) -> Task:
    folder = Path(sysconfig.get_paths()["stdlib"])
    everything = "".join(p.read_text(errors="ignore") for p in sorted(folder.glob("*.py")))
    numbers = torch.tensor([min(ord(c), CHARACTERS - 1) for c in everything[:4_000_000]])
    training, held_out = numbers[: -len(numbers) // 10], numbers[-len(numbers) // 10 :]

    def batch(source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        window = source[starts[:, None] + torch.arange(CONTEXT + 1)]
        return window[:, :-1], window[:, 1:]

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(seed)
        while True:
            yield batch(
                training, torch.randint(len(training) - CONTEXT - 1, (rows,), generator=random)
            )

    @torch.no_grad()
    def judge(model: nn.Module) -> float:
        starts = torch.arange(0, len(held_out) - CONTEXT - 1, (len(held_out) - CONTEXT) // 512)
        x, y = batch(held_out, starts[:512])
        return float(next_character(model(x), y))

    return Task(GPT, next_character, batches, judge, 1e-3)


def digits(rows: int = 64) -> Task:
    loaded = load_digits()
    x = torch.tensor(loaded.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(loaded.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    held = len(x) // 5

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(seed)
        while True:
            picked = held + torch.randint(len(x) - held, (rows,), generator=random)
            yield x[picked], y[picked]

    @torch.no_grad()
    def judge(model: nn.Module) -> float:
        return 100 * float((model(x[:held]).argmax(1) == y[:held]).float().mean())

    def network() -> nn.Module:
        conv = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1)]
        return nn.Sequential(
            *conv,
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    return Task(network, F.cross_entropy, batches, judge, 1e-3)


def trained(task: Task, pin: str, seed: int, steps: int, every: int) -> list[tuple[int, float]]:
    """The curve of one run: how it is judged after so many steps."""
    torch.manual_seed(seed)
    built = task.model()
    cluster = Cluster(Topology(tuple("abcd"[:RANKS])), Link(1e-4, 1e8))

    def work(comm: ThreadComm) -> list[tuple[int, float]]:
        model, batches, curve = copy.deepcopy(built), task.batches(seed), []
        with using(comm, cluster):
            optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
            loss_fn = None
            for step in range(1, steps + 1):
                x, y = (part.chunk(RANKS)[comm.rank] for part in next(batches))
                if loss_fn is None:
                    _, loss_fn, _ = shoal.parallelize(
                        model, task.loss, optimizer, sample=(x, y), pins={"*": pin}
                    )
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                if step % every == 0 and comm.rank == 0:
                    curve.append((step, task.judge(model)))
            return curve

    return run(RANKS, work, timeout_s=3600)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["digits", "text"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--codecs", nargs="*", default=list(of(Codec)))
    parser.add_argument("--way", default="sliced:direct")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    task = digits() if asked.task == "digits" else text()
    curves = {}
    print("| way | last, mean of seeds | standard error | difference to exact |\n|---|---|---|---|")
    for codec in ["", *asked.codecs]:
        pin = f"{asked.way}+{codec}" if codec else asked.way
        runs = [trained(task, pin, s, asked.steps, asked.every) for s in range(asked.seeds)]
        curves[pin] = runs
        last = [curve[-1][1] for curve in runs]
        exact = [curve[-1][1] for curve in curves[asked.way]]
        off = [own - other for own, other in zip(last, exact, strict=True)]
        error = stdev(off) / sqrt(len(off)) if codec and len(off) > 1 else 0.0
        print(f"| `{pin}` | {mean(last):.4f} | {error:.4f} | {mean(off):+.4f} |", flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
