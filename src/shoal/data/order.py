"""A sampler's order, the same on every rank: it depends on a seed and the epoch alone."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import Sampler

from shoal.core.errors import UsageError
from shoal.profiling.untraced import RANDOM_STATE

_LOOKED_AT = 256  # rows of an order
_MOST = 1 << 24  # rows or batches of a sampler without __len__


def drawn(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """What a sampler gives in an epoch.

    A sampler that draws from a random source of its own (not its `generator` attribute, torch,
    random or numpy) must be given the same seed on every rank by whoever made it.

    Raises:
        UsageError: it has no `__len__`, and no end.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with _with_generators(sampler), drawing_from(seed + epoch, _generators(sampler)):
        if isinstance(sampler, Sized):
            return list(sampler)
        found = list(islice(sampler, _MOST))
    if len(found) == _MOST:
        raise UsageError(
            "the loader's sampler has no end",
            got=f"{type(sampler).__name__}, without __len__",
            do="give it an end and a __len__, the number of rows or batches in an epoch, or use an "
            "IterableDataset and count steps",
        )
    return found


def digest(rows: list[Any]) -> int:
    """A digest of some of an epoch's rows, in order; 0 where they are no numbers or names."""
    some: list[Any] = []
    for row in rows[:: max(1, len(rows) // _LOOKED_AT)]:  # or a list of rows
        some += row if isinstance(row, list | tuple) else [row]
    if not all(isinstance(row, int | np.integer | str) for row in some):
        return 0
    return zlib.crc32(repr([str(row) for row in some]).encode())


def proposed_seed(loader: Any) -> int:
    """The seed to offer the other ranks: the sampler's or torch's, so a seeded script stays so."""
    generator = getattr(getattr(loader, "sampler", None), "generator", None)
    return (
        generator.initial_seed() if isinstance(generator, torch.Generator) else torch.initial_seed()
    )


def _sources(sampler: Any) -> list[Any]:
    """A sampler, and the one in a batch sampler."""
    return [sampler, getattr(sampler, "sampler", None)]


def _generators(sampler: Any) -> list[torch.Generator]:
    """Those that a sampler draws from."""
    found = [getattr(source, "generator", None) for source in _sources(sampler)]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


@contextmanager
def _with_generators(sampler: Any) -> Iterator[None]:
    """Lend generators to torch's samplers that have none: another thread may draw from torch's."""
    lent = [
        source
        for source in _sources(sampler)
        if isinstance(source, Sampler) and vars(source).get("generator", 0) is None
    ]
    try:
        for source in lent:
            vars(source)["generator"] = torch.Generator()
        yield
    finally:
        for source in lent:
            vars(source)["generator"] = None


@final
class RandomState:
    """The state of all that Python code draws from."""

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = [torch.default_generator, *generators]
        self._states = [source.get_state() for source in self._generators]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def put_back(self) -> None:
        """Let them go on from here."""
        for source, state in zip(self._generators, self._states, strict=True):
            source.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def seed_all(seed: int, generators: Iterable[torch.Generator] = ()) -> None:
    """Start all that Python code draws from at a seed."""
    for source in (torch.default_generator, *generators):
        source.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def drawing_from(seed: int, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Start all that a sampler may draw from at `seed`, and put it back afterwards."""
    generators = list(generators)
    with RANDOM_STATE:
        before = RandomState(generators)
        try:
            seed_all(seed, generators)
            yield
        finally:
            before.put_back()


@final
class OwnRandom:
    """A random stream beside the program's: what a stream of rows draws from, in pieces."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._state: RandomState | None = None

    def reseed(self, seed: int) -> None:
        """Begin anew."""
        self._seed = seed

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from it for a while."""
        with RANDOM_STATE:
            before = RandomState()
            try:
                if self._seed is not None:
                    seed_all(self._seed)
                    self._seed = None
                elif self._state is not None:
                    self._state.put_back()
                yield
                self._state = RandomState()
            finally:
                before.put_back()
