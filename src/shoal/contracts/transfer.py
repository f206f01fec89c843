"""Transfer: what a strategy hands to the engine, something that crosses the network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Carrier
from shoal.core.pieces import Piece


class Transfer(ABC):
    """Something that crosses the network once in every backward: a bucket's gradients, or one
    layer's factors.

    In order `pack` runs on the thread of backward, `run` on a lane, `publish` on that thread at its
    end. A transfer calls `ready(self)` as soon as all of it is there; one that never does is packed
    at the end with what there is.
    """

    label: str  # what messages call it, e.g. "bucket 3 (features.8, features.10)"
    native: bool = False  # its exchange is
    carrier: Carrier | None = None  # what a bucket crosses by, and what that remembers
    # set by the engine: `pack` multiplies by it, and `run` divides the sum by all ranks' mean
    share: float = 1.0
    accumulating: bool = False  # set by the engine: keep what comes, a later backward will send it
    came: Callable[[], None]  # set by the engine: call it before taking what a backward brings
    ready: Callable[[Transfer], None]  # set by the engine, too

    @abstractmethod
    def pack(self) -> None:
        """Take what this rank contributes. Short: backward waits for it."""

    @abstractmethod
    def run(self, comm: Comm) -> None:
        """Exchange, blocking, on a lane's own channel and thread."""

    @abstractmethod
    def publish(self) -> None:
        """Put the global gradients where the optimizer looks: `parameter.grad`. Then be ready for
        the next backward.
        """

    @abstractmethod
    def kept(self) -> Sequence[Tensor]:
        """The tensors that it keeps gradients in from one backward to the next."""

    @abstractmethod
    def release(self) -> None:
        """Take its hooks off the parameters; it is not used any more."""


class Turn(IntEnum):
    """What ranks send pieces for."""

    # gradients, to be summed: of however many ranks, in whatever type, the sum says exactly if all
    # do this
    SUM = 0
    VALUES = 1  # new parameters, after an update
    GRADIENTS = 2  # gradients that somebody reads
    END = 3  # nothing more: this worker has ended


@dataclass(frozen=True)
class Slice:
    """What crosses the network of one rank's pieces, and views of its parts."""

    whole: Tensor  # flat
    values: tuple[Tensor, ...]  # of each piece
    flags: Tensor  # of each piece, whether its parameter was used
    # what the values are multiplied by (`shares_of`); no elements where nothing is owned
    shares: Tensor
    turn: Tensor  # what the sender takes it for; no element where nothing is owned


class OwnedTransfer(Transfer):
    """A transfer whose sums stay with their owners, who update their pieces and send them back.

    After `run` each rank holds the global gradients of its own pieces, until they are dropped. What
    the owners do with them (runtime/owners.py) goes over the same lane, where servers are owners
    over one for the way back: `gather` brings any values of the pieces to every rank.
    """

    parameters: tuple[nn.Parameter, ...]  # of which it has all, or a part: see `owned`
    owned: tuple[tuple[Piece, ...], ...]  # each rank's pieces
    pieces: tuple[Piece, ...]  # this rank's own
    # whose gradients are at their owners; of the others `.grad` is the truth
    held: set[nn.Parameter]
    served: bool  # whether servers own some: it goes over lanes that they are on
    # False: of new values `gather` gives what a codec made of them, which their owners take, too
    exact: bool = True
    # set by the engine: waits for a lane that works on it, and for room for its bucket
    settle: Callable[[], None]

    @abstractmethod
    def follow(self, held: set[nn.Parameter]) -> None:
        """In place of a backward, on a server: be as the workers are after theirs, which found
        these held.
        """

    @abstractmethod
    def gradients(self) -> list[Tensor | None]:
        """Of each own piece the global gradient, None where no rank used the parameter. For a lane,
        after `run`.
        """

    def open_update(self, parameters: Collection[Tensor]) -> None:
        """Before own pieces of these are updated: make them what their owner has made of them."""
        return

    @abstractmethod
    def gather(
        self, values: Sequence[Tensor], turn: Turn, comm: Comm
    ) -> list[tuple[Piece, Tensor]]:
        """Give one flat tensor for each own piece, and get every rank's; what is got is valid until
        `close_bucket`.

        Raises:
            RanksDiffer: another rank is at another `turn`.
        """

    @abstractmethod
    def slice_of(self, rank: int) -> Slice:
        """A new slice of a rank's pieces, of zeros."""

    @abstractmethod
    def used(self) -> set[nn.Parameter]:
        """The parameters that any rank used in what was reduced. Known from `gather` to
        `close_bucket`.
        """

    @abstractmethod
    def close_bucket(self) -> None:
        """What `gather` gave is no longer needed."""
