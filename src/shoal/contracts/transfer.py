"""Transfer: what a strategy hands to the engine, something that crosses the network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor, nn

from shoal.contracts.cadence import Cadence
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Carrier
from shoal.contracts.period import Period
from shoal.core.pieces import Piece


class Mark(ABC):
    """What ranks must have in common, as one rank has it in one round, as a word of 16 bits."""

    word: int

    @abstractmethod
    def compare(self, comm: Comm) -> None:
        """Say what it is that differs: the words did, as every worker knows (a collective).

        Raises:
            RanksDiffer: it matters. It names a rank, and what differs.
        """


class Round(ABC):
    """One backward that sends, as the transfers of its gradients see it.

    The backwards before it that were accumulated belong to it: it sends for them, too.
    """

    accumulating: bool  # keep what comes: a later backward sends it

    @property
    @abstractmethod
    def share(self) -> float:
        """What this rank's gradients are multiplied by. `run` divides the sum by the mean of all
        ranks' shares.
        """

    def mark(self, transfer: Transfer) -> Mark | None:
        """What goes with this transfer for ranks to compare; None with all but one."""
        return None

    @abstractmethod
    def ready(self, transfer: Transfer) -> None:
        """All gradients of a transfer are there: send it as soon as those before it are sent."""

    def found_nan(self, parameter: str) -> None:
        """This rank's own gradient of a parameter has NaN, and every rank's sum will have it."""
        return

    @abstractmethod
    def make_room(self, transfer: Transfer) -> None:
        """Wait until no lane works on a transfer's bucket, and there is memory for it."""


class Rounds(ABC):
    """Where a hook of autograd finds the round that it belongs to."""

    @abstractmethod
    def current(self) -> Round:
        """The round of the backward that is running. To be called with each gradient, before
        anything is taken: the first opens the round.

        Raises:
            WorldError: the backward before this one ended half-way, so the ranks no longer agree on
                what was sent.
        """

    def weighs(self) -> float | None:
        """What a gradient of the running backward is multiplied by, as it comes; None: nothing.

        Also None where a share goes with all that is sent (`Round.share`).
        """
        return None


class Transfer(ABC):
    """Something that crosses the network, by its `cadence`: mostly a bucket's gradients, or one
    layer's factors, in every backward.

    In order `pack` runs on the main thread, `run` on a lane, `publish` on the main thread. Only
    `pack` is given the round: what `run` needs of it is kept there, so that a lane never looks at
    what backward is changing.

    A transfer that goes as its gradients land asks `rounds.current()` with each of them, and tells
    that it is `ready` with the last. One that never does is packed at the end of backward with what
    there is.
    """

    label: str  # what messages call it, e.g. "bucket 3 (features.8, features.10)"
    native: bool = False  # its exchange is
    served: bool = False  # servers take part: it goes over lanes that they are on
    tells: bool = False  # it may take a round's mark along: every worker then sees all of them
    carrier: Carrier | None = None  # what a bucket crosses by, and what that remembers
    cadence: Cadence = Cadence()  # when it goes
    # of what goes as its gradients land: it goes in the backward that ends the period only
    period: Period | None = None
    # it needs no gradient: it goes as the round opens, if all before it do
    at_once: bool = False
    rounds: Rounds  # given by `connect`

    def connect(self, rounds: Rounds) -> None:
        """Take the way to the running round. Called once, by the engine that runs the transfer."""
        self.rounds = rounds

    @abstractmethod
    def pack(self, backward: Round) -> None:
        """Take what this rank contributes. Short: backward waits for it.

        Args:
            backward: the round that it goes with; as backward ends, the one that has ended. On an
                event between two rounds it is the next one, whose share is 1 until it opens.
        """

    @abstractmethod
    def run(self, comm: Comm) -> None:
        """Exchange, blocking, on a lane's own channel and thread."""

    @abstractmethod
    def publish(self) -> None:
        """Put the result into `parameter.grad`, and be ready to go again."""

    def gather_parts(self, names: Set[str]) -> None:
        """Wait with gradients of these parameters until backward ends: they come in parts."""
        return

    @abstractmethod
    def kept(self) -> Sequence[Tensor]:
        """The tensors that it keeps from one time to the next."""

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
    marks: Tensor  # of the round; no elements where nothing is owned
    turn: Tensor  # what the sender takes it for; no element where nothing is owned

    @property
    def sums(self) -> Tensor:
        """The values of all pieces, one behind the other; a view."""
        behind = (self.flags, self.shares, self.marks, self.turn)
        return self.whole[: len(self.whole) - sum(map(len, behind))]


class OwnedTransfer(Transfer):
    """A transfer whose sums stay with their owners, who update their pieces and send them back.

    After `run` each rank holds the global gradients of its own pieces, until they are dropped. What
    the owners do with them (optim/owners.py) goes over the same lane, where servers are owners
    over one for the way back: `gather` brings any values of the pieces to every rank.
    """

    parameters: tuple[nn.Parameter, ...]  # of which it has all, or a part: see `owned`
    owned: tuple[tuple[Piece, ...], ...]  # each rank's pieces
    pieces: tuple[Piece, ...]  # this rank's own
    # whose gradients are at their owners; of the others `.grad` is the truth
    held: set[nn.Parameter]

    @property
    def exact(self) -> bool:
        """False: of new values `gather` gives what a codec made of them; their owners take that,
        too. A codec that is off by too much ends it.
        """
        return True

    @abstractmethod
    def follow(self, held: set[nn.Parameter]) -> None:
        """On a server, in place of a backward: be as workers whose backward found these held."""

    @abstractmethod
    def gradients(self) -> list[Tensor | None]:
        """Each own piece's global gradient, None if no rank used it. For a lane, after `run`."""

    def open_update(self, parameters: Collection[Tensor]) -> None:
        """Before own pieces of these are updated: make them what their owner has made of them."""
        return

    @abstractmethod
    def gather(
        self, values: Sequence[Tensor], turn: Turn, comm: Comm
    ) -> list[tuple[Piece, Tensor]]:
        """Give a flat tensor for each own piece, and get all ranks', valid until `close_bucket`.

        Raises:
            RanksDiffer: another rank is at another `turn`.
        """

    @abstractmethod
    def slice_of(self, rank: int) -> Slice:
        """A new slice of a rank's pieces, of zeros."""

    @abstractmethod
    def used(self) -> set[nn.Parameter]:
        """The parameters that any rank used, known from `gather` to `close_bucket`."""

    @abstractmethod
    def close_bucket(self) -> None:
        """What `gather` gave is no longer needed."""
