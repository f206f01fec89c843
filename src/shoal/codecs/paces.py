"""Measures the seconds of codecs, on all ranks at once, because ranks may share cores.

Large pieces tell the cost of a value, small ones the fixed cost of each piece: the calls, and the
notes of errors. The values are new to the cache, as a gradient's are. It takes about a tenth of a
second a codec.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import count
from math import isqrt

import torch
from torch import Tensor

from shoal.codecs.coded_exchange import read_codec
from shoal.codecs.ledger import Ledger
from shoal.codecs.runs import RUN, Runs
from shoal.codecs.summed_terms import made, read
from shoal.contracts.codec import Codec, LinearCodec, State
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import LiveBucket
from shoal.core.cost import CodingPace

_LARGE, _SMALL = RUN, 1 << 12  # values of a piece
_SLICES = 16
# seconds for each way: some turns of ranks that share cores
_SECONDS = {_LARGE: 0.04, _SMALL: 0.03}
_WAYS = "encode", "decode", "terms", "sums"
_PURPOSE = "measuring codecs"
_Work = Callable[[int], None]


def probe_codings(comm: Comm, codecs: Iterable[str], device: torch.device) -> dict[str, CodingPace]:
    """Measure the seconds of each codec, on the slowest rank (a collective).

    Args:
        comm: the ranks, which give the same codecs.
        codecs: the codecs, as plans write them.
        device: where the values are.
    """
    shape, generator = (_SLICES, _LARGE), torch.Generator("cpu").manual_seed(0)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)
    lost, total = torch.zeros_like(values), torch.zeros_like(values)
    paces = {}
    for text in codecs:
        codec = read_codec(text)
        of_sizes: list[list[float]] = []
        for size, enough_s in _SECONDS.items():
            own = [part[:, :size].contiguous() for part in (values, lost, total)]
            works = _coding(codec, *own)
            if isinstance(codec, LinearCodec):
                works += _adding(codec, *own)
            seconds = [_seconds(comm, work, device, enough_s) for work in works]
            ranks: list[list[float]] = comm.gather_objects(seconds, _PURPOSE)
            of_sizes.append([max(times) for times in zip(*ranks, strict=True)])
        told: dict[str, float] = {}
        for name, *seconds in zip(_WAYS, *of_sizes, strict=False):
            told[f"{name}_s"], told[f"{name}_piece_s"] = _of_value_and_piece(*seconds)
        paces[text] = CodingPace(**told)
    return paces


def _of_value_and_piece(large_s: float, small_s: float) -> tuple[float, float]:
    """Return the seconds of a value, and of a piece apart from its values.

    The arguments are the seconds of a large piece and of a small one.
    """
    value_s = max(0.0, large_s - small_s) / (_LARGE - _SMALL)
    if value_s * _SMALL > small_s:
        return large_s / _LARGE, 0.0
    return value_s, small_s - value_s * _SMALL


def _coding(codec: Codec, values: Tensor, lost: Tensor, total: Tensor) -> list[_Work]:
    """Return the work to encode a piece, and to decode one."""
    runs, numel = Runs(codec), values.shape[1]
    code = torch.empty(runs.nbytes(numel, 4), dtype=torch.uint8, device=values.device)
    note = _noting(values)

    def encode(at: int) -> None:
        note(at, lost[at], lambda: runs.encode(values[at], code, lost[at], {}))

    def decode(at: int) -> None:
        runs.decode_add(code, total[at])

    return [encode, decode]


def _adding(codec: LinearCodec, values: Tensor, lost: Tensor, total: Tensor) -> list[_Work]:
    """Return the work to make terms of a piece, and to read their sums, in both turns."""
    side = isqrt(values.shape[1])
    shape = side, side
    states: tuple[State, State] = {}, {}  # states of each turn
    note = _noting(values)
    terms = [
        made(codec, values[0].view(shape), lost[0].view(shape), state, turn)
        for turn, state in enumerate(states)
    ]

    def make(at: int) -> None:
        turn = at % 2
        gradient, own = values[at].view(shape), lost[at].view(shape)
        note(at, lost[at], lambda: made(codec, gradient, own, states[turn], turn))

    def read_sums(at: int) -> None:
        turn = at % 2
        read(codec, terms[turn], total[at].view(shape), states[turn], turn)

    return [make, read_sums]


def _noting(values: Tensor) -> Callable[[int, Tensor, Callable[[], object]], None]:
    """Return a function that does some work and notes its losses, as carriers do."""
    numel = values.shape[1]
    bucket = LiveBucket.even(values[0], {"piece": numel}, 1)
    ledger = Ledger(bucket, values.dtype)

    def note(at: int, lost: Tensor, work: Callable[[], object]) -> None:
        given, before = ledger.sample(0, values[at]), ledger.sample(0, lost)
        work()
        ledger.coded("probe", 0, given, before, ledger.sample(0, lost))

    return note


def _seconds(comm: Comm, work: _Work, device: torch.device, enough_s: float) -> float:
    """Return the seconds of one piece."""
    for at in range(2):
        work(at)
    comm.gather_objects(None, _PURPOSE)
    began = time.perf_counter()
    for times in count(1):
        work(times % _SLICES)
        _finish(device)
        passed_s = time.perf_counter() - began
        if passed_s > enough_s and times % 2 == 0:  # both turns equally often
            break
    return passed_s / times


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
