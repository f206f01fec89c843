"""Models whose forwards do what people's forwards do: write in place, checkpoint, keep values."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from pipeline_trials import CLASSES, WIDTH, Blocks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class FillsZeros(Blocks):
    """Writes the blocks' outputs into a tensor that was made of inputs alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        filled = x.new_zeros(len(x), len(self.blocks), WIDTH)
        for number, block in enumerate(self.blocks):
            x = x + torch.tanh(block(x))
            filled[:, number] = x
        return self.head(filled.mean(1))


class ChangesInput(Blocks):
    """Changes its input in place, and uses it before the first layer and behind the last."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.head(self.body(self.first(x)) + x)


class LikeTransformers(Blocks):
    """Has a mask by vmap, makes modules in forward, and returns an object with blocks' values."""

    def forward(self, x: Tensor) -> Any:
        cache = Cache()
        places = torch.arange(x.shape[1])
        mask = torch.vmap(lambda place: place.new_ones((), dtype=torch.bool) & (place >= 0))(places)
        x = self.first(x) * mask
        for block in self.blocks:
            x = x + nn.Tanh()(block(x))
            cache.values.append(x)
        return nn.Dropout(0.0)(self.head(x)), cache


class Cache:
    """Values of blocks in a class that torch does not look into."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []


class ChangesItems(Blocks):
    """Changes in place what has crossed a cut."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x)) + 0
            x[:, 0] = 0
            x.add_(1)
        return x


class WithinNoGrad(Blocks):
    """Computes its first layer without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.head(self.body(x))


class Checkpointed(Blocks):
    """Checkpoints each block in its own forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))
        return x


class InnerCheckpoint(nn.Module):
    """A block of two layers that checkpoints itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Keeping(nn.Module):
    """A layer that keeps a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.term = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.term = x.pow(2).mean()
        return x


class SumsTerms(Blocks):
    """Returns the sum of the terms that its blocks have kept."""

    def __init__(self) -> None:
        super().__init__(Keeping)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), sum(block.term for block in self.blocks)  # type: ignore[return-value]


class KeepsTerm(Blocks):
    """Keeps a term of the loss, which the loop reads."""

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        self.term = x.pow(2).mean()
        return x


class KeepsMap(Blocks):
    """Keeps a tensor of its rows, which the loop reads."""

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        self.map = x * 2
        return x


class Counts(Blocks):
    """Counts its calls in a buffer of its own, and in one of each block."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x)


class Returns(Blocks):
    """Returns its output in a tree of some form."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(super().forward(x))


class SkipsInTurn(Blocks):
    """Leaves out a block in every other call."""

    steps = 0

    def body(self, x: Tensor) -> Tensor:
        self.steps += 1
        for number, block in enumerate(self.blocks):
            if number != 1 or self.steps % 2:
                x = x + torch.tanh(block(x))
        return x


class Skips(Blocks):
    """Leaves out the blocks of some numbers, which `skips` has for each run and all later ones."""

    def __init__(self, *, head: bool = True) -> None:
        super().__init__()
        self.skips: list[Set[int]] = [frozenset()]
        if not head:
            del self.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.first(x))
        return self.head(x) if hasattr(self, "head") else x

    def body(self, x: Tensor) -> Tensor:
        left_out = self.skips.pop(0) if len(self.skips) > 1 else self.skips[0]
        for number, block in enumerate(self.blocks):
            if number not in left_out:
                x = x + torch.tanh(block(x))
        return x


class Looks(Blocks):
    """Goes another way for other values."""

    def __init__(self, looks: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.looks = looks

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        return x * 2 if self.looks(x) else x


class PartsViews(Blocks):
    """Changes a value in place, of which a view was taken before the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = x * 1
        view = kept[:, :CLASSES]
        x = self.body(x)
        kept += 1
        return self.head(torch.cat([view + x[:, :CLASSES], kept[:, CLASSES:]], 1))
