"""The common part of codecs that send values in another type of floats."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.ranges import within
from shoal.contracts.codec import Codec, State
from shoal.contracts.learning import NOTHING_LOST, LearningPrice


class Cast(Codec):
    """Rounds each value to the nearest of a narrower type."""

    in_runs: ClassVar[bool] = True
    by_value: ClassVar[bool] = True
    least_dims: ClassVar[int] = 2
    most_error: ClassVar[float] = 0.01
    learning: ClassVar[LearningPrice] = NOTHING_LOST

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type in which values travel."""

    @abstractmethod
    def holds(self, values: Tensor) -> bool:
        """Return whether no value exceeds the type's largest. NaN may count as exceeding it."""

    def nbytes(self, numel: int, itemsize: int) -> int:
        return self.dtype.itemsize * numel

    def encode(self, values: Tensor, state: State) -> Tensor:
        code = torch.empty(self.nbytes(len(values), 0), dtype=torch.uint8, device=values.device)
        return self.encode_into(values, state, code)

    def encode_into(self, values: Tensor, state: State, code: Tensor) -> Tensor:
        narrow = code.view(self.dtype).copy_(values)
        if not self.holds(values):
            narrow.copy_(within(values, torch.finfo(self.dtype).max))
        return code

    def decode(self, code: Tensor, into: Tensor) -> None:
        into.copy_(code.view(self.dtype))

    def decode_add(self, code: Tensor, into: Tensor) -> None:
        into.add_(code.view(self.dtype))

    def decode_subtract(self, code: Tensor, into: Tensor) -> None:
        into.sub_(code.view(self.dtype))
