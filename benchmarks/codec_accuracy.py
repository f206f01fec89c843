"""What codecs cost in accuracy: the same samples in the same order, exact and with each codec.

    .venv/bin/python benchmarks/codec_accuracy.py digits        a quarter of an hour of one core
    .venv/bin/python benchmarks/codec_accuracy.py text          twenty minutes of one core

    digits   a small convolutional network on scikit-learn's digits: test accuracy, percent
    text     a character-level GPT on the source of Python's own modules: loss on a part that is
             held out

Four ranks are threads of this process, so links play no part. Every layer is coded, but for
embeddings. A codec whose terms an exchange can add on its way is also tried so. Curves go to
results/codecs-TASK.json after each run; a run that is there already is not made again. At the end
it prints a table, and draws docs/lab/codecs-TASK.svg.

A run is judged by the mean of its last three judgements. A codec is held against exact seed by
seed. It may be off by 0.5 points of accuracy, or by the larger of 0.5 % of the loss and two
standard errors of the difference.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.codecs.coded import codec_named
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.codec import Codec, LinearCodec
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.registry import of
from shoal.front.joining import using

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "pictures"))
from codec_curves import drawn  # noqa: E402  (of a folder beside this one)

RANKS = 4
CONTEXT, WIDTH, HEADS, BLOCKS, CHARACTERS = 64, 96, 4, 2, 128
JUDGED = 3  # judgements at a run's end, whose mean counts
Curve = list[tuple[int, float]]


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
    judged_by: str
    steps: int
    rate: float = 1e-3

    def allowed(self, exact: float, error: float, part: float = 0.005) -> float:
        """How much worse than exact a way may be: in accuracy 0.5 points, of a loss a part of it,
        or two standard errors of the difference.
        """
        return 0.5 if self.judged_by == _ACCURACY else max(part * exact, 2 * error)

    def worse(self, coded: float, exact: float) -> float:
        """By how much the first is worse."""
        return exact - coded if self.judged_by == _ACCURACY else coded - exact


_ACCURACY, _LOSS = "test accuracy, %", "held-out loss"


def text(rows: int = 16) -> Task:
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
        starts = torch.arange(0, len(held_out) - CONTEXT - 1, (len(held_out) - CONTEXT) // 256)
        x, y = batch(held_out, starts[:256])
        return float(next_character(model(x), y))

    return Task(GPT, next_character, batches, judge, _LOSS, 500)


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

    return Task(network, F.cross_entropy, batches, judge, _ACCURACY, 600)


def coded(task: Task, pin: str) -> dict[str, str]:
    """Pins of every layer, in which embeddings go exactly; the last that matches holds."""
    modules = task.model().named_modules()
    tables = [name for name, module in modules if isinstance(module, nn.Embedding)]
    return {"*": pin, **dict.fromkeys(tables, pin.partition("+")[0])}


def trained(task: Task, seed: int, steps: int, every: int, **options: Any) -> Curve:
    """How one run is judged after so many steps; options are those of `parallelize`."""
    torch.manual_seed(seed)
    built = task.model()
    cluster = Cluster(Topology(tuple("abcd"[:RANKS])), Link(1e-4, 1e8))

    def work(comm: ThreadComm) -> Curve:
        model, batches, curve = copy.deepcopy(built), task.batches(seed), []
        with using(comm, cluster):
            optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
            loss_fn = None
            for step in range(1, steps + 1):
                x, y = (part.chunk(RANKS)[comm.rank] for part in next(batches))
                if loss_fn is None:
                    _, loss_fn, _ = shoal.parallelize(
                        model, task.loss, optimizer, sample=(x, y), **options
                    )
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                if step % every == 0 and comm.rank == 0:
                    with shoal.global_weights(model):
                        curve.append((step, task.judge(model)))
            return curve

    return run(RANKS, work, timeout_s=36000)[0]


def table(task: Task, curves: dict[str, dict[str, Curve]], part: float = 0.005) -> str:
    """A row for each way: its mean over seeds, and how it is to the first, seed by seed.

    Of a loss it may be worse by that part.
    """
    lines = [
        f"| way | {task.judged_by} | worse than exact by | standard error | may be | holds |",
        "|---|---|---|---|---|---|",
    ]
    last = {
        pin: {seed: mean(value for _, value in curve[-JUDGED:]) for seed, curve in runs.items()}
        for pin, runs in curves.items()
    }
    exact = next(iter(last.values()))
    for pin, of_seeds in last.items():
        cells = [f"`{pin}`", f"{mean(of_seeds.values()):.4f}"]
        if of_seeds is not exact:
            off = [task.worse(value, exact[seed]) for seed, value in of_seeds.items()]
            error = stdev(off) / sqrt(len(off)) if len(off) > 1 else 0.0
            most = task.allowed(mean(exact.values()), error, part)
            cells += [f"{mean(off):+.4f}", f"{error:.4f}", f"{most:.4f}"]
            cells.append("yes" if mean(off) <= most else "**no**")
        lines.append("| " + " | ".join(cells) + " |" * (1 if of_seeds is not exact else 5))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=["digits", "text"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--codecs", nargs="*", default=list(of(Codec)))
    parser.add_argument("--way", default="sliced:direct")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    task = digits() if asked.task == "digits" else text()
    steps, out = asked.steps or task.steps, asked.out or HERE / f"results/codecs-{asked.task}.json"
    about = {"task": asked.task, "steps": steps, "every": asked.every, "ranks": RANKS}
    kept = json.loads(out.read_text()) if out.exists() else {**about, "curves": {}}
    if {name: kept[name] for name in about} != about:
        sys.exit(f"{out} has other runs than {about}: name another file with --out")
    curves = kept["curves"]
    ways = [asked.way, *(f"{asked.way}+{codec}" for codec in asked.codecs)]
    ways += [
        f"replicate:allreduce+{codec}"
        for codec in asked.codecs
        if isinstance(codec_named(codec), LinearCodec)
    ]
    for seed in map(str, range(asked.seeds)):  # all ways of a seed, then the next
        for pin in ways:
            if seed not in curves.setdefault(pin, {}):
                pins = coded(task, pin)
                curves[pin][seed] = trained(task, int(seed), steps, asked.every, pins=pins)
                out.write_text(json.dumps(kept) + "\n")
    print(table(task, curves))
    picture = HERE.parent / f"docs/lab/codecs-{asked.task}.svg"
    picture.write_text(drawn(task.judged_by, curves))


if __name__ == "__main__":
    main()
