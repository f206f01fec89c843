"""Codes in runs that stay in a core's cache: what a codec does to a slice of any length.

    values   │ 262,144 │ 262,144 │ rest │
    code     │ run     │ run     │ run  │   each run is coded by itself, where its codec allows

So adding what was lost, coding, decoding and taking the difference cost one way to memory and back.
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
_WITHIN = torch.finfo(torch.bfloat16).max  # every codec's codes hold that
LOST = "lost"  # what codes have lost of a slice's values


@final
@dataclass(frozen=True)
class Runs:
    """A codec, run after run."""

    codec: Codec

    def nbytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the code of so many values; none of none."""
        if not self.codec.in_runs:
            return self.codec.nbytes(numel, itemsize) if numel else 0
        whole, rest = divmod(numel, RUN)
        last = self.codec.nbytes(rest, itemsize) if rest else 0
        return whole * self.codec.nbytes(RUN, itemsize) + last if whole else last

    def encode(self, values: Tensor, code: Tensor, lost: Tensor | None, state: State) -> None:
        """Write the code of some values.

        Args:
            values: flat.
            code: where their code goes, of `nbytes` bytes.
            lost: what earlier codes have lost, of the type that codecs see; it goes with these
                values, and comes to be what this code loses. None: nothing is kept.
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
        """Write what a code stands for."""
        for begin, stop, place in self._places(len(into), code, into, alone=True):
            self.codec.decode(place, into[begin:stop])

    def decode_add(self, code: Tensor, into: Tensor) -> None:
        """Add what a code stands for."""
        for begin, stop, place in self._places(len(into), code, into, alone=False):
            self.codec.decode_add(place, into[begin:stop])

    def _overflown(self, values: Tensor, code: Tensor, lost: Tensor, state: State) -> None:
        """Forget the losses of a run if they are beyond their type's range, or not finite.

        Sound values are coded again, by themselves. So all ranks get finite numbers.
        """
        if lost.isfinite().all():
            return  # only their sum is beyond it
        if values.isfinite().all():
            lost.copy_(values)
            code.copy_(self.codec.encode(lost.clamp(-_WITHIN, _WITHIN), state))
            self.codec.decode_subtract(code, lost)
        # of a gradient that overflowed nothing is kept: it would never end
        lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _places(
        self, numel: int, code: Tensor, like: Tensor, alone: bool
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Each run's values, from where to where, and its code.

        Args:
            numel: how many values there are.
            code: of all of them.
            like: of the type that the codec sees.
            alone: values are coded, or read, and nothing else is done with them.
        """
        in_runs = self.codec.in_runs and not (alone and self.codec.by_value)
        step, at = RUN if in_runs else max(numel, 1), 0
        for begin in range(0, numel, step):
            stop = min(begin + step, numel)
            nbytes = self.codec.nbytes(stop - begin, like.itemsize)
            yield begin, stop, code[at : at + nbytes]
            at += nbytes

    def _check(self, made: Tensor, place: Tensor, state: State, numel: int) -> None:
        """Refuse what a codec gave that is not what it stated."""
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
