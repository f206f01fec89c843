"""Two small tasks, and how ways of training them are held against one another: for the benchmarks
codec_accuracy.py, local_accuracy.py and batch_accuracy.py.

    digits   a small convolutional network on scikit-learn's digits: test accuracy, percent
    text     a character-level GPT on the source of Python's own modules: loss on a part that is
             held out

Four ranks are threads of this process, so links play no part. A run is judged by the mean of its
last three judgements. A way is held against the first one seed by seed. It may be off by 0.5 points
of accuracy, or by the larger of a part of the loss and two standard errors of the difference.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from curves import Curve, drawn
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

HERE = Path(__file__).parent

RANKS = 4
CONTEXT, WIDTH, HEADS, BLOCKS, CHARACTERS = 64, 96, 4, 2, 128
JUDGED = 3  # judgements at a run's end, whose mean counts
TASKS = ("digits", "text")


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

    def allowed(self, exact: float, error: float, part: float) -> float:
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


def trained(
    task: Task, seed: int, steps: int, every: int, exact_steps: int = 0, **options: Any
) -> Curve:
    """How one run is judged after so many steps; options are those of `parallelize`.

    They hold from the step on that follows so many exact ones.
    """
    torch.manual_seed(seed)
    built = task.model()
    cluster = Cluster(Topology(tuple("abcd"[:RANKS])), Link(1e-4, 1e8))
    begun = {0: {} if exact_steps else options, exact_steps: options}  # by the step before

    def work(comm: ThreadComm) -> Curve:
        model, batches, curve = copy.deepcopy(built), task.batches(seed), []
        with using(comm, cluster):
            optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
            loss_fn = task.loss
            for step in range(1, steps + 1):
                x, y = (part.chunk(RANKS)[comm.rank] for part in next(batches))
                if step - 1 in begun:
                    if step > 1:
                        shoal.unparallelize(model)
                    _, loss_fn, _ = shoal.parallelize(
                        model, task.loss, optimizer, sample=(x, y), **begun[step - 1]
                    )
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                if step % every == 0 and comm.rank == 0:
                    with shoal.global_weights(model):
                        curve.append((step, task.judge(model)))
            return curve

    return run(RANKS, work, timeout_s=36000)[0]


def table(task: Task, curves: Mapping[str, Mapping[str, Curve]], part: float) -> str:
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


def task_named(name: str, **options: int) -> Task:
    """One of `TASKS`; the option is its rows of a batch."""
    return digits(**options) if name == "digits" else text(**options)


def parser(description: str) -> argparse.ArgumentParser:
    """Of a command line that names a task."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("task", choices=TASKS)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--out", type=Path)
    return made


class Runs:
    """Curves of all ways and seeds, in a file. A run that is there already is not made again.

    Args:
        path: of the file, which is written after each run
        about: what all runs of the file have in common
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._kept = json.loads(path.read_text()) if path.exists() else {**about, "curves": {}}
        if {name: self._kept[name] for name in about} != about:
            sys.exit(f"{path} has other runs than {about}: name another file with --out")
        self.curves: dict[str, dict[str, Curve]] = self._kept["curves"]

    def make(self, ways: Mapping[str, Callable[[int], Curve]], seeds: int) -> None:
        """Make what is missing: all ways of a seed, then those of the next."""
        for seed in map(str, range(seeds)):
            for way, trained in ways.items():
                if seed not in self.curves.setdefault(way, {}):
                    self.curves[way][seed] = trained(int(seed))
                    self._path.write_text(json.dumps(self._kept) + "\n")

    def remembered(self, name: str, found: Callable[[], Any]) -> Any:
        """What else the file keeps by that name, found once."""
        if name not in self._kept:
            self._kept[name] = found()
            self._path.write_text(json.dumps(self._kept) + "\n")
        return self._kept[name]

    def show(self, task: Task, part: float, picture: Path, names: Mapping[str, str]) -> None:
        """Print the table, and draw the curves of the ways that have a name in the picture."""
        print(table(task, self.curves, part))
        named = {names[way]: runs for way, runs in self.curves.items() if way in names}
        picture.write_text(drawn(task.judged_by, named))
