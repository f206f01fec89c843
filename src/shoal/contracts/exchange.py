"""Exchange: how the sum of one bucket gets to every rank, and the bytes that takes.

A bucket is one flat tensor, cut into a slice a rank. In a slice, values stand first and control
behind them:

    slice of rank r   │ values: gradients or parameters │ control: flags, shares, marks, turn │

An exchange moves slices as they are. With a codec (codecs/coded_exchange.py), values travel as its
code, and control in its own bytes behind that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import ClassVar, NamedTuple, final

from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.core.cost import Pace, Traffic, total
from shoal.core.facts import Cluster, Topology
from shoal.core.pieces import cut, cut_sizes
from shoal.core.registry import Contract
from shoal.core.written_options import written

UNSENT = "unsent"  # changes of an owner's values that the other ranks have not received
StateDict = dict[str, dict[str, Tensor]]  # by parameter name, then by the kind of state


@dataclass(frozen=True)
class Bucket:
    """The sizes of a bucket: `numel` elements of `itemsize` bytes."""

    numel: int
    itemsize: int
    slices: tuple[int, ...] = ()  # elements that each rank owns, where they are not cut evenly
    # elements of control at the end of each of these; of an evenly cut bucket one number, at its
    # own end
    control: tuple[int, ...] = ()
    # shapes of the whole parameters that stand first, which may be coded; empty for pieces
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor."""
        return self.numel * self.itemsize

    def slice_bytes(self, ranks: int) -> list[int]:
        """Bytes of each rank's slice."""
        return [size * self.itemsize for size in self.slices or cut_sizes(self.numel, ranks)]

    def slice_values(self, ranks: int) -> list[int]:
        """Number of values among the elements of each rank's slice."""
        if self.slices:
            control = self.control or (0,) * len(self.slices)
            return [size - behind for size, behind in zip(self.slices, control, strict=True)]
        sizes = cut_sizes(self.numel, ranks)
        num_values = self.numel - sum(self.control)
        starts = accumulate(sizes, initial=0)
        return [
            min(max(num_values - start, 0), size)
            for start, size in zip(starts, sizes, strict=False)
        ]


class Span(NamedTuple):
    """Elements `start` to `stop` of a parameter's line."""

    name: str  # dotted, in the model
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class LiveBucket:
    """A bucket's memory, and the parameters that its values belong to."""

    flat: Tensor
    slices: tuple[Tensor, ...]  # a slice for each rank, views of `flat`
    spans: tuple[tuple[Span, ...], ...]  # parts of parameters in each slice, in order
    numels: Mapping[str, int]  # elements of each whole parameter
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # whole parameters' shapes

    @classmethod
    def even(
        cls,
        flat: Tensor,
        numels: Mapping[str, int],
        ranks: int,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> LiveBucket:
        """Return an evenly cut bucket, in which whole parameters stand one after another."""
        slices, spans = cut(flat, ranks), []
        ends = list(accumulate(numels.values()))
        begin = 0
        for part in slices:
            stop = begin + part.numel()
            inside = [
                Span(name, max(begin, end - numel) - end + numel, min(stop, end) - end + numel)
                for (name, numel), end in zip(numels.items(), ends, strict=True)
                if max(begin, end - numel) < min(stop, end)
            ]
            spans.append(tuple(inside))
            begin = stop
        return cls(flat, tuple(slices), tuple(spans), numels, shapes)

    @cached_property
    def num_values(self) -> tuple[int, ...]:
        """Number of values in each slice. The elements after them are control."""
        return tuple(sum(span.stop - span.start for span in row) for row in self.spans)

    def values(self, rank: int) -> Tensor:
        """The values of a rank's slice; a view."""
        return self.slices[rank][: self.num_values[rank]]

    def control(self, rank: int) -> Tensor:
        """The control of a rank's slice; a view."""
        return self.slices[rank][self.num_values[rank] :]


class Carrier(ABC):
    """Carrier of one live bucket, round after round, with the memory of its codec."""

    # False: `gather` may bring other values than the owners gave
    exact: bool = True
    # True: it is exact in its first rounds only, and may differ later
    passing: bool = False

    @abstractmethod
    def reduce(self, comm: Comm) -> None:
        """Sum over ranks, in place; afterwards this rank's own slice is the sum."""

    @abstractmethod
    def gather(self, comm: Comm) -> None:
        """Bring every rank's own slice to all ranks, in place."""

    def gather_changes(self, changes: Tensor, comm: Comm) -> None:
        """Bring changes of values that all ranks have to all ranks, in place.

        Args:
            changes: changes of this rank's own slice, in its memory's order. The part that a code
                loses is not kept.
            comm: the ranks. The bucket holds the old values, the same on all ranks. Each value
                becomes the old one with the change as it was sent, in the own slice too.
        """
        raise NotImplementedError("an exact carrier gathers the values themselves")

    def kept(self, what: str, rank: int) -> Tensor:
        """Numbers that are kept from round to round and saved, one for each value of a slice."""
        raise NotImplementedError("an exact carrier keeps nothing")

    def tensors(self) -> Sequence[Tensor]:
        """Return all tensors that this carrier remembers."""
        return ()

    def residuals(self) -> StateDict:
        """Return the errors of codes that this rank will send later, by parameter name and kind."""
        return {}

    def state_dict(self) -> StateDict:
        """Return all that this carrier remembers, by parameter name.

        Each tensor is flat and as long as the whole parameter, with zeros for elements that are
        not in this bucket.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take the state that `state_dict` returned. Parameters of other buckets are skipped."""
        return


class Exchange(Contract, ABC):
    """Way to bring the sum of one bucket to every rank: a frozen dataclass of its options.

    In two halves, so that an update can run between them: after `reduce` each rank's slice (see
    `cut`) holds the sum; after `gather` every slice does, with the same bits on every rank.
    Blocking and straight-line.
    """

    package: ClassVar[str] = "shoal.exchange"
    group: ClassVar[str] = "shoal.exchanges"
    # True: it calls the network library's own collective, on GPUs NCCL's
    native: ClassVar[bool] = False
    # False: it is worth its time only where the library carries tensors of GPUs
    at_host: ClassVar[bool] = True
    # False: the result is not the sum (to measure headroom); never chosen by itself
    exact: ClassVar[bool] = True

    def __str__(self) -> str:
        """Return the form in plans: the name, and the options that differ from the default."""
        return written(self)

    def fits(self, topology: Topology) -> bool:
        """Whether to measure it and plan with it among these ranks; a pin may ask anyway."""
        return True

    def at_once(self, topology: Topology) -> int:
        """Return the messages that a rank sends to different ranks in one round."""
        return 1

    def scaled(self, nbytes: int) -> Exchange:
        """The exchange by which so small a bucket is measured in place of a large one.

        Where large buckets go in several messages, that one does, too.
        """
        return self

    def carrier(self, bucket: LiveBucket) -> Carrier:
        """Return the carrier for this bucket."""
        return PlainCarrier(self, bucket.flat)

    @property
    def least_dims(self) -> int:
        """Parameters of fewer dimensions travel as control does: exactly, behind the others."""
        return 0

    def pace(self, cluster: Cluster) -> Pace:
        """Return the seconds that each message and each byte take."""
        return cluster.pace(str(self))

    def coding_s(
        self, bucket: Bucket, cluster: Cluster, ranks: int, servers: int = 0
    ) -> tuple[float, float]:
        """Seconds that a lane computes beside moving: for `reduce`, and for `gather`.

        Args:
            bucket: that is exchanged.
            cluster: the workers, with the measured seconds of codecs.
            ranks: of the exchange, servers among them.
            servers: how many of these are servers.
        """
        return 0.0, 0.0

    def memory_bytes(self, bucket: Bucket, ranks: int) -> float:
        """Bytes that a rank keeps for a bucket from round to round, beside the bucket itself."""
        return 0.0

    @abstractmethod
    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Bytes that `reduce` and `gather` together send and receive on each rank."""

    @abstractmethod
    def reduce(self, flat: Tensor, comm: Comm) -> None:
        """Sum over ranks, in place; afterwards at least this rank's own slice is the sum."""

    @abstractmethod
    def gather(self, flat: Tensor, comm: Comm) -> None:
        """Bring every summed slice to every rank, in place."""


@final
@dataclass(frozen=True, eq=False)
class PlainCarrier(Carrier):
    """A carrier of a whole bucket as it is, with nothing to remember."""

    exchange: Exchange
    flat: Tensor

    def reduce(self, comm: Comm) -> None:
        self.exchange.reduce(self.flat, comm)  # gradient 8

    def gather(self, comm: Comm) -> None:
        self.exchange.gather(self.flat, comm)


class SplitExchange(Exchange):
    """An exchange of two halves: slices of any sizes go to their owners, and results come back.

    One that writes `reduce_codes` takes codecs: it sends codes in place of values.
    """

    @property
    def serves(self) -> bool:
        """Whether it minds servers, which contribute nothing and are brought nothing."""
        return False

    @abstractmethod
    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Sum every rank's `slices[r]` into rank r's, in place. No rank sends an empty slice."""

    @abstractmethod
    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Bring rank r's `slices[r]` to every rank, in place."""

    def carrier(self, bucket: LiveBucket) -> Carrier:
        """Return the carrier for this bucket, which is cut as it is."""
        return SliceCarrier(self, bucket.slices)

    def reduce(self, flat: Tensor, comm: Comm) -> None:
        """Sum over ranks, each rank its own slice of an even cut."""
        self.reduce_scatter(cut(flat, comm.size), comm)

    def gather(self, flat: Tensor, comm: Comm) -> None:
        """Bring every slice to every rank."""
        self.all_gather(cut(flat, comm.size), comm)

    def coding_traffic(
        self, bucket: Bucket, there: Bucket, back: Bucket, topology: Topology
    ) -> Traffic:
        """What both halves move of a bucket by messages of these sizes, there and back.

        The halves of an exchange's traffic are taken to be as large as each other.
        """
        if there == back:
            return self.traffic(there, topology)
        return total([self.traffic(way, topology).half for way in (there, back)])

    def reduce_codes(self, coding: Coding, comm: Comm) -> None:
        """As `reduce_scatter`, by messages: they are of the bytes that `reduce_scatter` sends of
        slices as long as these. An exchange that writes it takes codecs.
        """
        raise NotImplementedError(f"{self} takes no codec")

    @classmethod
    def takes_codecs(cls) -> bool:
        """Whether its messages may be codes."""
        return cls.reduce_codes is not SplitExchange.reduce_codes


@final
@dataclass(frozen=True, eq=False)
class SliceCarrier(Carrier):
    """A carrier of a bucket's slices as they are, with nothing to remember."""

    exchange: SplitExchange
    slices: Sequence[Tensor]  # a slice for each rank

    def reduce(self, comm: Comm) -> None:
        self.exchange.reduce_scatter(self.slices, comm)  # gradient 8

    def gather(self, comm: Comm) -> None:
        self.exchange.all_gather(self.slices, comm)


class Coding(ABC):
    """One round of a bucket in which slices travel as messages: codes, then control."""

    slices: Sequence[Tensor]  # this rank's values of each owner's slice; may be added to

    @abstractmethod
    def message(self, owner: int) -> Tensor:
        """Return this rank's values of an owner's slice, as a message. Once a round for each."""

    @abstractmethod
    def landing(self, owner: int) -> Tensor:
        """Return memory for a message of an owner's slice: flat, empty if nothing is sent."""

    @abstractmethod
    def add(self, owner: int, parts: Iterable[Tensor | None]) -> None:
        """Set this rank's slice to the sum of these messages in their order.

        None stands for the values that are there already.
        """
