"""Random numbers of samplers, streams and workers, apart from those of the script.

An order depends on a seed and the epoch alone, so it is the same on every rank. A worker's numbers
depend on the rank, too: else two ranks would augment their rows alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import final

import numpy as np
import torch

from shoal.core.draws import RANDOM_STATE


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


def seed_all(seed: int, numpy: int | list[int], generators: Iterable[torch.Generator] = ()) -> None:
    """Start all that Python code draws from at a seed, which numpy takes in a form of its own."""
    for source in (torch.default_generator, *generators):
        source.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(numpy)


def seed_worker(seed: int) -> None:
    """Start all that Python code draws from, in a worker, at a seed of `mixed`."""
    seed_all(seed, [seed % 2**32, seed >> 32])


@contextmanager
def _kept(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Put back the state of before at the end. No other thread draws meanwhile."""
    with RANDOM_STATE:
        before = RandomState(generators)
        try:
            yield
        finally:
            before.put_back()


@final
class OwnRandom:
    """A random stream beside the program's, which a sampler or a stream of rows draws from.

    Args:
        seed: the seed that it starts at.
        generators: further generators of the program that the code draws from.
    """

    def __init__(self, seed: int, generators: Iterable[torch.Generator] = ()) -> None:
        self._seed: int | None = seed
        self._state: RandomState | None = None
        self._generators = list(generators)

    def reseed(self, seed: int) -> None:
        """Begin anew."""
        self._seed = seed

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from it for a while."""
        with _kept(self._generators):
            if self._seed is not None:
                seed_all(self._seed, self._seed % 2**32, self._generators)
                self._seed = None
            elif self._state is not None:
                self._state.put_back()
            yield
            self._state = RandomState(self._generators)


@contextmanager
def drawing_at(seed: int) -> Iterator[None]:
    """Draw from a seed of `mixed` for a while, and put back the state of before."""
    with _kept():
        seed_worker(seed)
        yield
