"""Transfer: something that crosses the network. A strategy makes it, the engine sends it."""

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
    """State that ranks must have in common, as one rank has it in one round, as a word of 16
    bits.
    """

    word: int

    @abstractmethod
    def compare(self, comm: Comm) -> None:
        """Name the difference, once every worker knows that the words differ (a collective).

        Raises:
            RanksDiffer: the difference matters. The error names a rank, and the difference.
        """


class Round(ABC):
    """Backward that sends, as the transfers of its gradients see it.

    It also sends the gradients that earlier backwards have accumulated.
    """

    accumulating: bool  # gradients are kept, because a later backward sends them

    @property
    @abstractmethod
    def share(self) -> float:
        """Factor of this rank's gradients.

        `run` divides their sum by the mean of all ranks' shares.
        """

    def mark(self, transfer: Transfer) -> Mark | None:
        """Return the mark that travels with this transfer for ranks to compare; None with all
        others.
        """
        return None

    @abstractmethod
    def ready(self, transfer: Transfer) -> None:
        """Note that all gradients of a transfer are there.

        It is sent when all earlier ones are sent.
        """

    def found_nan(self, parameter: str) -> None:
        """Note that this rank's own gradient of a parameter has NaN, so that every rank's sum
        will.
        """
        return

    @abstractmethod
    def make_room(self, transfer: Transfer) -> None:
        """Wait until no lane works on a transfer's bucket, and there is memory for it."""


class Rounds(ABC):
    """The way from a hook of autograd to the round that it belongs to."""

    @abstractmethod
    def current(self) -> Round:
        """Return the round of the backward that is running. Call it with each gradient, before any
        is taken: the first call opens the round.
        """

    def weighs(self) -> float | None:
        """Return the factor for each gradient of the running backward; None: leave it as it is.

        It is also None if a share is sent with the gradients (`Round.share`).
        """
        return None


class Transfer(ABC):
    """Something that crosses the network by its `cadence`: usually the gradients of a bucket, or
    the factors of one layer, in every backward.

    First `pack` runs on the main thread, then `run` on a lane, then `publish` on the main thread.
    Only `pack` is given the round. It keeps the data that `run` needs, so that a lane never looks
    at values that backward is changing.

    A transfer that goes as its gradients land calls `rounds.current()` with each of them. With the
    last one it reports `ready`. If it never does, it is packed at the end of backward with the
    gradients that are there.
    """

    label: str  # its name in messages, e.g. "bucket 3 (features.8, features.10)"
    native: bool = False  # whether its exchange is native
    served: bool = False  # servers take part, so it goes over lanes that they share
    tells: bool = False  # it may carry a round's mark: every worker then sees all marks
    carrier: Carrier | None = None  # the exchange of a bucket, with its memory
    cadence: Cadence = Cadence()  # times at which it goes
    # its period, if it goes as gradients land: then only the backward that ends the period sends it
    period: Period | None = None
    # it needs no gradient, so it goes when the round opens, if all before it do
    at_once: bool = False
    rounds: Rounds  # set by `connect`

    def connect(self, rounds: Rounds) -> None:
        """Take the way to the running round. The engine that runs the transfer calls this once."""
        self.rounds = rounds

    @abstractmethod
    def pack(self, backward: Round) -> None:
        """Take this rank's contribution. It must be short, because backward waits for it.

        Args:
            backward: the round that it goes with; when backward ends, the one that has ended. On an
                event between two rounds it is the next round, with a share of 1 until it opens.
        """

    @abstractmethod
    def run(self, comm: Comm) -> None:
        """Exchange the values on a lane's own channel and thread. This blocks."""

    @abstractmethod
    def publish(self) -> None:
        """Put the result into `parameter.grad`, and prepare for the next time."""

    def gather_parts(self, names: Set[str]) -> None:
        """Keep the gradients of these parameters until backward ends, because they come in
        parts.
        """
        return

    @abstractmethod
    def kept(self) -> Sequence[Tensor]:
        """Return the tensors that it keeps from one time to the next."""

    @abstractmethod
    def release(self) -> None:
        """Remove its hooks from the parameters. It is not used afterwards."""


class Turn(IntEnum):
    """Purpose for which ranks send pieces."""

    # gradients to be summed: the value is 0, so its sum is exact for any number of ranks and any
    # dtype if all ranks send it
    SUM = 0
    VALUES = 1  # new parameters, after an update
    GRADIENTS = 2  # gradients that a caller reads
    END = 3  # the end: this worker has finished


@dataclass(frozen=True)
class Slice:
    """Message with one rank's pieces, and views of its parts."""

    whole: Tensor  # the message as a whole, flat
    values: tuple[Tensor, ...]  # values of each piece
    flags: Tensor  # one for each piece: whether its parameter was used
    # factors of the values; no elements if nothing is owned
    shares: Tensor
    marks: Tensor  # marks of the round; no elements if nothing is owned
    turn: Tensor  # turn that the sender is at; no element if nothing is owned

    @property
    def sums(self) -> Tensor:
        """The values of all pieces, one after the other; a view."""
        behind = (self.flags, self.shares, self.marks, self.turn)
        return self.whole[: len(self.whole) - sum(map(len, behind))]


class OwnedTransfer(Transfer):
    """Transfer that leaves sums with their owners: they update their pieces and send them back.

    After `run` each rank holds the global gradients of its own pieces, until they are dropped. The
    owners' next messages (optim/owners.py) go over the same lane. If servers are owners, they go
    over a lane for the way back. `gather` brings any values of the pieces to every rank.
    """

    parameters: tuple[nn.Parameter, ...]  # parameters of which it has all, or a part: see `owned`
    owned: tuple[tuple[Piece, ...], ...]  # each rank's pieces
    pieces: tuple[Piece, ...]  # this rank's own
    # parameters with gradients at their owners; of all others `.grad` is the truth
    held: set[nn.Parameter]

    @property
    def exact(self) -> bool:
        """Whether owners keep new values as they computed them.

        If it is False, `gather` returns new values as a codec writes them, and their owners take
        these, too. A codec with too large an error ends that.
        """
        return True

    @abstractmethod
    def follow(self, held: set[nn.Parameter]) -> None:
        """Follow the workers, on a server, which has no backward: their backward left these
        parameters at owners.
        """

    @abstractmethod
    def gradients(self) -> list[Tensor | None]:
        """Return each own piece's global gradient, None if no rank used it.

        For a lane, after `run`.
        """

    def open_update(self, parameters: Collection[Tensor]) -> None:
        """Bring own pieces to their owner's values, before these parameters are updated."""
        return

    @abstractmethod
    def gather(
        self, values: Sequence[Tensor], turn: Turn, comm: Comm
    ) -> list[tuple[Piece, Tensor]]:
        """Send a flat tensor for each own piece. Return all ranks' tensors, valid until
        `close_bucket`.

        Raises:
            RanksDiffer: another rank is at another `turn`.
        """

    @abstractmethod
    def slice_of(self, rank: int) -> Slice:
        """Make a message for a rank's pieces, filled with zeros."""

    @abstractmethod
    def used(self) -> set[nn.Parameter]:
        """Return the parameters that any rank used, known from `gather` to `close_bucket`."""

    @abstractmethod
    def close_bucket(self) -> None:
        """Free the bucket: the tensors of `gather` are no longer needed."""
