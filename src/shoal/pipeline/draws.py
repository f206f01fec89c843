"""Random numbers in a pipeline, as of dropout: each call, station and micro-batch has a seed.

    the call          in training each rank draws one number from its generator of torch
    the station       starts the generator at a seed of that number, itself and the micro-batch
    behind it         the generator has the state from before

So ranks that begin with one seed keep equal generators, a checkpoint has all that the next numbers
depend on, and torch.utils.checkpoint makes the same ones again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.core.draws import RANDOM_STATE, mixed

_MOST = 1 << 62


def drawn_for_call() -> int:
    """Draw the number of a call from this rank's generator."""
    with RANDOM_STATE:
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
    generators, seed = _generators(device), mixed(call, station, micro)
    with RANDOM_STATE:  # not for the whole of a station, which waits for other ranks
        before = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(seed)
    try:
        yield
    finally:
        with RANDOM_STATE:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators
