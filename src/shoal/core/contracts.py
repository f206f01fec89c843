"""The contracts that the rest of Shoal is made of. Each is abstract; what stands below it is final.

Comm      point-to-point and collectives among ranks: the only door to the network
Exchange  how the sum of one bucket gets to every rank, and the bytes that takes
Strategy  how one site (a layer, or a bucket of layers) is served, what it costs, and whom it
          refuses
Transfer  what a strategy hands to the engine: something to send once in every backward
Launcher  how a command gets to run once a rank (core/job.py)
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from time import perf_counter
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from shoal.core.buckets import Buckets
from shoal.core.cost import Cost, Traffic
from shoal.core.errors import RanksDiffer
from shoal.core.facts import Cluster, LayerProfile, Topology
from shoal.core.pieces import Piece, cut, cut_sizes
from shoal.core.placement import Owner
from shoal.core.trace import MAIN, Recorder

_WORDS = 64  # bytes of what ranks tell each other that they do


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> None:
        """Block until the tensor may be used again. Raises WorldError when the peer is lost or the
        deadline passed.
        """


class Comm(ABC):
    """Messages among `size` ranks, of which this is `rank`; `topology` says which hosts they are
    on.

    Within one channel, messages between two ranks arrive in the order they were sent; concurrent
    users each take a channel of their own. Tensors are contiguous. The collectives here are built
    from point-to-point messages, so that counting those counts everything; an implementation with
    better ones of its own replaces them.
    """

    rank: int
    size: int
    topology: Topology
    timeout_s: float | None  # how long a receive waits; None: for ever
    recorder: Recorder | None = None  # where set, notes what the main thread waits for

    @property
    def workers(self) -> int:
        """How many ranks train on rows of their own: 0 … workers − 1. Those behind them are
        servers, or a tail.
        """
        return self.topology.workers

    @property
    def others(self) -> list[int]:
        """The other ranks, next neighbour first: if all began with rank 0, its link would be the
        one all wait for.
        """
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @abstractmethod
    def send(self, tensor: Tensor, to: int) -> Pending:
        """Start sending; `tensor` must not change until the wait returns."""

    @abstractmethod
    def receive(self, tensor: Tensor, source: int) -> Pending:
        """Start receiving into `tensor`."""

    @abstractmethod
    def channel(self, name: str, *, idle: bool = False) -> Comm:
        """A channel of its own among the same ranks. Every rank makes its channels in the same
        order.

        On an `idle` one nothing may come for as long as the job lasts: its receives have no
        deadline.
        """

    @abstractmethod
    def group(self, ranks: range) -> Comm:
        """A channel among these ranks only, who alone make it; there they count from 0."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value` (anything picklable), in rank order, on every rank. For set-up, not
        for the hot path.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the channel holds."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks in place, the same bits on every rank: each rank sends 2·n·(P−1)/P
        (ring).
        """
        flat, left, right = (
            tensor.view(-1),
            (self.rank - 1) % self.size,
            (self.rank + 1) % self.size,
        )
        slices = cut(flat, self.size)
        # reduce-scatter: slice r ends summed on rank r − 1 … then all-gather
        for step in range(self.size - 1):
            outgoing, incoming = (
                slices[(self.rank - step) % self.size],
                slices[(self.rank - step - 1) % self.size],
            )
            landed = torch.empty_like(incoming)
            _both(self.receive(landed, left), self.send(outgoing, right))
            incoming.add_(landed)
        for step in range(self.size - 1):
            outgoing, incoming = (
                slices[(self.rank - step + 1) % self.size],
                slices[(self.rank - step) % self.size],
            )
            _both(self.receive(incoming, left), self.send(outgoing, right))

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Give every rank each rank's tensor; `outputs[r]` has the size of rank r's, which may
        differ between ranks.
        """
        self.all_to_all(outputs, [tensor] * self.size)

    def numbers(self, mine: Sequence[int], what: str) -> list[int]:
        """Tell rank r the number `mine[r]`; what every rank told this one. 80 bytes to every other
        rank.

        Raises:
            RanksDiffer: another rank is about something else than `what`.
        """
        label = hashlib.blake2b(what.encode(), digest_size=8).digest() + what.encode()[
            :_WORDS
        ].ljust(_WORDS)
        words = torch.frombuffer(bytearray(label), dtype=torch.int64)
        told = [torch.empty(1 + len(words), dtype=torch.int64, device="cpu") for _ in mine]
        self.all_to_all(
            told, [torch.cat([torch.tensor([number], device="cpu"), words]) for number in mine]
        )
        for rank, theirs in enumerate(told):
            if not torch.equal(theirs[1:], words):
                text = theirs[2:].numpy().tobytes().decode(errors="replace").strip()
                raise RanksDiffer(
                    f"rank {rank} does something else than rank {self.rank}",
                    got=f"rank {rank}: {text}; rank {self.rank}: {what}",
                    do="where layers are cut, on every rank alike: call the model (also to "
                    "evaluate) and state_dict(), "
                    "read cut parameters and gradients; or let none be cut: "
                    'strategies=["replicate", "factor"]',
                    rank=rank,
                )
        return [int(theirs[0]) for theirs in told]

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Give every rank r `inputs[r]`, and get its tensor into `outputs[r]`; empty ones are sent
        by nobody.
        """
        self.start_all_to_all(outputs, inputs)()

    def start_all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start that, and give what waits until it is done; inputs must not change till then."""
        pending = [self.receive(outputs[r], r) for r in self.others if outputs[r].numel()]
        pending += [self.send(inputs[r], r) for r in self.others if inputs[r].numel()]
        outputs[self.rank].copy_(inputs[self.rank])

        def finish() -> None:
            begin_s = perf_counter()
            _both(*pending)
            if self.recorder is not None:
                self.recorder.note("messages from every rank to every other", MAIN, begin_s)

        return finish

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's tensor to every rank."""
        if self.rank == root:
            _both(*(self.send(tensor, r) for r in self.others))
        else:
            self.receive(tensor, root).wait()

    def reached(self, where: str) -> None:
        """Say how far this rank is, for the messages of others that wait for it. Costs nothing."""
        return

    def check(self, where: str) -> None:
        """Raise WorldError if a peer is known to be gone; whoever waits calls it now and then,
        saying where it is.
        """
        return

    def leave(self, error: BaseException | None) -> None:
        """Tell the others that this rank ends: because it is done, or for an error. Nothing follows
        it.
        """
        return

    def diagnose(self, error: BaseException, where: str) -> BaseException:
        """The named error that a raw failure of this channel stands for: who is lost, or who is
        absent.
        """
        return error


def _both(*pending: Pending) -> None:
    for each in pending:
        each.wait()


@dataclass(frozen=True)
class Bucket:
    """A flat tensor on its way: `numel` elements of `itemsize` bytes."""

    numel: int
    itemsize: int
    slices: tuple[int, ...] = ()  # elements that each rank owns, where they are not cut evenly

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor."""
        return self.numel * self.itemsize

    def slice_bytes(self, ranks: int) -> list[int]:
        """Bytes of each rank's slice."""
        return [size * self.itemsize for size in self.slices or cut_sizes(self.numel, ranks)]


class Exchange(ABC):
    """How every rank comes to hold the sum of one bucket. A frozen dataclass whose fields are its
    options.

    In two halves, so that an update can run between them: after `reduce` each rank's slice (see
    `cut`) holds the sum; after `gather` every slice does, with the same bits on every rank.
    Blocking and straight-line.
    """

    name: ClassVar[str]
    # True: it calls the network library's own collective, on GPUs NCCL's
    native: ClassVar[bool] = False
    # False: the result is not the sum (to measure headroom); never chosen by itself
    exact: ClassVar[bool] = True

    def fits(self, topology: Topology) -> bool:
        """Whether it is worth measuring and planning with among these ranks; a pin may ask for it
        anyway.
        """
        return True

    @abstractmethod
    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Bytes that `reduce` and `gather` together send and receive on each rank."""

    @abstractmethod
    def reduce(self, flat: Tensor, comm: Comm) -> None:
        """Sum over ranks, in place; afterwards at least this rank's own slice is the sum."""

    @abstractmethod
    def gather(self, flat: Tensor, comm: Comm) -> None:
        """Bring every summed slice to every rank, in place."""


class SplitExchange(Exchange):
    """An exchange of two equal halves, which takes slices of any sizes and brings back whatever
    their owners made.
    """

    # True: it minds servers, which contribute nothing and are brought nothing
    serves: ClassVar[bool] = False

    @abstractmethod
    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Sum every rank's `slices[r]` into rank r's, in place. Empty ones are sent by nobody."""

    @abstractmethod
    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Bring rank r's `slices[r]` to every rank, in place."""

    def reduce(self, flat: Tensor, comm: Comm) -> None:
        """Sum over ranks, each rank its own slice of an even cut."""
        self.reduce_scatter(cut(flat, comm.size), comm)

    def gather(self, flat: Tensor, comm: Comm) -> None:
        """Bring every slice to every rank."""
        self.all_gather(cut(flat, comm.size), comm)


class Transfer(ABC):
    """Something that crosses the network once in every backward: a bucket's gradients, or one
    layer's factors.

    In order `pack` runs on the thread of backward, `run` on a lane, `publish` on that thread at its
    end. A transfer calls `ready(self)` as soon as all of it is there; one that never does is packed
    at the end with what there is.
    """

    label: str  # what messages call it, e.g. "bucket 3 (features.8, features.10)"
    native: bool = False  # its exchange is
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

    @abstractmethod
    def gather(
        self, values: Sequence[Tensor], turn: Turn, comm: Comm
    ) -> list[tuple[Piece, Tensor]]:
        """Give one flat tensor for each own piece, and get every rank's; what is got is valid until
        `release`.

        Raises:
            RanksDiffer: another rank is at another `turn`.
        """

    @abstractmethod
    def slice_of(self, rank: int) -> Slice:
        """A new slice of a rank's pieces, of zeros."""

    @abstractmethod
    def used(self) -> set[nn.Parameter]:
        """The parameters that any rank used in what was reduced. Known from `gather` to
        `release`.
        """

    @abstractmethod
    def release(self) -> None:
        """What `gather` gave is no longer needed."""


@dataclass(frozen=True)
class Place:
    """Where a strategy works: the model's modules by layer name, their parameters, and this rank
    among the ranks.
    """

    layers: Mapping[str, nn.Module]
    # the site's own trainable ones, by dotted name, in the plan's order
    parameters: Mapping[str, nn.Parameter]
    rank: int
    ranks: int  # that train; servers stand behind them
    servers: int = 0
    stale: bool = False  # workers run ahead of one another: a server answers each by itself
    buckets: Buckets = field(default_factory=Buckets)
    # of parameters that are owned whole, by dotted name
    owners: Mapping[str, Owner] = field(default_factory=dict)
    # the site's part of a parameter, where not all
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # among the ranks that train, for the main thread: where any layer is cut over them,
    comm: Comm | None = None
    chunks: int = 1  # whose rows come in so many
    tables: object = None  # the way to tables at servers (comm/tables.py), where there are any
    # the way to the end of the model on hosts of its own (comm/stage.py), where it is
    tail: object = None


class Strategy(ABC):
    """How a site is served. Stateless; found by name in the registry."""

    name: ClassVar[str]
    # takes several layers as one site and an exchange to carry them
    bucketed: ClassVar[bool] = False
    owns: ClassVar[bool] = False  # gives parameters to owners, as the plan's placement says
    # servers take part: over lanes that they are on (`owns`), or they have the tables
    served: ClassVar[bool] = False
    staged: ClassVar[bool] = False  # has hosts of its own run layers, all of them one site
    # leaves a rank a part of the layer: every rank calls it, and takes part in state_dict
    cuts: ClassVar[bool] = False

    def takes(self, exchange: Exchange) -> bool:
        """Whether that exchange can carry it."""
        return self.bucketed

    @abstractmethod
    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        """Why it cannot serve this layer, or None."""

    def refusal(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        """The same, also where a placement gives a parameter to a rank and it has no owners."""
        for parameter in layer.parameters:
            if parameter.owner is not None and parameter.owner.given and not self.owns:
                return f"it has no owners, but the placement gives {parameter.name} to rank {parameter.owner.number}"
        return self.refuses(layer, cluster)

    def needs(self, layer: LayerProfile) -> dict[str, str]:
        """Other layers, each with the strategy that it must have where this one serves `layer`."""
        return {}

    @abstractmethod
    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        """What serving these layers as one site costs one rank in one step."""

    @abstractmethod
    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        """Rewrite the site's modules in place and return what the engine is to send, the same on
        every rank.
        """

    def flips_at(self, layer: LayerProfile, ranks: int) -> float | None:
        """Rows K a rank above which all-reduce would send fewer bytes; None where that does not
        depend on K.
        """
        return None
