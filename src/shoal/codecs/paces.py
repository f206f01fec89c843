"""Measures what codecs take of a rank's processor, with every rank at it, as ranks may share cores.

The values are new to the cache, as a gradient's are. Takes some hundredths of a second a codec.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import count
from math import isqrt

import torch
from torch import Tensor

from shoal.codecs.coded import codec_named
from shoal.codecs.runs import Runs
from shoal.codecs.summed import made, read
from shoal.contracts.codec import LinearCodec, State
from shoal.contracts.comm import Comm
from shoal.core.cost import CodingPace

_VALUES = 1 << 18  # of a slice
_SLICES = 16
_SECONDS = 0.03  # for each way
_PURPOSE = "measuring codecs"


def probe_codings(comm: Comm, codecs: Iterable[str], device: torch.device) -> dict[str, CodingPace]:
    """Seconds a value of each codec, the slowest rank's (a collective).

    Args:
        comm: the ranks, which give the same codecs.
        codecs: as plans write them.
        device: where the values are.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_SLICES, _VALUES, generator=generator).to(device)
    lost, total = torch.zeros_like(values), torch.zeros_like(values)
    paces = {}
    for text in codecs:
        runs = Runs(codec_named(text))
        lost.zero_()
        code = torch.empty(runs.nbytes(_VALUES, 4), dtype=torch.uint8, device=device)

        def encode(at: int, runs: Runs = runs, code: Tensor = code) -> None:
            runs.encode(values[at], code, lost[at], {})

        def decode(at: int, runs: Runs = runs, code: Tensor = code) -> None:
            runs.decode_add(code, total[at])

        own_s = [_seconds(comm, encode, device), _seconds(comm, decode, device)]
        if isinstance(runs.codec, LinearCodec):
            own_s += _terms_s(comm, runs.codec, values, lost.zero_())
        ranks: list[list[float]] = comm.gather_objects(own_s, _PURPOSE)
        paces[text] = CodingPace(*(max(times) for times in zip(*ranks, strict=True)))
    return paces


def _terms_s(comm: Comm, codec: LinearCodec, values: Tensor, lost: Tensor) -> list[float]:
    """Seconds a value to make terms, and to read their sums."""
    shape = isqrt(_VALUES), isqrt(_VALUES)
    states: tuple[State, State] = {}, {}  # of each turn
    total = torch.empty_like(values)
    terms = [
        made(codec, values[0].view(shape), lost[0].view(shape), state, turn)
        for turn, state in enumerate(states)
    ]

    def make(at: int) -> None:
        for turn, state in enumerate(states):
            made(codec, values[at].view(shape), lost[at].view(shape), state, turn)

    def read_sums(at: int) -> None:
        for turn, state in enumerate(states):
            read(codec, terms[turn], total[at].view(shape), state, turn)

    return [_seconds(comm, work, values.device) / 2 for work in (make, read_sums)]


def _seconds(comm: Comm, work: Callable[[int], None], device: torch.device) -> float:
    """Of one value."""
    work(0)
    comm.gather_objects(None, _PURPOSE)
    began = time.perf_counter()
    for times in count(1):
        work(times % _SLICES)
        _finish(device)
        passed_s = time.perf_counter() - began
        if passed_s > _SECONDS:
            break
    return passed_s / times / _VALUES


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
