"""Seeds, and the random state of the process, which ranks share if they are threads."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# The process has one random state, and ranks may be its threads. If two threads read torch's state
# at once, they can block each other for good, because torch takes the generator's lock while it
# holds Python's. A thread that holds the lock may draw from a stream of its own inside.
RANDOM_STATE = threading.RLock()


def mix_seeds(*numbers: int) -> int:
    """Make one seed of several numbers. Other numbers give another seed, even if their sum is
    equal.

    >>> mix_seeds(0, 1) == mix_seeds(0, 1), mix_seeds(0, 1) == mix_seeds(1, 0)
    (True, False)
    """
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


@contextmanager
def undrawn() -> Iterator[Callable[[], bool]]:
    """Undo all draws from torch's generator inside. The yielded function returns whether there are
    any.

    The code inside must not wait for another rank, which may be a thread that draws.
    """
    with RANDOM_STATE:
        before = torch.get_rng_state()

        def has_drawn() -> bool:
            return not torch.equal(before, torch.get_rng_state())

        try:
            yield has_drawn
        finally:
            if has_drawn():
                torch.set_rng_state(before)


def draw_seed() -> int:
    """Draw a seed from torch's generator."""
    with RANDOM_STATE:
        return int(torch.randint(1 << 62, (), device="cpu"))


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's generators of a device and of the CPU at a seed, and put them back afterwards.

    The lock is free inside, where a rank may wait for others.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    with RANDOM_STATE:
        before = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(seed)
    try:
        yield
    finally:
        with RANDOM_STATE:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
