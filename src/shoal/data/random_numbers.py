"""Random numbers of samplers, streams and workers, apart from the script's numbers.

An order depends only on a seed and the epoch, so it is the same on every rank. A worker's numbers
depend on the rank too. Otherwise two ranks would augment their rows alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import final

import numpy as np
import torch

from shoal.core.random_state import RANDOM_STATE


@final
class RandomState:
    """The state of all random sources of Python code: torch, random and numpy."""

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = [torch.default_generator, *generators]
        self._states = [source.get_state() for source in self._generators]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def put_back(self) -> None:
        """Put all sources back into this state."""
        for source, state in zip(self._generators, self._states, strict=True):
            source.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def seed_all(seed: int, numpy: int | list[int], generators: Iterable[torch.Generator] = ()) -> None:
    """Seed all random sources of Python code. Numpy's seed has a form of its own."""
    for source in (torch.default_generator, *generators):
        source.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(numpy)


def seed_worker(seed: int) -> None:
    """Seed all random sources in a worker, from a seed of `mix_seeds`."""
    seed_all(seed, [seed % 2**32, seed >> 32])


@contextmanager
def _keep_state(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Restore the earlier random state at the end. No other thread draws in this context."""
    with RANDOM_STATE:
        before = RandomState(generators)
        try:
            yield
        finally:
            before.put_back()


@final
class OwnRandom:
    """A random stream apart from the program's, for a sampler or a stream of rows.

    Args:
        seed: its first seed.
        generators: further generators of the program that the code draws from.
    """

    def __init__(self, seed: int, generators: Iterable[torch.Generator] = ()) -> None:
        self._seed: int | None = seed
        self._state: RandomState | None = None
        self._generators = list(generators)

    def reseed(self, seed: int) -> None:
        """Begin anew at a seed."""
        self._seed = seed

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this stream in the context."""
        with _keep_state(self._generators):
            if self._seed is not None:
                seed_all(self._seed, self._seed % 2**32, self._generators)
                self._seed = None
            elif self._state is not None:
                self._state.put_back()
            yield
            self._state = RandomState(self._generators)


@contextmanager
def drawing_at(seed: int) -> Iterator[None]:
    """Draw from a seed of `mix_seeds` in the context, and restore the earlier state at the end."""
    with _keep_state():
        seed_worker(seed)
        yield
