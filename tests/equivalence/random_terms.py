"""Random models, loss terms, rows and plans: ranks against one process, in float64.

    python tests/equivalence/random_terms.py --cases 2000
    python tests/equivalence/random_terms.py --case 17
    python tests/equivalence/random_terms.py --cases 200 --day

A case is all that follows from its number. A step of it is one of the ways in which loops call
models and backward; its loss is a loss function's, with terms beside that reach parameters by the
output, by attributes, by a hook, by a penalty, or by a use of a weight outside its layer. What
ranks refuse they refuse before the first step, or they say which pin to write.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import random
import sys
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from one_process import cluster_of, difference, state
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import ShoalError
from shoal.front.session_start import using
from shoal.profiling import steps
from shoal.servers.servers import serve

WITHIN = 1e-9
SEED = "SHOAL_FUZZ_SEED"
TERMS = ("attribute", "list", "side", "hook", "output", "penalty", "one", "gradient", "weight")
STEPS = ("plain", "plain", "accumulate", "backwards", "two", "unlike", "late", "again")
OF_LINEAR = ("replicate", "sliced", "factor", "column", "row")
OF_TABLE = ("replicate", "sliced", "factor", "embedding")
BESIDE = ("", "", "", "head", "pair", "server", "server", "tail")  # over the pins of `_pins`
IGNORED = -100


class Net(nn.Module):
    """Layers of every kind, which keep some of what they compute.

    In a chain what is kept comes before a, b and c, which nothing else reads.
    """

    def __init__(self, of_ids: bool, with_scale: bool, in_chain: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6) if of_ids else None
        self.first = nn.Linear(6, 8) if in_chain else None
        self.a = nn.Linear(8 if in_chain else 6, 8)
        self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 3)
        self.side = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(3)) if with_scale else None

    def forward(self, x: Tensor) -> Tensor:
        inputs = x if self.table is None else self.table(x).mean(1)
        if self.first is not None:
            inputs = torch.tanh(self.first(inputs))
        hidden = torch.tanh(self.a(inputs))
        second = torch.tanh(self.b(hidden))
        self.inputs = inputs
        kept = hidden if self.first is None else inputs
        self.aux = kept.square().mean()
        self.sided = self.side(kept)
        self.parts = [kept.sin(), second if self.first is None else kept.cos()]
        output = self.c(second)
        return output if self.scale is None else output * self.scale


@dataclass(frozen=True)
class Case:
    """All that is random in one."""

    number: int
    ranks: int
    of_ids: bool
    with_scale: bool
    reduction: str  # mean, sum, or count
    terms: tuple[str, ...]
    step: str
    pins: dict[str, str]
    beside: str  # one of BESIDE
    servers: int
    tail: int
    rows: tuple[tuple[tuple[int, ...], ...], ...]  # of each rank, by step and by call

    @classmethod
    def of(cls, number: int) -> Case:
        dice = random.Random(number)
        ranks, of_ids, step = dice.choice((2, 2, 3)), dice.random() < 0.3, dice.choice(STEPS)
        terms = tuple(dice.sample(TERMS, dice.choice((0, 1, 1, 2, 3))))
        if of_ids:
            terms = tuple(term for term in terms if term != "gradient")
        if step == "unlike":  # of which call these are, nobody knows
            terms = tuple(term for term in terms if term not in ("hook", "weight"))
        others = random.Random(f"beside {number}")
        beside, hosts = others.choice(BESIDE), others.choice((1, 2))
        calls = 1 if step in ("plain", "again") else 2 if step in ("two", "unlike") else 3
        return cls(
            number,
            ranks,
            of_ids,
            dice.random() < 0.5,
            dice.choice(("mean", "mean", "sum", "count")),
            terms,
            step,
            _pins(dice) | _pins_beside(others, beside),
            beside,
            hosts if beside == "server" else 0,
            hosts if beside == "tail" else 0,
            tuple(_rows(dice, ranks, calls, alike=step == "two") for _ in range(2)),
        )

    def sample(self, rank: int) -> tuple[Tensor, Tensor]:
        return self.batch(0, 0, rank)

    def batch(self, step: int, call: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
        """A rank's rows in a call, or those of all ranks."""
        rows = self.rows[step][call]
        generator = torch.Generator().manual_seed(1000 * self.number + 10 * step + call)
        shape = (sum(rows), 2) if self.of_ids else (sum(rows), 6)
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        x = x.abs().mul(5).long().clamp(max=10) if self.of_ids else x
        y = torch.randint(3, (sum(rows),), generator=generator)
        if self.reduction == "count":
            y[torch.rand(len(y), generator=generator) < 0.3] = IGNORED
            y[sum(rows) - 1] = 0
        if rank is None:
            return x, y
        return x.split(rows)[rank].clone(), y.split(rows)[rank].clone()

    def loss_fn(self) -> Any:
        if self.reduction == "sum":
            return nn.CrossEntropyLoss(reduction="sum")
        if self.reduction == "count":
            return _kept_mean
        return nn.CrossEntropyLoss()

    def train(self, model: Any, loss_fn: Any, optimizer: Any, rank: int | None) -> None:
        """Two steps, on a rank's rows or on all."""
        for step in range(len(self.rows)):
            batches = [self.batch(step, call, rank) for call in range(len(self.rows[step]))]
            optimizer.zero_grad()
            Step(self, model, loss_fn, optimizer).run(batches)
            optimizer.step()


@dataclass(frozen=True)
class Step:
    """A step of a case."""

    case: Case
    model: Any
    loss_fn: Any
    optimizer: Any

    def run(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        step, quiet = self.case.step, getattr(self.optimizer, "accumulate", nullcontext)
        if step in ("two", "unlike"):
            sum(self.loss(*batch) for batch in batches).backward()
        elif step == "again":
            (batch,) = batches
            loss = self.loss_fn(self.model(batch[0]), batch[1])
            loss.backward(retain_graph=True)
            rest = self.beside(None, batch[0])
            if rest is not None:
                rest.backward()
        elif step == "late":
            losses = [self.loss(*batch) for batch in batches]
            for loss in losses[:-1]:
                with quiet():
                    loss.backward()
            losses[-1].backward()
        else:
            for number, batch in enumerate(batches):
                last = number == len(batches) - 1 or step != "accumulate"
                with nullcontext() if last else quiet():
                    self.loss(*batch).backward()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a call, with the terms beside."""
        seen: list[Tensor] = []
        hook = None
        if "hook" in self.case.terms:
            hook = self.model.b.register_forward_hook(lambda m, args, out: seen.append(out))
        output = self.model(x)
        if hook is not None:
            hook.remove()
        loss = self.loss_fn(output, y)
        if "output" in self.case.terms:
            loss = loss + 0.3 * output.square().mean()
        if seen:
            loss = loss + 0.3 * seen[0].square().mean()
        rest = self.beside(x, x)
        return loss if rest is None else loss + rest

    def beside(self, x: Tensor | None, inputs: Tensor) -> Tensor | None:
        """What comes of the model by no output."""
        model, terms = self.model, self.case.terms
        found = []
        if "attribute" in terms:
            found.append(model.aux)
        if "list" in terms:
            found += [part.square().mean() for part in model.parts]
        if "side" in terms:
            found.append(model.sided.square().mean())
        if "penalty" in terms:
            found.append(sum(p.square().sum() for p in model.parameters()))
        if "one" in terms:
            found.append(model.b.weight.abs().sum())
        if "weight" in terms:
            found.append((model.inputs @ model.a.weight.t()).square().mean())
        if "gradient" in terms and x is not None:
            y = inputs.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(y).sum(), y, create_graph=True)
            found.append((slope.norm(2, dim=1) - 1).square().mean())
        return 0.2 * sum(found) if found else None


def _pins(dice: random.Random) -> dict[str, str]:
    way = dice.choice((*OF_LINEAR, "mixed", "mixed", "mixed"))
    pins = {"*": dice.choice(("replicate", "sliced"))}
    for name in "abc":
        pins[name] = dice.choice(OF_LINEAR) if way == "mixed" else way
    pins["table"] = dice.choice(OF_TABLE)
    return pins


def _pins_beside(dice: random.Random, beside: str) -> dict[str, str]:
    """A head, a pair of layers, or what hosts that do not train have."""
    if beside == "head":
        return {"c": "head"}
    if beside == "pair":
        return {"a": "column_pair", "b": "row_pair"}
    if beside == "server":
        at_servers = dice.sample("abc", dice.choice((1, 2, 3)))
        table = {"table": "server_rows"} if dice.random() < 0.5 else {}
        return dict.fromkeys(at_servers, "server") | table
    if beside == "tail":
        return {"c": "stage"}
    return {}


def _rows(dice: random.Random, ranks: int, calls: int, alike: bool) -> tuple[tuple[int, ...], ...]:
    of_calls = []
    for _ in range(calls):
        even = dice.random() < 0.3
        rows = tuple(3 if even else dice.randint(1, 5) for _ in range(ranks))
        of_calls.append(of_calls[0] if alike and of_calls else rows)
    return tuple(of_calls)


def _kept_mean(output: Tensor, target: Tensor) -> Tensor:
    total = F.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
    return total / (target != IGNORED).sum().clamp(min=1)


def _kept(output: Tensor, target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def judged(number: int) -> str:
    """What comes of a case: "same", or why it was refused.

    Raises:
        AssertionError: ranks got other values, or were refused without a way out.
    """
    case = Case.of(number)
    torch.manual_seed(number)
    in_chain = case.beside in ("head", "pair", "tail")
    model = Net(case.of_ids, case.with_scale and not in_chain, in_chain).double()
    alone = copy.deepcopy(model)
    case.train(alone, case.loss_fn(), optimizer_of(alone), None)
    copies = [copy.deepcopy(model) for _ in range(case.ranks + case.tail)]
    cluster = cluster_of(case.ranks, case.servers)
    cluster = replace(cluster, tail=tuple(f"tail{t}" for t in range(case.tail)))
    training = [False] * case.ranks

    def work(comm: ThreadComm) -> dict[str, Tensor] | None:
        if comm.rank >= case.ranks and case.servers:
            return serve(comm)
        mine = copies[comm.rank]
        with using(comm, cluster), suppress(SystemExit):  # which ends tail hosts
            names = {name.rpartition(".")[0] for name, _ in mine.named_parameters()}
            pins = {name: way for name, way in case.pins.items() if name in names or name == "*"}
            mine, loss_fn, optimizer = shoal.parallelize(
                mine,
                case.loss_fn(),
                optimizer_of(mine),
                sample=case.sample(min(comm.rank, case.ranks - 1)),
                pins=pins,
                count=_kept if case.reduction == "count" else None,
            )
            training[comm.rank] = True
            case.train(mine, loss_fn, optimizer, comm.rank)
            return state(mine)
        return None

    try:
        states = run(
            case.ranks + case.servers + case.tail,
            work,
            timeout_s=20,
            hosts=cluster.topology.hosts + cluster.servers + cluster.tail,
            servers=case.servers,
            tail=case.tail,
        )[: case.ranks]
    except ShoalError as error:
        refused = str(error).partition("\n")[0]
        ways_out = ("pins={", _OF_CALLS, *(_OF_HOSTS if case.tail else ()))
        assert not any(training) or any(way in str(error) for way in ways_out), str(error)
        return f"refused: {refused[:90]}"
    error = max(difference(state(alone), each) for each in states)
    assert error <= WITHIN, f"{error:.1e} from one process"
    return "same"


def day_seed(cases: int) -> int:
    """Return the first of this day's cases, and say how to repeat them."""
    first = int(os.environ.get(SEED) or int(time.time() // 86_400) * cases)
    print(f"cases {first} to {first + cases - 1}: {SEED}={first} repeats them", flush=True)
    return first


_OF_CALLS = "call backward once for each call of the model"
# what a loop may not do where hosts without rows hold layers: docs/guide/tail.md
_OF_HOSTS = ("let forward return it", "call the model again, or add the losses before backward")


def main() -> None:
    """Judge cases, print what came of them, and fail if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument(
        "--day",
        action="store_true",
        help=f"other cases each day, all of them in turn; {SEED} repeats those of another day",
    )
    parser.add_argument("--beside", choices=BESIDE, help="only cases with that")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("shoal").setLevel(logging.ERROR)
    steps._MOST = 1
    first = day_seed(options.cases) if options.day else options.first
    numbers = range(first, first + options.cases)
    found: Counter[str] = Counter()
    begin = time.perf_counter()
    for number in [options.case] if options.case is not None else numbers:
        if options.beside not in (None, Case.of(number).beside):
            continue
        try:
            found[f"{Case.of(number).beside or 'here':8} {judged(number)}"] += 1
        except Exception as error:  # also what is raised by mistake
            found["WRONG"] += 1
            print(f"WRONG {Case.of(number)}\n  {type(error).__name__}: {error}", flush=True)
    print(f"{sum(found.values())} cases in {time.perf_counter() - begin:.0f} s")
    for what, count in found.most_common():
        print(f"{count:6} {what}")
    sys.exit(1 if found["WRONG"] else 0)


if __name__ == "__main__":
    main()
