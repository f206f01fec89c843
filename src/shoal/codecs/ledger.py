"""The error of sent values by parameter: of one step, and of 100 steps in a row.

    of a step       ‖sent − given‖ / ‖given‖
    of 100 steps    ‖Σ sent − Σ given‖ / max(‖Σ given‖, √Σ‖given‖²)

A codec sends v − lost' of v = given + lost, so sent − given = lost − lost'. Over many steps all
terms but the first and last cancel. The other term of the second divisor is the sum that random
steps would reach: if gradients are noise around 0, the error is not compared with their small mean.
Of a large parameter up to 2,048 numbers are sampled, evenly apart. Squares have float64, because
float32 cannot hold the square of 1e25. The cost is some microseconds for a slice and round.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import final

import torch
from torch import Tensor

from shoal.contracts.exchange import LiveBucket

WINDOW = 100  # rounds
_SAMPLE = 2048  # numbers of a span


@dataclass
class _Window:
    """Rounds in a row, with sums over them."""

    before: Tensor  # losses at the beginning
    given: Tensor  # sum of given values
    squares: Tensor  # sum of squares
    rounds: int = 1


@dataclass
class _Account:
    """Sampled numbers of one leg and slice."""

    window: _Window | None = None  # the open window
    lost: Tensor | None = None  # the unsent part of changes after the last round
    step: tuple[Tensor, Tensor] | None = None  # error and given values in a window's first round
    mean: tuple[Tensor, Tensor, Tensor] | None = None  # error, sum and squares in the last window


@final
class Ledger:
    """Errors of one bucket's sent values."""

    def __init__(self, bucket: LiveBucket, dtype: torch.dtype) -> None:
        self._dtype, self._device = dtype, bucket.flat.device
        self._indices: list[Tensor] = []
        # a span's name, number of samples, and values for each
        self._spans: list[list[tuple[str, int, float]]] = []
        for row in bucket.spans:
            at, picked, sampled = 0, [torch.empty(0, dtype=torch.long, device="cpu")], []
            for span in row:
                numel = span.stop - span.start
                every = 1 if numel <= _SAMPLE else numel // _SAMPLE | 1
                places = torch.arange(at, at + numel, every, device="cpu")
                picked.append(places)
                sampled.append((span.name, len(places), numel / len(places)))
                at += numel
            self._indices.append(torch.cat(picked).to(bucket.flat.device))
            self._spans.append(sampled)
        self._accounts: dict[tuple[str, int], _Account] = defaultdict(_Account)

    def sample(self, rank: int, values: Tensor) -> Tensor:
        """Return the sampled numbers of a slice."""
        return values.index_select(0, self._indices[rank]).to(self._dtype)

    def coded(self, leg: str, rank: int, given: Tensor, before: Tensor, after: Tensor) -> None:
        """Note a round: the given values, and the losses before and after it."""
        account = self._accounts[leg, rank]
        window = account.window
        if window is None:
            account.step = (before - after, given)
            account.window = window = _Window(before, given.clone(), _squares(given))
        else:
            window.given += given
            wide = given.double()
            window.squares.addcmul_(wide, wide)
            window.rounds += 1
        if window.rounds == WINDOW:
            account.mean = (window.before - after, window.given, window.squares)
            account.window = None

    def sent(self, rank: int, changes: Tensor, sent: Tensor) -> None:
        """Note a round of changes, which include the earlier losses."""
        account = self._accounts["changes", rank]
        before = torch.zeros_like(changes) if account.lost is None else account.lost
        account.lost = changes - sent
        self.coded("changes", rank, changes - before, before, account.lost)

    def step_errors(self) -> dict[str, float]:
        """Return the error of the last sampled step, by parameter."""
        return self._errors([(key, (*a.step, None)) for key, a in self._accounts.items() if a.step])

    def mean_errors(self) -> dict[str, float]:
        """Return the error over the last 100 steps in a row, by parameter; {} before that."""
        return self._errors([(key, a.mean) for key, a in self._accounts.items() if a.mean])

    def _errors(
        self, noted: list[tuple[tuple[str, int], tuple[Tensor, Tensor, Tensor | None]]]
    ) -> dict[str, float]:
        """Return the worse leg's error, over all slices together."""
        sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for (leg, rank), (off, given, squares) in noted:
            sizes = [numbers for _, numbers, _ in self._spans[rank]]
            parts = zip(
                self._spans[rank],
                off.split(sizes),
                given.split(sizes),
                (_squares(given) if squares is None else squares).split(sizes),
                strict=True,
            )
            for (name, _, weight), off_part, given_part, square_part in parts:
                of_name = sums[name, leg]
                of_name[0] += float(_squares(off_part).sum()) * weight
                of_name[1] += float(_squares(given_part).sum()) * weight
                of_name[2] += float(square_part.sum()) * weight
        errors: dict[str, float] = {}
        for (name, _), (off_sum, given_sum, squares_sum) in sums.items():
            whole = max(given_sum, squares_sum)
            error = sqrt(off_sum / whole) if whole > 0 and isfinite(off_sum / whole) else 0.0
            errors[name] = max(error, errors.get(name, 0.0))
        return errors


def _squares(numbers: Tensor) -> Tensor:
    return numbers.double().square()
