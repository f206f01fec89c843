"""Codec: how values travel in fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import ClassVar

import torch
from torch import Tensor

from shoal.contracts.learning import UNMEASURED, LearningPrice
from shoal.core.registry import Contract
from shoal.core.written import written

State = MutableMapping[str, Tensor]


class Codec(Contract, ABC):
    """Turns values into bytes and back. A frozen dataclass whose fields are its options.

    It never sees flags, row counts or turns: those travel exactly (codecs/coded.py). Nor does it
    keep what a code loses: that is added to the values of the next round, unless `feedback` is
    False. The same code must give the same bits on every rank. One object serves all buckets, on
    several threads, so it keeps nothing in itself.
    """

    package: ClassVar[str] = "shoal.codecs"
    group: ClassVar[str] = "shoal.codecs"
    # `decode` gives back the very values
    exact: ClassVar[bool] = False
    # what a code loses is sent with the next
    feedback: ClassVar[bool] = True
    # values may be coded in runs of 262,144, each by itself, in a code of whole fours of bytes:
    # these stay in a core's cache
    in_runs: ClassVar[bool] = False
    # each value is coded by itself, in one pass: then coding alone needs no runs, and rows of
    # layers that are cut may cross so (tensors/crossing.py)
    by_value: ClassVar[bool] = False
    # parameters of fewer dimensions travel as they are: biases and scales are small, and err most
    least_dims: ClassVar[int] = 1
    # of the mean over 100 steps, by which a layer may be off and still travel so (codecs/ledger.py)
    most_error: ClassVar[float] = 1.0
    # samples that a run needs with these codes, as a multiple of the samples of exact steps
    learning: ClassVar[LearningPrice] = UNMEASURED
    # keys of its state that may be of any shape: a checkpoint does without them
    hints: ClassVar[tuple[str, ...]] = ()

    @property
    def there(self) -> Codec:
        """What takes its place on the way to owners; it is then for the way back only."""
        return self

    def __str__(self) -> str:
        """As plans write it: the name, and the options that are not the default."""
        return written(self)

    @abstractmethod
    def nbytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the code of `numel` values, of `itemsize` bytes each."""

    @abstractmethod
    def encode(self, values: Tensor, state: State) -> Tensor:
        """The code of some values.

        Args:
            values: flat, float32 (float64 where the model is), at least one. Not to be changed.
            state: what the codec keeps from round to round of these very values, by its own keys;
                empty at first. Flat tensors of as many elements as `values`, so that a checkpoint
                can hold them by parameter. The key "lost" is taken.

        Returns:
            A flat uint8 tensor of `nbytes` bytes.
        """

    def encode_into(self, values: Tensor, state: State, code: Tensor) -> Tensor:
        """As `encode`, written into `code` where that saves a pass over memory; the code."""
        return self.encode(values, state)

    @abstractmethod
    def decode(self, code: Tensor, into: Tensor) -> None:
        """Write the values that a code stands for into `into`, which is like those encoded.

        What is returned is ignored.
        """

    def decode_add(self, code: Tensor, into: Tensor) -> None:
        """Add the values that a code stands for. Override it where it saves a pass over memory."""
        values = torch.empty_like(into)
        self.decode(code, values)
        into.add_(values)

    def decode_subtract(self, code: Tensor, into: Tensor) -> None:
        """Subtract them, likewise."""
        values = torch.empty_like(into)
        self.decode(code, values)
        into.sub_(values)


class LinearCodec(Codec):
    """A codec that has terms, too: numbers of a whole matrix, whose sums are terms of sums.

    So an exchange that adds on its way carries them (codecs/summed.py). All ranks have the same
    state, as it comes from sums alone. Turns are counted from 0, and all ranks have the same.
    """

    # price in samples if an exchange adds terms on its way, as `learning` has it for codes
    learning_added: ClassVar[LearningPrice] = UNMEASURED

    @abstractmethod
    def num_terms(self, rows: int, columns: int, turn: int) -> int:
        """How many terms a matrix has in a turn; as many as it has numbers: they are sent."""

    @abstractmethod
    def to_terms(self, matrix: Tensor, state: State, turn: int) -> Tensor:
        """The terms of a matrix, of its own type. It is not to be changed."""

    @abstractmethod
    def subtract_terms(self, terms: Tensor, matrix: Tensor, state: State, turn: int) -> None:
        """Take from the matrix what these terms of it stand for."""

    @abstractmethod
    def from_sums(self, sums: Tensor, into: Tensor, state: State, turn: int) -> None:
        """Write what the sums of all ranks' terms stand for, and have the state of the next turn.

        It may be sent sums that are not finite.
        """
