"""The largest values alone, with their places: at 1 %, 67 times fewer bytes.

    code   │ places in the run, int32 │ values, bfloat16 │

They are found by a threshold from a sample, if it fits, or else by selection. All other values are
lost for now, and come when they have added up.
Reference: Lin et al., "Deep Gradient Compression", ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.codecs.ranges import within
from shoal.contracts.codec import Codec, State
from shoal.contracts.learning import LATER, LearningPrice
from shoal.core.numbers import check_number

_SAMPLE = 4096
_LEAST_SHARE = 1e-6  # a smaller share would leave two values of a bucket
_LARGEST = torch.finfo(torch.bfloat16).max
_MORE = 1.5, 4.0  # candidates for each wanted value; more if there are too few


@final
@dataclass(frozen=True)
class TopK(Codec):
    """Six bytes for each of the largest values."""

    name: ClassVar[str] = "top_k"
    in_runs: ClassVar[bool] = True
    least_dims: ClassVar[int] = 2
    most_error: ClassVar[float] = 0.95
    learning: ClassVar[LearningPrice] = LearningPrice(1.4, LATER)
    share: float = 0.01

    def __post_init__(self) -> None:
        rule = "the share of top_k is above 0, and at most 0.5"
        check_number(rule, self.share, _LEAST_SHARE, 0.5, do="leave it out: it is 0.01")

    def _number(self, numel: int) -> int:
        # an even number, because runs lie by fours
        return min(numel, 2 * max(1, round(self.share * numel / 2)))

    def nbytes(self, numel: int, itemsize: int) -> int:
        return 6 * self._number(numel)

    def encode(self, values: Tensor, state: State) -> Tensor:
        places = _largest(values.abs(), self._number(len(values)))
        chosen = values.index_select(0, places)
        if not float(torch.dot(chosen, chosen)) <= _LARGEST**2:  # one may exceed bfloat16's range
            chosen = within(chosen, _LARGEST)
        code = chosen.to(torch.bfloat16)
        return torch.cat([places.to(torch.int32).view(torch.uint8), code.view(torch.uint8)])

    def decode(self, code: Tensor, into: Tensor) -> None:
        into.zero_()
        self.decode_add(code, into)

    def decode_add(self, code: Tensor, into: Tensor) -> None:
        places, values = self._split(code, into)
        into.index_add_(0, places, values)

    def decode_subtract(self, code: Tensor, into: Tensor) -> None:
        places, values = self._split(code, into)
        into.index_add_(0, places, values, alpha=-1)

    def _split(self, code: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        number = self._number(len(into))
        places, values = code.split([4 * number, 2 * number])
        return places.view(torch.int32), values.view(torch.bfloat16).to(into.dtype)


def _largest(sizes: Tensor, number: int) -> Tensor:
    """Return the places of the largest. Sorting all takes twelve times as long as candidates."""
    if len(sizes) >= 2 * _SAMPLE and sizes.device.type == "cpu" and isfinite(sizes.sum()):
        for more in _MORE:
            candidates = (sizes >= threshold(sizes, number, more)).nonzero().view(-1)
            if number <= len(candidates) < len(sizes) // 2:
                return candidates[sizes[candidates].topk(number, sorted=False).indices]
    return sizes.topk(number, sorted=False).indices


def threshold(sizes: Tensor, number: int, more: float) -> Tensor:
    """Return a value that about `more` times that number of sizes reach, by a sample.

    The sample takes odd steps. Even steps would see only a few columns of a matrix, and the columns
    of a gradient have very different sizes.
    """
    sample = sizes[:: len(sizes) // _SAMPLE | 1]
    rank = max(1, round(len(sample) * more * number / len(sizes)))
    return sample.topk(min(rank, len(sample)), sorted=False).values.min()
