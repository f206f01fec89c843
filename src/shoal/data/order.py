"""A sampler's order, the same on every rank: it depends only on a seed and the epoch.

It is drawn piece by piece, as far as a pass has come. So a sampler may be endless, and one of 10
billion rows costs no more memory than a short one.

    sampler   piece, piece, piece, …      pieces that no pass needs any more are freed
              ^ a look   ^ the pass that trains
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal.core.random_state import RANDOM_STATE
from shoal.data.random_numbers import OwnRandom

_LOOKED_AT = 256  # rows at the start of an order that a digest reads
_KEPT = 1 << 20  # rows or lists that stay in memory for another pass of the same epoch
_GROWTH = 8  # longest piece ÷ the first: pieces grow, because each costs a change of random states
_OF_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class _Drawn:
    """A piece of an order, and the next piece once that is drawn."""

    def __init__(self, units: list[Any]) -> None:
        self.units = units
        self.next: _Drawn | None = None


@final
class Order:
    """The rows, or lists of rows, that a sampler gives in an epoch, drawn as they are needed.

    A sampler may draw from a random source of its own, which is not its `generator` attribute,
    torch, random or numpy. Then its maker must seed it alike on every rank.

    Args:
        sampler: the sampler. It is iterated over once for all passes of the epoch.
        seed: the same on every rank.
        epoch: number of the epoch.
        piece: rows or lists of the first piece. Each piece is twice as long as the one before, up
            to 8 times this number.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, epoch: int, piece: int = 1024) -> None:
        self._sampler, self._epoch = sampler, epoch
        self._piece, self._most = piece, piece * _GROWTH
        self.is_drawing = False  # a call of `set_epoch` meanwhile is the sampler's own
        self._units: Iterator[Any] | None = None
        self._lent, given = _own_generators(sampler, seed + epoch)
        self._random = OwnRandom(seed + epoch, given)
        self._is_plain = type(sampler) in _OF_TORCH  # whether it draws from its generator only
        self._lock = threading.Lock()
        self._first: _Drawn | None = _Drawn([])
        self._digest: int | None = None

    @property
    def is_gone(self) -> bool:
        """Whether its start is no longer in memory, so that another pass needs a new order."""
        return self._first is None

    def units(self) -> OrderReader:
        """Return a reader at the start of the order."""
        assert self._first is not None
        return OrderReader(self, self._first)

    def digest(self) -> int:
        """Return a digest of the first rows, in order; 0 if they are no numbers or names."""
        if self._digest is None:
            self._digest = digest(self.units().take(_LOOKED_AT))
        return self._digest

    def after(self, piece: _Drawn, num: int) -> _Drawn | None:
        """Return the next piece, given how many rows or lists come before it; None at the end."""
        if num >= _KEPT:
            self._first = None
        with self._lock:
            if piece.next is None and (units := self._draw()):
                piece.next = _Drawn(units)
            return piece.next

    def _draw(self) -> list[Any]:
        own = RANDOM_STATE if self._is_plain else self._random.drawing()
        with own, _lending(self._lent):
            self.is_drawing = True
            try:
                if self._units is None:
                    set_epoch(self._sampler, self._epoch)
                    self._units = iter(self._sampler)
                units = list(islice(self._units, self._piece))
                self._piece = min(2 * self._piece, self._most)
                return units
            finally:
                self.is_drawing = False


@final
class OrderReader(Iterator[Any]):
    """A reader of an order: its rows or lists, from the start."""

    def __init__(self, order: Order, piece: _Drawn) -> None:
        self._order, self._piece = order, piece
        self._at = self._num = 0  # rows read in this piece, and rows before it

    def take(self, num: int) -> list[Any]:
        """Read so many rows or lists; fewer at the end."""
        found = self._piece.units[self._at : self._at + num]
        self._at += len(found)
        while len(found) < num and self._go_on():
            some = self._piece.units[: num - len(found)]
            self._at = len(some)
            found += some
        return found

    def skip(self, num: int) -> int:
        """Skip so many rows or lists, and return how many there were."""
        skipped = 0
        while skipped < num:
            some = min(num - skipped, len(self._piece.units) - self._at)
            self._at += some
            skipped += some
            if not some and not self._go_on():
                break
        return skipped

    def __next__(self) -> Any:
        found = self.take(1)
        if not found:
            raise StopIteration
        return found[0]

    def _go_on(self) -> bool:
        following = self._order.after(self._piece, self._num + self._at)
        if following is None:
            return False
        self._num += self._at
        self._piece, self._at = following, 0
        return True


def set_epoch(sampler: Any, epoch: int) -> None:
    """Tell a sampler the epoch if it has `set_epoch`, but not the sources that follow it."""
    if hasattr(sampler, "set_epoch"):
        getattr(sampler.set_epoch, "own", sampler.set_epoch)(epoch)


def digest(units: list[Any]) -> int:
    """Return a digest of rows, or lists of rows, in order; 0 if they are no numbers or names."""
    some: list[Any] = []
    for unit in units:
        some += unit if isinstance(unit, list | tuple) else [unit]
    if not all(isinstance(row, int | np.integer | str) for row in some):
        return 0
    return zlib.crc32(repr([str(row) for row in some]).encode())


def propose_seed(loader: Any) -> int:
    """Return the seed to offer to other ranks: the sampler's or torch's, as the script set it."""
    generator = getattr(getattr(loader, "sampler", None), "generator", None)
    return (
        generator.initial_seed() if isinstance(generator, torch.Generator) else torch.initial_seed()
    )


Lent = list[tuple[Any, torch.Generator]]  # samplers, and generators for them


def _own_generators(sampler: Any, seed: int) -> tuple[Lent, list[torch.Generator]]:
    """Find generators for a sampler.

    Returns:
        Generators to lend to it, because other threads draw from torch's, and generators that the
        sampler has, which are put back after each piece.
    """
    lent, given = [], []
    for source in (sampler, getattr(sampler, "sampler", None)):
        if not isinstance(source, Sampler):
            known = getattr(source, "generator", None)
        elif (known := vars(source).get("generator", 0)) is None or (
            type(source) in _OF_TORCH and known
        ):
            lent.append((source, torch.Generator()))
            lent[-1][1].manual_seed(seed % 2**63)
            continue
        if isinstance(known, torch.Generator):
            given.append(known)
    return lent, given


@contextmanager
def _lending(lent: Lent) -> Iterator[None]:
    """Make samplers draw from these generators in the context."""
    before = [source.generator for source, _ in lent]
    try:
        for source, generator in lent:
            source.generator = generator
        yield
    finally:
        for (source, _), generator in zip(lent, before, strict=True):
            source.generator = generator
