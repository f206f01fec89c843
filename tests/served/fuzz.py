"""Ordinary loops by seed, with what the planner chooses: ranks against one process, in float64.

    python tests/served/fuzz.py --cases 1000
    python tests/served/fuzz.py --case 17

A case is all that follows from its number: a small model, its rows, a link so slow that layers are
cut, a few habits of loops (habits.py), an optimizer. There are no pins: whatever was chosen must
train on, and end as one process does.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from by_seed import judge_cases
from habits import ALONE, HABITS, OF_INPUTS, WIDTH, Net, Step
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))  # as pytest does
from one_process import difference, on_threads, state

WITHIN = 1e-8
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, eps=1e-3),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-3, weight_decay=0.1),
}
ACTS = (nn.Tanh, nn.GELU, nn.SiLU, lambda: nn.ELU(inplace=True))
# families of strategies that the planner may choose from; None: all
AMONG = (
    None,
    None,
    None,
    ["replicate", "column", "row", "column_pair", "row_pair", "head", "embedding"],
    ["replicate", "head", "embedding"],
    ["replicate", "column_pair", "row_pair"],
    ["replicate", "column"],
    ["replicate", "row"],
    ["sliced"],
    ["replicate", "factor"],
    ["pipeline"],
    ["pipeline"],
)


@dataclass(frozen=True)
class Loop:
    """All that is random in one case."""

    number: int
    ranks: int
    rows: tuple[int, ...]
    of_ids: bool
    with_norm: bool
    sizes: tuple[int, int, int]  # of the hidden layers, the classes and the words
    act: int
    optimizer: str
    habits: tuple[str, ...]
    among: list[str] | None
    bytes_per_s: float
    sync: bool

    @classmethod
    def of(cls, number: int) -> Loop:
        dice = random.Random(number)
        ranks = dice.choice((2, 2, 2, 3))
        even = dice.random() < 0.3
        rows = tuple(3 if even else dice.randint(2, 5) for _ in range(ranks))
        of_ids, with_norm = dice.random() < 0.25, dice.random() < 0.2
        names = [n for n in HABITS if not of_ids or n not in OF_INPUTS]
        among = dice.choice(AMONG)
        sync = with_norm and among != ["pipeline"]
        return cls(
            number,
            ranks,
            rows,
            of_ids,
            sync,
            (dice.choice((8, 40, 120)), dice.choice((7, 24, 300)), dice.choice((11, 900))),
            dice.randrange(len(ACTS)),
            dice.choice(list(OPTIMIZERS)),
            (*(dice.choice(names) for _ in range(dice.randint(2, 6))), *habits_alone(dice)),
            among,
            dice.choice((3e4, 1e5, 1e6)),
            sync,
        )

    def model(self) -> nn.Module:
        """The model, as it begins."""
        hidden, classes, words = self.sizes
        torch.manual_seed(self.number)
        return Net(
            of_ids=self.of_ids,
            with_norm=self.with_norm,
            hidden=hidden,
            classes=classes,
            words=words,
            act=ACTS[self.act],
        ).double()

    def batch(self, step: int, rank: int | None) -> tuple[Tensor, Tensor]:
        """A rank's rows in a step, or those of all."""
        generator = torch.Generator().manual_seed(1000 * self.number + step)
        rows, (_, classes, words) = sum(self.rows), self.sizes
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        if self.of_ids:
            x = torch.randint(words, (rows, 2), generator=generator)
        y = torch.randint(classes, (rows,), generator=generator)
        if rank is None:
            return x, y
        return x.split(self.rows)[rank].clone(), y.split(self.rows)[rank].clone()

    def train(self, model: Any, loss_fn: Any, optimizer: Any, rank: int | None) -> Any:
        """Make a step by each habit."""
        for number, name in enumerate(self.habits):
            try:
                (HABITS | ALONE)[name](Step(model, loss_fn, optimizer, *self.batch(number, rank)))
            except Exception as error:
                error.add_note(f"habit: {name}")
                raise
        return state(model)


def habits_alone(dice: random.Random) -> list[str]:
    """Draw habits of rank 0 alone: in one loop of three."""
    return [dice.choice([*ALONE])] if dice.random() < 1 / 3 else []


def judged(number: int, chosen: Counter[str]) -> str:
    """Return what came of a case, and count what was chosen for it."""
    loop = Loop.of(number)
    model = loop.model()
    alone = copy.deepcopy(model)
    try:
        with using(ThreadComm()):
            optimizer = OPTIMIZERS[loop.optimizer](alone.parameters())
            expected = loop.train(alone, F.cross_entropy, optimizer, None)
    except RuntimeError:  # such as a change in place behind a backward hook
        return "no script of one process"
    copies = [copy.deepcopy(model) for _ in loop.rows]
    hosts = tuple(f"host{rank}" for rank in range(loop.ranks))
    cluster = Cluster(Topology(hosts), Link(1e-5, loop.bytes_per_s), 1.0)
    strategies: set[str] = set()

    def work(comm: ThreadComm) -> Any:
        own = copies[comm.rank]
        with using(comm, cluster):
            own, loss_fn, optimizer = shoal.parallelize(
                own,
                F.cross_entropy,
                OPTIMIZERS[loop.optimizer](own.parameters()),
                sample=loop.batch(0, comm.rank),
                sync_batchnorm=loop.sync,
                **({} if loop.among is None else {"strategies": loop.among}),
            )
            strategies.update(choice.strategy for choice in shoal.plan_of(own).choices)
            return loop.train(own, loss_fn, optimizer, comm.rank)

    try:
        states = on_threads(loop.ranks, work)
    except Exception as error:
        if not strategies:
            return "refused before the first step"
        chosen.update(strategies)
        notes = " ".join(getattr(error, "__notes__", []))
        return f"ENDED {type(error).__name__}: {str(error).partition(chr(10))[0][:110]} [{notes}]"
    chosen.update(strategies)
    off = max(difference(expected, each) for each in states)
    return "same" if off <= WITHIN else f"DIFFERS {off:.1e}: {sorted(strategies)} {loop.habits}"


if __name__ == "__main__":
    judge_cases(__doc__, judged, Loop.of)
