"""The random state of the process, which ranks share if they are threads, and seeds."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# The process has one random state, and ranks may be its threads. Two threads that read torch's at
# once can lock each other out for good, since torch takes the generator's lock while it holds
# Python's. Who holds it may draw from a stream of its own inside.
RANDOM_STATE = threading.RLock()


def mixed(*numbers: int) -> int:
    """Make one seed of several numbers. Others make another one, also where their sums are alike.

    >>> mixed(0, 1) == mixed(0, 1), mixed(0, 1) == mixed(1, 0)
    (True, False)
    """
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


@contextmanager
def undrawn() -> Iterator[Callable[[], bool]]:
    """Take back all draws inside from torch's generator. The function tells whether there are any.

    Nothing inside waits for another rank, which may be a thread that draws.
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
