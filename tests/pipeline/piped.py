"""Trains a model in a pipeline, and the same model in one process, and compares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from one_process import (
    Batch,
    State,
    assert_same_bits,
    built,
    call,
    cluster_of,
    difference,
    on_threads,
    rows_of,
    sgd,
    state,
)
from small_models import KINDS
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

import shoal
from shoal.comm.threads import ThreadComm
from shoal.front.session_start import using

PIPELINE = {"*": "pipeline"}


def loss_of(model: nn.Module, loss_fn: Any, batch: Batch) -> Tensor:
    """The loss of a batch; without a loss_fn the model returns it beside its output."""
    x, y = batch
    output = call(model, x)
    loss: Tensor = loss_fn(output, y) if loss_fn else getattr(output, "loss", output[1])
    return loss


def plain(model: Any, loss_fn: Any, optimizer: Any, batches: Iterable[Batch]) -> list[float]:
    """The ordinary loop; returns the losses."""
    losses = []
    for batch in batches:
        loss = loss_of(model, loss_fn, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def clipped(model: Any, loss_fn: Any, optimizer: Any, batches: Iterable[Batch]) -> None:
    """Clips by the norm of all gradients."""
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, loss_fn, batch).backward()
        assert clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()


def accumulated(model: Any, loss_fn: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    """Adds up the gradients of two batches before each step."""
    for first in range(len(batches)):
        for batch in (batches[first], batches[first - 1]):
            (loss_of(model, loss_fn, batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def scheduled(model: Any, loss_fn: Any, optimizer: Any, batches: Iterable[Batch]) -> None:
    """Lowers the learning rate after every step."""
    scheduler = StepLR(optimizer, 1, 0.5)
    for batch in batches:
        plain(model, loss_fn, optimizer, [batch])
        scheduler.step()


def with_evaluation(
    model: Any, loss_fn: Any, optimizer: Any, batches: Sequence[Batch]
) -> list[float]:
    """Looks at losses between steps, without gradients."""
    losses = []
    for batch in batches:
        plain(model, loss_fn, optimizer, [batch])
        model.eval()
        with torch.no_grad():
            losses.append(loss_of(model, loss_fn, batches[0]).item())
        model.train()
    return losses


LOOPS = {
    "plain": plain,
    "clipped": clipped,
    "accumulated": accumulated,
    "scheduled": scheduled,
    "with evaluation": with_evaluation,
}


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training script, of whose model only copies are trained."""

    model: nn.Module
    batches: Sequence[Batch]
    loss_fn: Any
    optimizer: Callable[[Iterable[nn.Parameter]], Any] = sgd
    loop: Callable[..., Any] = plain
    options: dict[str, Any] = field(default_factory=dict)
    uneven: bool = True

    def alone(self) -> tuple[Any, State]:
        """What the loop returns in one process, and the state behind it."""
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(p for p in model.parameters() if p.requires_grad)
        with using(ThreadComm()):
            return self.loop(model, self.loss_fn, optimizer, self.batches), state(model)

    def on_ranks(self, ranks: int, pins: Any = PIPELINE) -> list[tuple[Any, State]]:
        """What the loop returns on each rank, and the state behind it."""
        copies = [copy.deepcopy(self.model) for _ in range(ranks)]

        def work(comm: ThreadComm) -> tuple[Any, State]:
            own = [rows_of(batch, comm.rank, ranks, self.uneven) for batch in self.batches]
            model = copies[comm.rank]
            with using(comm, cluster_of(ranks)):
                model, loss_fn, optimizer = shoal.parallelize(
                    model,
                    copy.deepcopy(self.loss_fn),
                    self.optimizer(p for p in model.parameters() if p.requires_grad),
                    sample=own[0],
                    pins=pins,
                    **self.options,
                )
                return self.loop(model, loss_fn, optimizer, own), state(model)

        return on_threads(ranks, work)


def script(kind: str, **how: Any) -> Script:
    """A script for one of the small models."""
    found = KINDS[kind]
    return Script(model=built(found.make), batches=found.batches(), loss_fn=found.loss_fn, **how)


def assert_same(
    script: Script, ranks: int, within: float = 1e-10, pins: Any = PIPELINE
) -> list[tuple[Any, State]]:
    """Ranks get what one process gets, and every rank the same bits; returns what ranks got."""
    _, expected = script.alone()
    got = script.on_ranks(ranks, pins)
    assert_same_bits([each for _, each in got])
    assert difference(state(script.model), expected) > 1e-3, "training changed nothing"
    assert difference(expected, got[0][1]) <= within
    return got
