"""Ordinary loops by seed: a script as people write it, with what the planner chooses, on ranks.

    python tests/served/ordinary_loops.py --cases 2000
    python tests/served/ordinary_loops.py --case 17

A case is all that follows from its number: a model, a loss, optimizers, a scheduler, a loader and
habits of loops. Links are so slow that layers are cut. One process then takes the same global
batches, as the ranks had them, and must end with the same weights.
"""

from __future__ import annotations

import copy
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from by_seed import judge_cases
from ordinary_models import DRESSES, KINDS, LOSSES, OPTIMIZERS, Dressed, undressed
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import ShoalError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))  # as pytest does
from one_process import difference, state

WITHIN, WITHIN_AUTOCAST = 1e-8, 5e-2
EPOCHS = 2
# families of strategies that the planner may choose from; None: all
AMONG = (
    *[None] * 14,
    ["replicate", "head", "embedding"],
    ["replicate", "column_pair", "row_pair"],
    ["replicate", "column"],
    ["replicate", "row"],
    ["sliced"],
    ["replicate", "factor"],
    ["pipeline"],
)
LOADERS = (
    "in order",
    "shuffled",
    "shuffled",
    "drop last",
    "distributed",
    "batch sampler",
    "weighted",
    "stream",
    "list",
    "by hand",
    "by hand",
)
ONCE = ("in order", "shuffled", "distributed", "batch sampler", "stream", "list", "by hand")
HABITS = (
    "clip norm",
    "clip value",
    "own clip",
    "scaler off",
    "scaler on",
    "averaged",
    "frozen",
    "set to zero",
    "closure",
    "evaluated",
    "stops early",
    "resumed",
    "penalty",
    "logged",
    "best kept",
    "lr by hand",
    "norm logged",
)
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=200, cycle_momentum=False),
    "warm-up": lambda o: lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / 4)),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}
MEANS = ("module", "function", "lambda", "smoothed", "likelihood", "margin", "focal", "by hand")


class Rows(Dataset[Any]):
    """Rows by number, as tuples or dicts."""

    def __init__(self, columns: dict[str, Tensor], as_dict: bool) -> None:
        self.columns, self.as_dict = columns, as_dict

    def __getitem__(self, row: int) -> Any:
        found = {name: column[row] for name, column in self.columns.items()}
        return found if self.as_dict else tuple(found.values())

    def __len__(self) -> int:
        return len(self.columns["y"])


class Stream(IterableDataset[Any]):
    """The same rows as a stream."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[row] for row in range(len(self.rows)))


@dataclass
class Place:
    """What a script has on one rank, or alone."""

    model: Any
    loss_fn: Any
    optimizers: list[Any]
    parts: Any = None  # alone: is told the rows of each rank in a step
    schedulers: list[Any] = field(default_factory=list)
    average: Any = None
    best: Any = None
    saved: Any = None
    steps: int = 0


@dataclass(frozen=True)
class Loop:
    """All that is random in one case."""

    number: int
    ranks: int
    kind: str
    dress: str
    loss: str
    form: str
    optimizer: str
    groups: str
    schedule: str
    source: str
    batch: str
    rows: int
    batch_size: int
    as_dict: bool
    accumulates: int
    skips_sending: bool
    autocast: bool
    habits: frozenset[str]
    among: list[str] | None
    bytes_per_s: float

    @classmethod
    def of(cls, number: int) -> Loop:
        dice = random.Random(number)
        kind = dice.choice(list(KINDS))
        task = KINDS[kind].task
        loss = dice.choice(list(LOSSES[task]))
        dress = dice.choice(list(DRESSES)) if task != "own" and dice.random() < 0.2 else ""
        if task in ("pairs", "heads", "aux"):
            dress = ""
        optimizer = dice.choice(list(OPTIMIZERS))
        ranks = dice.choice((2, 2, 2, 3))
        habits = frozenset(dice.sample(HABITS, dice.choice((0, 1, 1, 2, 2, 3, 4))))
        loader, groups = (
            dice.choice(LOADERS),
            dice.choice(("one",) * 4 + ("groups", "layers", "two")),
        )
        accumulates = dice.choice((1, 1, 1, 2, 3))
        if optimizer == "lbfgs":
            groups, accumulates, habits = (
                "one",
                1,
                habits - {"scaler on", "scaler off"} | {"closure"},
            )
        if "closure" in habits:
            accumulates, habits = 1, habits - {"scaler on", "scaler off"}
        if KINDS[kind].norm and loader != "by hand":
            loader = "drop last"
        return cls(
            number=number,
            ranks=ranks,
            kind=kind,
            dress=dress,
            loss=loss,
            form=cls._form(dice, task, loss, dress, optimizer),
            optimizer=optimizer,
            groups=groups,
            schedule=dice.choice(("", "", *SCHEDULES)),
            source=loader,
            batch=dice.choice(("rank", "global")),
            rows=dice.randint(5 * ranks, 9 * ranks),
            batch_size=dice.randint(2, 4),
            as_dict=dice.random() < 0.3,
            accumulates=accumulates,
            skips_sending=dice.random() < 0.5,
            autocast=dice.random() < 0.1 and optimizer != "lbfgs",
            habits=habits,
            among=dice.choice(AMONG),
            bytes_per_s=dice.choice((3e4, 1e5, 1e6)),
        )

    @staticmethod
    def _form(dice: random.Random, task: str, loss: str, dress: str, optimizer: str) -> str:
        """Choose how the loss is handed over."""
        if task == "own":
            return dice.choice(("own", "compute"))
        forms = ["loss_fn"] * 4 + ["compute", "compute more", "compute of three"]
        forms += ["first batch", "first batch of three"] if optimizer != "lbfgs" else []
        if loss == "tempered":
            return "loss_fn"
        if loss in MEANS and not dress and task != "aux":
            forms.append("in the loop")
        return dice.choice(forms)

    # ---------------------------------------------------------------- what a script begins with

    def columns(self) -> dict[str, Tensor]:
        """All rows of the dataset."""
        generator = torch.Generator().manual_seed(self.number)
        columns = KINDS[self.kind].rows(self.rows, generator)
        if not self.autocast:
            return columns
        return {n: c.float() if c.is_floating_point() else c for n, c in columns.items()}

    def model(self) -> nn.Module:
        """The model, as it begins."""
        torch.manual_seed(self.number)
        model = KINDS[self.kind].make()
        model = Dressed(model, self.dress) if self.dress else model
        return model.float() if self.autocast else model.double()

    def loss_fn(self) -> Any:
        """The loss, as a script has it."""
        base = LOSSES[KINDS[self.kind].task][self.loss]()
        if base is not None and self.autocast and isinstance(base, nn.Module):
            base.float()
        if not self.dress:
            return base
        return lambda output, y: base(undressed(output), y)

    def optimizers(self, parameters: list[nn.Parameter]) -> list[Any]:
        """One optimizer, or two, of one group or several."""
        make = OPTIMIZERS[self.optimizer]
        if self.groups == "two":
            half = len(parameters) // 2
            return [make(parameters[:half]), make(parameters[half:])]
        if self.groups == "layers":
            lr = 0.005
            return [make([{"params": [p], "lr": lr * (1 + n)} for n, p in enumerate(parameters)])]
        if self.groups == "groups":
            vectors = [p for p in parameters if p.dim() < 2]
            others = [p for p in parameters if p.dim() >= 2]
            return [make([{"params": others}, {"params": vectors, "weight_decay": 0.0}])]
        return [make(parameters)]

    def inputs(self, batch: Any) -> Any:
        """What the model is called with: a tensor, a tuple, or a dict."""
        names = list(KINDS[self.kind].columns)
        if self.as_dict:
            return {n: batch[n] for n in names if n not in ("y", "to")}
        found = [column for n, column in zip(names, batch, strict=False) if n not in ("y", "to")]
        return found[0] if len(found) == 1 else tuple(found)

    def target(self, batch: Any) -> Any:
        """The target of a batch."""
        if self.kind == "heads":
            return (batch["y"], batch["to"]) if self.as_dict else tuple(batch[1:])
        return batch["y"] if self.as_dict else batch[-1]

    def called(self, model: Any, batch: Any) -> Any:
        """Call the model with a batch."""
        x = self.inputs(batch)
        if KINDS[self.kind].task == "own":
            return model(**x, y=batch["y"]) if self.as_dict else model(x, batch[-1])
        if isinstance(x, dict):
            return model(**x)
        return model(*x) if isinstance(x, tuple) else model(x)

    def given(self, loss_fn: Any) -> dict[str, Any]:
        """What `parallelize` is given for the loss, beside the sample."""
        if self.form == "own":
            return {"loss_fn": None}
        if self.form in ("loss_fn", "in the loop"):
            return {"loss_fn": loss_fn}
        return {"loss_fn": None, "compute_loss": self.computing(loss_fn)}

    def computing(self, loss_fn: Any) -> Any:
        """Return a function that computes the loss, of two or three arguments."""

        def compute_loss(model: Any, batch: Any) -> Any:
            output = self.called(model, batch)
            if self.form == "compute" and KINDS[self.kind].task == "own":
                return output[1]
            loss = loss_fn(output, self.target(batch))
            return (loss, {"rows": 1}) if self.form == "compute more" else loss

        def of_three(model: Any, x: Any, y: Any) -> Any:
            if isinstance(x, dict):
                return loss_fn(model(**x), y)
            return loss_fn(model(*x) if isinstance(x, tuple) else model(x), y)

        return of_three if self.form.endswith("three") else compute_loss

    def sample(self, batch: Any) -> Any:
        """The sample of a first batch; None where it is left out."""
        if self.form.startswith("first batch"):
            return None
        if self.form in ("compute", "compute more"):
            return batch
        if self.form == "own":
            x = self.inputs(batch)
            return ({**x, "y": batch["y"]} if self.as_dict else (x, batch[-1])), None
        return self.inputs(batch), self.target(batch)

    def loss_of(self, place: Place, batch: Any) -> Tensor:
        """The loss of a batch, as the loop computes it."""
        dtype = torch.bfloat16 if self.autocast else None
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            if self.form == "own":
                loss = self.called(place.model, batch)[1]
            elif self.form == "loss_fn":
                loss = place.loss_fn(self.called(place.model, batch), self.target(batch))
            elif self.form == "in the loop":
                loss = self.loss_fn()(self.called(place.model, batch), self.target(batch))
            elif self.form.endswith("three"):
                loss = place.loss_fn(place.model, self.inputs(batch), self.target(batch))
            else:
                loss = place.loss_fn(place.model, batch)
            loss = loss[0] if isinstance(loss, tuple) else loss
            if KINDS[self.kind].task == "aux":
                loss = loss + 0.01 * place.model.aux
        if "penalty" in self.habits and self.loss != "sum":
            loss = loss + 1e-3 * sum(p.square().sum() for p in place.model.parameters())
        return loss

    # ---------------------------------------------------------------- loaders

    def loader(self, rank: int) -> Iterable[Any]:
        """This rank's loader, as a script makes it, sharded."""
        rows = Rows(self.columns(), self.as_dict)
        size = self.batch_size * (self.ranks if self.batch == "global" else 1)
        shard = partial(shoal.shard, batch=self.batch)
        if self.source == "by hand":
            return self._by_hand(rows, rank)
        if self.source == "stream":
            return shard(DataLoader(Stream(rows), size))
        if self.source == "list":
            return shard([*DataLoader(rows, size)])
        if self.source == "batch sampler":
            generator = torch.Generator().manual_seed(self.number)
            drawn = RandomSampler(rows, generator=generator)
            return shard(DataLoader(rows, batch_sampler=BatchSampler(drawn, size, False)))
        if self.source == "distributed":
            cut = DistributedSampler(rows, self.ranks, rank, shuffle=True, seed=3)
            return shoal.shard(DataLoader(rows, self.batch_size, sampler=cut))
        if self.source == "weighted":
            weights = torch.linspace(1, 3, len(rows))
            drawn = WeightedRandomSampler(weights.tolist(), len(rows))
            return shard(DataLoader(rows, size, sampler=drawn))
        is_last_dropped = self.source == "drop last"
        shuffle = self.source != "in order"
        return shard(DataLoader(rows, size, shuffle=shuffle, drop_last=is_last_dropped))

    def _by_hand(self, rows: Rows, rank: int) -> list[Any]:
        """Global batches, of which a rank has some rows: without `shard`."""
        dice, found, size = random.Random(self.number), [], self.batch_size * self.ranks
        least = 2 if KINDS[self.kind].norm else 1
        for start in range(0, len(rows) - size + 1, size):
            cuts = sorted(dice.sample(range(1, size), self.ranks - 1))
            ends = [0, *cuts, size]
            if min(b - a for a, b in pairwise(ends)) < least:
                ends = [n * self.batch_size for n in range(self.ranks + 1)]
            numbers = range(start + ends[rank], start + ends[rank + 1])
            found.append(torch.utils.data.default_collate([rows[row] for row in numbers]))
        return found

    # ---------------------------------------------------------------- the loop itself

    def train(self, place: Place, epochs: Iterable[Iterable[Any]]) -> dict[str, Tensor]:
        """Train as people do. Return the state of the model, and of an average of it."""
        place.schedulers = [SCHEDULES[self.schedule](o) for o in place.optimizers if self.schedule]
        if "averaged" in self.habits:
            place.average = AveragedModel(place.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        enabled = "scaler on" in self.habits
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=enabled)
        best, worse = float("inf"), 0
        for epoch in epochs:
            mean = torch.zeros(())
            for number, batch in enumerate(epoch):
                mean = self.step(place, batch, number, scaler)
            if "evaluated" in self.habits:
                mean = self.evaluated(place, batch)
            if "best kept" in self.habits and float(mean) < best:
                place.best = copy.deepcopy(place.model.state_dict())
            worse = worse + 1 if float(mean) > best else 0
            best = min(best, float(mean))
            for scheduler in place.schedulers:
                is_plateau = self.schedule == "plateau"
                scheduler.step(*([float(mean)] if is_plateau else []))
            if "stops early" in self.habits and worse:
                break
        if "best kept" in self.habits and place.best is not None:
            place.model.load_state_dict(place.best)
        average = {} if place.average is None else state(place.average)
        return state(place.model) | {f"average.{n}": tensor for n, tensor in average.items()}

    def step(self, place: Place, batch: Any, number: int, scaler: Any) -> Tensor:
        """Make a step of the loop, or a part of one. Return the mean loss over all ranks."""
        self.by_number(place)
        if "closure" in self.habits:
            loss = self.by_closure(place, batch)
        else:
            is_end = (number + 1) % self.accumulates == 0
            more = self.skips_sending and not is_end
            with place.model.no_sync() if more and place.parts is None else nullcontext():
                loss = self.loss_of(place, batch)
                scaled = loss / self.accumulates
                (scaler.scale(scaled) if self._scales else scaled).backward()
            if is_end:
                self.update(place, scaler)
        place.steps += 1
        if place.average is not None:
            place.average.update_parameters(place.model)
        if "logged" in self.habits:
            loss.item()
        rows = len(pytree.tree_leaves(batch)[0])
        needs = self.schedule == "plateau" or {"stops early", "best kept"} & self.habits
        mean = torch.as_tensor(shoal.mean(loss.detach(), weight=rows)) if needs else loss.detach()
        return torch.zeros(()) if self.loss in ("sum", "weights", "ignored") else mean

    @property
    def _scales(self) -> bool:
        return bool({"scaler on", "scaler off"} & self.habits)

    def by_closure(self, place: Place, batch: Any) -> Tensor:
        """Step by a closure."""
        for optimizer in place.optimizers:

            def closure(optimizer: Any = optimizer) -> Tensor:
                for each in place.optimizers:
                    each.zero_grad()
                loss = self.loss_of(place, batch)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
        return torch.as_tensor(loss)

    def update(self, place: Place, scaler: Any) -> None:
        """Clip, step and clear."""
        parameters = [p for p in place.model.parameters() if p.requires_grad]
        for optimizer in place.optimizers if self._scales else ():
            scaler.unscale_(optimizer)
        if "clip norm" in self.habits:
            nn.utils.clip_grad_norm_(parameters, 0.5)
        if "clip value" in self.habits:
            nn.utils.clip_grad_value_(parameters, 0.05)
        if "own clip" in self.habits and len(place.optimizers) == 1 and place.parts is None:
            place.optimizers[0].clip_grad_norm_(0.5)
        elif "own clip" in self.habits and len(place.optimizers) == 1:
            groups = place.optimizers[0].param_groups
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 0.5)
        if "norm logged" in self.habits:
            float(sum(p.grad.norm() ** 2 for p in parameters if p.grad is not None) ** 0.5)
        for optimizer in place.optimizers:
            (partial(scaler.step, optimizer) if self._scales else optimizer.step)()
            optimizer.zero_grad(set_to_none="set to zero" not in self.habits)
        if self._scales:
            scaler.update()

    def by_number(self, place: Place) -> None:
        """Do what a script does before a certain step."""
        frozen = next(m for m in place.model.modules() if [*m.parameters(recurse=False)])
        if "frozen" in self.habits and place.steps in (1, 3):
            frozen.requires_grad_(place.steps == 3)
        if "lr by hand" in self.habits and place.steps == 2:
            for optimizer in place.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
        if "resumed" in self.habits and place.steps == 2:
            held = [place.model, *place.optimizers, *place.schedulers]
            place.saved = copy.deepcopy([each.state_dict() for each in held])
        if "resumed" in self.habits and place.steps == 3:
            held = [place.model, *place.optimizers, *place.schedulers]
            for each, saved in zip(held, place.saved, strict=True):
                each.load_state_dict(saved)

    def evaluated(self, place: Place, batch: Any) -> Tensor:
        """Evaluate on a batch, as all ranks do."""
        place.model.eval()
        with torch.no_grad():
            output = self.called(place.model, batch)
            loss = self.loss_of(place, batch)
            logits = undressed(output)
            if isinstance(logits, Tensor) and logits.dim() > 1:
                (logits.argmax(-1) == 0).sum().item()
        place.model.train()
        return torch.as_tensor(shoal.mean(loss.detach(), weight=len(pytree.tree_leaves(batch)[0])))


def recorded(epochs: Iterable[Iterable[Any]], taken: list[list[Any]]) -> Iterator[Iterator[Any]]:
    """Give the epochs of a loader, and record their batches."""
    for epoch in epochs:
        taken.append([])
        yield (taken[-1].append(copy.deepcopy(batch)) or batch for batch in epoch)


def joined(batches: list[Any], dtype: torch.dtype) -> Any:
    """Join the batches of all ranks in one step."""

    def whole(*parts: Tensor) -> Tensor:
        rows = torch.cat(parts)
        return rows.to(dtype) if rows.is_floating_point() else rows

    return pytree.tree_map(whole, *batches)


def passes(loader: Any) -> Iterator[Any]:
    """Iterate over a loader once an epoch."""
    for epoch in range(EPOCHS):
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        yield loader


@dataclass
class OnRanks:
    """A case on ranks: what each took and ended with."""

    loop: Loop
    strategies: set[str] = field(default_factory=set)
    places: list[Place] = field(default_factory=list)
    taken: list[list[list[Any]]] = field(default_factory=list)  # batches by rank and epoch

    @property
    def steps(self) -> int:
        """The most steps that a rank has made."""
        return max((place.steps for place in self.places), default=0)

    def run(self) -> list[dict[str, Tensor]]:
        """Return each rank's state at the end."""
        loop = self.loop
        copies, losses = [loop.model() for _ in range(loop.ranks)], []
        for _ in range(loop.ranks):
            losses.append(loop.loss_fn())
        hosts = tuple(f"host{rank}" for rank in range(loop.ranks))
        cluster = Cluster(Topology(hosts), Link(1e-5, loop.bytes_per_s), 1.0)
        self.taken = [[] for _ in hosts]

        def work(comm: ThreadComm) -> Any:
            model, rank = copies[comm.rank], comm.rank
            with using(comm, cluster):
                loader = loop.loader(rank)
                given = loop.given(losses[rank])
                learned = losses[rank].parameters() if isinstance(losses[rank], nn.Module) else ()
                optimizers = loop.optimizers([*model.parameters(), *learned])
                first = next(iter(loader))
                model, loss_fn, _ = shoal.parallelize(
                    model,
                    given["loss_fn"],
                    optimizers if len(optimizers) > 1 else optimizers[0],
                    compute_loss=given.get("compute_loss"),
                    sample=loop.sample(first),
                    sync_batchnorm=KINDS[loop.kind].norm,
                    **({} if loop.among is None else {"strategies": loop.among}),
                )
                place = Place(model, loss_fn, optimizers)
                self.places.append(place)
                ended = loop.train(place, recorded(passes(loader), self.taken[rank]))
                plan = shoal.plan_of(model)
                self.strategies.update(choice.strategy for choice in plan.choices)
                return ended

        return run(loop.ranks, work, timeout_s=60, hosts=hosts)


def alone(loop: Loop, taken: list[list[list[Any]]]) -> dict[str, Tensor]:
    """Train in one process on the batches that ranks took together."""
    dtype = torch.float32 if loop.autocast else torch.float64
    epochs = [
        [joined(list(step), dtype) for step in zip(*e, strict=True)]
        for e in zip(*taken, strict=True)
    ]
    model, loss = loop.model(), loop.loss_fn()
    learned = loss.parameters() if isinstance(loss, nn.Module) else ()
    optimizers = loop.optimizers([*model.parameters(), *learned])
    given = loop.given(loss)
    with using(ThreadComm()):
        loss_fn = given.get("compute_loss") or given["loss_fn"]
        return loop.train(Place(model, loss_fn, optimizers, parts=True), epochs)


def missed(loop: Loop, taken: list[list[list[Any]]]) -> str:
    """Tell whether a pass had a row twice, or not at all."""
    if loop.source not in ONCE or "stops early" in loop.habits:
        return ""
    if loop.source == "by hand":
        return ""
    for epoch in zip(*taken, strict=True):
        rows = [pytree.tree_leaves(batch)[0] for batches in epoch for batch in batches]
        found = Counter(str(row.tolist()) for rows_of in rows for row in rows_of)
        all_rows = Counter(str(row.tolist()) for row in next(iter(loop.columns().values())))
        if loop.as_dict:
            all_rows = Counter(str(row.tolist()) for row in pytree.tree_leaves(loop.columns())[0])
        if found != all_rows:
            return f"ROWS {sum(found.values())} of {sum(all_rows.values())}"
    return ""


def ended(ranks: OnRanks, error: Exception) -> str:
    """Say how a case ended. One process may end so, too."""
    said = f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " /")
    if not ranks.steps and isinstance(error, ShoalError):
        return f"refused {said}"
    try:
        alone(ranks.loop, ranks.taken)
    except Exception as other:
        if type(other) is type(error):
            return "unwritten: one process ends so, too"
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"ENDED {said} ({where.filename.rpartition('/')[2]}:{where.lineno})"


def judged(number: int, chosen: Counter[str]) -> str:
    """Return what came of a case, and count what was chosen for it."""
    loop = Loop.of(number)
    ranks = OnRanks(loop)
    try:
        states = ranks.run()
    except Exception as error:
        return ended(ranks, error)
    chosen.update(ranks.strategies)
    if said := missed(loop, ranks.taken):
        return said
    expected = alone(loop, ranks.taken)
    off = max(difference(expected, each) for each in states)
    within = WITHIN
    if loop.autocast:  # as far as rounding to 16 bits goes
        exact = alone(replace(loop, autocast=False), ranks.taken)
        within = max(WITHIN_AUTOCAST, 2 * difference(expected, exact))
    return "same" if off <= within else f"DIFFERS {off:.1e}: {sorted(ranks.strategies)}"


if __name__ == "__main__":
    judge_cases(__doc__, judged, Loop.of)
