"""Codes in runs that stay in a core's cache: they code a slice of any length.

    values   │ 262,144 │ 262,144 │ rest │
    code     │ run     │ run     │ run  │   each run is coded by itself, if its codec allows

So adding losses, coding, decoding and taking the difference cost one pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import final

import torch
from torch import Tensor

from shoal.contracts.codec import Codec, State
from shoal.core.errors import UsageError

RUN = 1 << 18  # values
_WITHIN = torch.finfo(torch.bfloat16).max  # every codec's codes can hold this
LOST = "lost"  # losses of codes on a slice's values


@final
@dataclass(frozen=True)
class Runs:
    """A codec that is applied run after run."""

    codec: Codec

    def nbytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes of the code of so many values; 0 for none."""
        if not self.codec.in_runs:
            return self.codec.nbytes(numel, itemsize) if numel else 0
        whole, rest = divmod(numel, RUN)
        last = self.codec.nbytes(rest, itemsize) if rest else 0
        return whole * self.codec.nbytes(RUN, itemsize) + last if whole else last

    def encode(self, values: Tensor, code: Tensor, lost: Tensor | None, state: State) -> None:
        """Write the code of some values.

        Args:
            values: a flat tensor.
            code: memory for their code, of `nbytes` bytes.
            lost: losses of earlier codes, in the type that codecs see. They are added to these
                values, and replaced by this code's losses. None: no losses are kept.
            state: as for `Codec.encode`.
        """
        like, alone = (values, True) if lost is None else (lost, False)
        for begin, stop, place in self._places(len(values), code, like, alone):
            part = values[begin:stop] if lost is None else lost[begin:stop].add_(values[begin:stop])
            made = self.codec.encode_into(part, state, place)
            self._check(made, place, state, stop - begin)
            if made.data_ptr() != place.data_ptr():
                place.copy_(made)
            if lost is not None:
                self.codec.decode_subtract(place, part)
                if not isfinite(part.sum()):
                    self._overflown(values[begin:stop], place, part, state)

    def decode(self, code: Tensor, into: Tensor) -> None:
        """Decode a code, and write its values."""
        for begin, stop, place in self._places(len(into), code, into, alone=True):
            self.codec.decode(place, into[begin:stop])

    def decode_add(self, code: Tensor, into: Tensor) -> None:
        """Decode a code, and add its values."""
        for begin, stop, place in self._places(len(into), code, into, alone=False):
            self.codec.decode_add(place, into[begin:stop])

    def _overflown(self, values: Tensor, code: Tensor, lost: Tensor, state: State) -> None:
        """Forget the losses of a run if they are beyond their type's range, or not finite.

        Sound values are coded again, by themselves. So all ranks get finite numbers.
        """
        if lost.isfinite().all():
            return  # only their sum exceeds the range
        if values.isfinite().all():
            lost.copy_(values)
            code.copy_(self.codec.encode(lost.clamp(-_WITHIN, _WITHIN), state))
            self.codec.decode_subtract(code, lost)
        # keep no loss of a gradient that overflowed: it would never end
        lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _places(
        self, numel: int, code: Tensor, like: Tensor, alone: bool
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the first and last place of each run's values, and its code.

        Args:
            numel: number of values.
            code: the code of all values.
            like: a tensor of the type that the codec sees.
            alone: whether values are only coded or read, without losses.
        """
        in_runs = self.codec.in_runs and not (alone and self.codec.by_value)
        step, at = RUN if in_runs else max(numel, 1), 0
        for begin in range(0, numel, step):
            stop = min(begin + step, numel)
            nbytes = self.codec.nbytes(stop - begin, like.itemsize)
            yield begin, stop, code[at : at + nbytes]
            at += nbytes

    def _check(self, made: Tensor, place: Tensor, state: State, numel: int) -> None:
        """Refuse a code, or a state, that differs from the codec's statement."""
        if made.dtype != torch.uint8 or made.shape != place.shape:
            raise UsageError(
                f"the codec {self.codec} gave another code than it stated",
                got=f"{made.dtype} of shape {tuple(made.shape)}",
                expected=f"{len(place)} bytes, uint8, for {numel} values",
                do="mend its encode, or its nbytes",
            )
        for label, numbers in state.items():
            if label in self.codec.hints:
                continue
            shape = tuple(numbers.shape) if isinstance(numbers, Tensor) else None
            if shape != (numel,) or label == LOST:
                raise UsageError(
                    f"the codec {self.codec} keeps {label!r}, which cannot be saved",
                    got=repr(numbers) if shape is None else f"a tensor of shape {shape}",
                    expected=f"a tensor of {numel} numbers, as many as there are values",
                    do=f"take another key than {LOST!r}, which is Shoal's own"
                    if label == LOST
                    else "put in one number for each value, as torch.zeros_like(values) has",
                )
