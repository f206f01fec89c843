"""Models whose training changes state on each rank otherwise, and what DDP would make of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from one_process import Batch, cluster_of, on_threads, rows_of, sgd, state
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.facts import MovingState
from shoal.front.session_start import using
from shoal.session.session import current
from shoal_tools.testing.byte_counts import Counts, TracedComm


class Centred(nn.Module):
    """DINO's centre, a running normaliser: changed and read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("center", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            self.center.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.last(torch.tanh(h - self.center))


class Replacing(Centred):
    """The same, whose centre is a new tensor each time."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            self.center = self.center * 0.9 + h.detach().mean(0) * 0.1
        return self.last(torch.tanh(h - self.center))


class Quantised(nn.Module):
    """A VQ codebook, learnt by averages of what comes to each code."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(7, 4))
        self.register_buffer("sizes", torch.zeros(7))
        self.register_buffer("started", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        if self.training and not bool(self.started):
            self.codes[: len(z)].copy_(z.detach()[: len(self.codes)])
            self.started.fill_(True)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        if self.training:
            hits = F.one_hot(nearest, len(self.codes)).to(z.dtype)
            self.sizes.mul_(0.8).add_(hits.sum(0), alpha=0.2)
            means = hits.T @ z.detach() / hits.sum(0).clamp(min=1)[:, None]
            self.codes.add_((means - self.codes) * 0.2 * (hits.sum(0) > 0)[:, None])
        return self.decode(z + (self.codes[nearest] - z).detach())


class Queued(nn.Module):
    """MoCo's queue of keys, and where in it the next ones go."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(6, 4), nn.Linear(9, 3)
        self.register_buffer("queue", torch.randn(9, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        keys = F.normalize(self.encode(x), dim=1)
        logits = keys @ self.queue.detach().clone().T
        if self.training:
            at = (int(self.place) + torch.arange(len(x), device=x.device)) % len(self.queue)
            self.queue[at] = keys.detach()
            self.place.fill_((int(self.place) + len(x)) % len(self.queue))
        return self.head(logits)


class Frozen(nn.Module):
    """A codebook that is a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 3)
        self.codes = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        if self.training:
            self.codes.data.lerp_(z.detach().mean(0), 0.3)
        return self.decode(torch.tanh(z + self.codes))


class Observed(nn.Module):
    """Quantisation-aware training: an observer's extremes, and the scale that follows from them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        for name in ("lowest", "highest"):
            self.register_buffer(name, torch.tensor(float("inf" if name == "lowest" else "-inf")))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("zero", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            self.lowest.copy_(torch.minimum(self.lowest, h.detach().min()))
            self.highest.copy_(torch.maximum(self.highest, h.detach().max()))
            self.scale.copy_((self.highest - self.lowest) / 255)
            self.zero.copy_((-self.lowest / self.scale).round().to(torch.int32))
        steps = (h.detach() / self.scale).round() + self.zero
        rounded = (steps.clamp(0, 255) - self.zero) * self.scale
        return self.last(torch.tanh(h + (rounded - h).detach()))


class CentredLoss(nn.Module):
    """DINO's loss, whose centre is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(output - self.center, y)
        self.center.lerp_(output.detach().mean(0), 0.1)
        return loss


READ = [Centred, Replacing, Quantised, Queued, Frozen, Observed]


def normed() -> nn.Module:
    """A batch normalisation before anything that is trained, so that its inputs are the data."""
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def by_hand(
    model: nn.Module, loss_fn: Any, batches: Sequence[Batch], ranks: int
) -> tuple[dict[str, Tensor], Any]:
    """Trained as under DDP in one process: gradients averaged, state rank 0's before a forward."""
    models = [copy.deepcopy(model) for _ in range(ranks)]
    losses = [copy.deepcopy(loss_fn) for _ in range(ranks)]
    optimizers = [sgd(p for p in m.parameters() if p.requires_grad) for m in models]
    for batch in batches:
        _as_first(models)
        _as_first([loss for loss in losses if isinstance(loss, nn.Module)])
        for rank, (replica, loss, optimizer) in enumerate(
            zip(models, losses, optimizers, strict=True)
        ):
            x, y = rows_of(batch, rank, ranks)
            optimizer.zero_grad()
            loss(replica(x), y).backward()
        for same in zip(*(m.parameters() for m in models), strict=True):
            if same[0].grad is not None:
                mean = sum(p.grad for p in same) / ranks  # type: ignore[misc]
                for p in same:
                    p.grad = mean.clone()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
    return state(models[0]), losses[0]


def _as_first(modules: Sequence[nn.Module]) -> None:
    with torch.no_grad():
        for module in modules[1:]:
            for own, first in zip(_held(module), _held(modules[0]), strict=True):
                own.copy_(first)


def _held(module: nn.Module) -> list[Tensor]:
    return [*module.buffers(), *(p for p in module.parameters() if not p.requires_grad)]


Ended = tuple[dict[str, Tensor], Any, tuple[MovingState, ...], Counts]


def on_ranks(
    model: nn.Module,
    loss_fn: Any,
    batches: Sequence[Batch],
    ranks: int,
    *,
    uneven: bool = False,
    servers: int = 0,
    loop: Callable[..., None] | None = None,
    **options: Any,
) -> list[Ended]:
    """Trained by Shoal: each rank's state in evaluation, its loss, what moves, what was sent."""
    copies = [(copy.deepcopy(model), copy.deepcopy(loss_fn)) for _ in range(ranks)]

    def work(comm: ThreadComm) -> Ended:
        replica, loss = copies[comm.rank]
        traced = TracedComm(comm)
        mine = [rows_of(batch, comm.rank, ranks, uneven) for batch in batches]
        with using(traced, cluster_of(ranks, servers)):
            optimizer = sgd(p for p in replica.parameters() if p.requires_grad)
            replica, loss, optimizer = shoal.parallelize(
                replica, loss, optimizer, sample=mine[0], **options
            )
            if loop is not None:
                loop(replica, loss, optimizer, mine, traced)
            else:
                for x, y in mine:
                    optimizer.zero_grad()
                    loss(replica(x), y).backward()
                    optimizer.step()
            attached = current().attached[replica]
            replica.eval()
            return state(replica), loss, attached.profile.moving, traced.counts

    return on_threads(ranks, work, servers)
