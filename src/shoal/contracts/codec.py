"""Codec: how values travel in fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import ClassVar

import torch
from torch import Tensor

from shoal.contracts.learning import UNMEASURED, LearningPrice
from shoal.core.registry import Contract
from shoal.core.written_options import written

State = MutableMapping[str, Tensor]


class Codec(Contract, ABC):
    """Way to turn values into bytes and back: a frozen dataclass with its options as fields.

    It never sees flags, row counts or turns: they travel exactly (codecs/coded_exchange.py). It
    does not keep the rounding error of a code either. The carrier adds that error to the values of
    the next round, unless `feedback` is False. The same code must give the same bits on every rank.
    One object serves all buckets, on several threads, so it keeps nothing in itself.
    """

    package: ClassVar[str] = "shoal.codecs"
    group: ClassVar[str] = "shoal.codecs"
    # `decode` gives back the same values, bit for bit
    exact: ClassVar[bool] = False
    # the rounding error of a code is added to the next values that are sent
    feedback: ClassVar[bool] = True
    # values may be coded in runs of 262,144, each by itself, in a code of whole fours of bytes:
    # these stay in a core's cache
    in_runs: ClassVar[bool] = False
    # each value is coded by itself, in one pass: then coding alone needs no runs, and rows of
    # layers that are cut may cross so (tensors/row_crossing.py)
    by_value: ClassVar[bool] = False
    # parameters of fewer dimensions travel as they are: biases and scales are small, and err most
    least_dims: ClassVar[int] = 1
    # largest relative error of the mean over 100 steps with which a layer may still be coded
    # (codecs/ledger.py)
    most_error: ClassVar[float] = 1.0
    # samples that a run needs with these codes, as a multiple of the samples of exact steps
    learning: ClassVar[LearningPrice] = UNMEASURED
    # keys of its state that may be of any shape: a checkpoint does without them
    hints: ClassVar[tuple[str, ...]] = ()

    @property
    def there(self) -> Codec:
        """Codec to use on the way to owners, if `self` is then used on the way back only."""
        return self

    def __str__(self) -> str:
        """Write the codec as plans do: its name, and the options that are not the default."""
        return written(self)

    @abstractmethod
    def nbytes(self, numel: int, itemsize: int) -> int:
        """Return the number of bytes in the code of `numel` values, of `itemsize` bytes each."""

    @abstractmethod
    def encode(self, values: Tensor, state: State) -> Tensor:
        """Return the code of some values.

        Args:
            values: flat, float32 (or the model's float64), at least one. They must not change.
            state: the codec's own memory of these values from round to round, by its own keys;
                empty at first. Flat tensors of as many elements as `values`, so that a checkpoint
                can hold them by parameter. The key "lost" is reserved.

        Returns:
            A flat uint8 tensor of `nbytes` bytes.
        """

    def encode_into(self, values: Tensor, state: State, code: Tensor) -> Tensor:
        """Do the same as `encode`, into `code` if that saves a pass over memory.

        Return the code.
        """
        return self.encode(values, state)

    @abstractmethod
    def decode(self, code: Tensor, into: Tensor) -> None:
        """Write the values that a code stands for into `into`, which has their form.

        Callers ignore the returned value.
        """

    def decode_add(self, code: Tensor, into: Tensor) -> None:
        """Add the values that a code stands for. Override it if that saves a pass over memory."""
        values = torch.empty_like(into)
        self.decode(code, values)
        into.add_(values)

    def decode_subtract(self, code: Tensor, into: Tensor) -> None:
        """Subtract the values that a code stands for.

        Override it if that saves a pass over memory.
        """
        values = torch.empty_like(into)
        self.decode(code, values)
        into.sub_(values)


class LinearCodec(Codec):
    """Codec that also has terms: numbers made from a whole matrix. The sum of all ranks' terms is a
    term of the sum of their matrices.

    So an exchange that adds on its way can carry terms (codecs/summed_terms.py). All ranks have the
    same state, because it comes from sums alone. Turns count from 0, and all ranks have the same
    turn.
    """

    # price in samples if an exchange adds terms on its way, as `learning` has it for codes
    learning_added: ClassVar[LearningPrice] = UNMEASURED

    @abstractmethod
    def num_terms(self, rows: int, columns: int, turn: int) -> int:
        """Return the number of a matrix's terms in a turn. If it has as many as numbers, the
        numbers are sent instead.
        """

    @abstractmethod
    def to_terms(self, matrix: Tensor, state: State, turn: int) -> Tensor:
        """Return the terms of a matrix, in its own type. The matrix must not be changed."""

    @abstractmethod
    def subtract_terms(self, terms: Tensor, matrix: Tensor, state: State, turn: int) -> None:
        """Subtract the values that these terms stand for from the matrix."""

    @abstractmethod
    def from_sums(self, sums: Tensor, into: Tensor, state: State, turn: int) -> None:
        """Write the values that the sums of all ranks' terms stand for, and update the state for
        the next turn.

        The sums may not be finite.
        """
