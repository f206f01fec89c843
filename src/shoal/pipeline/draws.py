"""Random numbers in a pipeline, as of dropout: each call, station and micro-batch has a seed.

    the call          in training each rank draws one number from its generator of torch
    the station       starts the generator at a seed of that number, itself and the micro-batch
    behind it         the generator has the state from before

So ranks that begin with one seed keep equal generators, a checkpoint has all that the next numbers
depend on, and torch.utils.checkpoint makes the same ones again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MOST = 1 << 62


def drawn_for_call() -> int:
    """Draw the number of a call from this rank's generator."""
    return int(torch.randint(_MOST, (), device="cpu"))


@contextmanager
def drawing_for(call: int, station: int, micro: int, device: torch.device) -> Iterator[None]:
    """Start the random numbers of a station for one micro-batch; put the state back afterwards.

    Args:
        call: the number of the call.
        station: the number of the station.
        micro: the number of the micro-batch.
        device: the device that the station computes on.
    """
    digest = hashlib.blake2b(f"{call} {station} {micro}".encode(), digest_size=8).digest()
    generators = _generators(device)
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(int.from_bytes(digest, "little") % _MOST)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


@contextmanager
def undrawn() -> Iterator[None]:
    """Take back all draws inside."""
    before = torch.random.get_rng_state()
    try:
        yield
    finally:
        if not torch.equal(before, torch.random.get_rng_state()):
            torch.random.set_rng_state(before)


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators
