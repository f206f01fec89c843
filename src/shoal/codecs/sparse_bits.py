"""The largest values of each chunk, in 2 or 4 bits each: with 2 bits 141 times fewer bytes.

    code   │ largest of each chunk, float32 │ places, 12 bits each │ steps, 2 or 4 bits │

A chunk has 4,096 values, so that a place takes 12 bits. Steps are odd numbers −(2ᵇ−1) … 2ᵇ−1 of the
largest divided by 2ᵇ−1: there is no 0, because the largest values are none. All others are lost for
now, and come when they have added up. Made for differences of weights at a round of local steps.
Reference: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs.ranges import within
from shoal.contracts.codec import Codec, State
from shoal.contracts.learning import LearningPrice
from shoal.core.errors import UsageError
from shoal.core.numbers import check_number, check_whole

_CHUNK = 4096
_GROUP = 16  # places come in such groups, so that a chunk's code has whole fours of bytes
_LARGEST = torch.finfo(torch.bfloat16).max
_SOURCE = "docs/lab/race.md, text, rounds of local steps after exact ones"


@final
@dataclass(frozen=True)
class SparseBits(Codec):
    """A place and a few bits for each of a chunk's largest."""

    name: ClassVar[str] = "sparse_bits"
    in_runs: ClassVar[bool] = True
    least_dims: ClassVar[int] = 2
    most_error: ClassVar[float] = 0.95
    learning: ClassVar[LearningPrice] = LearningPrice(1.96, _SOURCE)
    share: float = 1 / 64
    bits: int = 2

    def __post_init__(self) -> None:
        rule = "the share of sparse_bits is above 0, and at most 0.5"
        check_number(rule, self.share, 1e-6, 0.5, do="leave it out: it is 1/64")
        rule, do = "sparse_bits has 2 or 4 bits a value", "leave them out: they are 2"
        check_whole(rule, self.bits, 2, 4, do=do)
        if self.bits == 3:
            raise UsageError(rule, got="3", do=do)

    def _num_values(self, numel: int) -> int:
        """Return how many values of a chunk are sent."""
        return _GROUP * max(1, round(self.share * numel / _GROUP))

    def _sizes(self, numel: int) -> tuple[int, int, int]:
        """Return the bytes of scales, places and steps, of whole chunks or of one that is not."""
        chunks = max(1, numel // _CHUNK)
        kept = chunks * self._num_values(min(numel, _CHUNK))
        return 4 * chunks, kept * 12 // 8, kept * self.bits // 8

    def nbytes(self, numel: int, itemsize: int) -> int:
        return sum(sum(self._sizes(part)) for part in _parts(numel))

    def encode(self, values: Tensor, state: State) -> Tensor:
        parts = values.split(_parts(len(values)))
        return torch.cat([code for part in parts for code in self._encode(part)])

    def _encode(self, values: Tensor) -> Iterator[Tensor]:
        """Yield the scales, places and steps of some chunks, as bytes."""
        kept = self._num_values(min(len(values), _CHUNK))
        rows = pad(values, (0, -len(values) % _CHUNK)).view(-1, _CHUNK)
        places = rows.abs().topk(kept, sorted=False).indices
        chosen = within(rows.gather(1, places), _LARGEST).float()
        scales = chosen.abs().amax(1, keepdim=True)
        levels = (1 << self.bits) - 1
        steps = (chosen / torch.where(scales > 0, scales, 1.0) + 1).mul_(levels / 2).round_()
        steps = steps.nan_to_num_(nan=0.0).clamp_(0, levels).to(torch.int64)
        yield scales.view(-1).view(torch.uint8)
        yield _pack_numbers(places.view(-1), 12)
        yield _pack_numbers(steps.view(-1), self.bits)

    def decode(self, code: Tensor, into: Tensor) -> None:
        into.zero_()
        self.decode_add(code, into)

    def decode_add(self, code: Tensor, into: Tensor) -> None:
        self._add(code, into, 1)

    def decode_subtract(self, code: Tensor, into: Tensor) -> None:
        self._add(code, into, -1)

    def _add(self, code: Tensor, into: Tensor, sign: int) -> None:
        """Add the values of a code, or subtract them."""
        levels, at = (1 << self.bits) - 1, 0
        for part in into.split(_parts(len(into))):
            sizes = self._sizes(len(part))
            of_scales, of_places, of_steps = code[at : at + sum(sizes)].split(sizes)
            at += sum(sizes)
            scales = of_scales.clone().view(torch.float32)[:, None].to(into.dtype)
            steps = _unpack(of_steps, self.bits).view(len(scales), -1)
            values = (2 * steps - levels).to(into.dtype).div_(levels).mul_(scales)
            chunks = torch.arange(len(scales), device=code.device)[:, None] * _CHUNK
            places = (_unpack(of_places, 12).view(len(scales), -1) + chunks).view(-1)
            inside = places < len(part)  # a chunk that is not full has zeros behind its values
            part.index_add_(0, places[inside], values.view(-1)[inside], alpha=sign)


def _parts(numel: int) -> list[int]:
    """Return the values in whole chunks, and in the chunk that is not full."""
    rest = numel % _CHUNK
    return [part for part in (numel - rest, rest) if part]


def _pack_numbers(numbers: Tensor, bits: int) -> Tensor:
    """Return whole numbers of so many bits as bytes, the lowest bits first."""
    each = torch.arange(bits, device=numbers.device)
    flags = (numbers[:, None] >> each) & 1
    weights = 1 << torch.arange(8, device=numbers.device)
    return (flags.view(-1, 8) * weights).sum(1).to(torch.uint8)


def _unpack(code: Tensor, bits: int) -> Tensor:
    """Return the numbers that `_pack_numbers` has packed."""
    flags = (code.to(torch.int64)[:, None] >> torch.arange(8, device=code.device)) & 1
    weights = 1 << torch.arange(bits, device=code.device)
    return (flags.view(-1, bits) * weights).sum(1)
