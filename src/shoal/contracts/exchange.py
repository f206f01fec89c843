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

UNSENT = "unsent"  # what an owner has made of its values and not brought to the others
StateDict = dict[str, dict[str, Tensor]]  # by parameter name, then by what it is


@dataclass(frozen=True)
class Bucket:
    """The sizes of a bucket: `numel` elements of `itemsize` bytes."""

    numel: int
    itemsize: int
    slices: tuple[int, ...] = ()  # elements that each rank owns, where they are not cut evenly
    # elements of control at the end of each of these; of an evenly cut bucket one number, at its
    # own end
    control: tuple[int, ...] = ()
    # of the parameters that stand first, where whole ones do: those that may be coded
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor."""
        return self.numel * self.itemsize

    def slice_bytes(self, ranks: int) -> list[int]:
        """Bytes of each rank's slice."""
        return [size * self.itemsize for size in self.slices or cut_sizes(self.numel, ranks)]

    def slice_values(self, ranks: int) -> list[int]:
        """How many elements of each rank's slice are values."""
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
    """A bucket's memory, and what its values are."""

    flat: Tensor
    slices: tuple[Tensor, ...]  # of each rank, views of `flat`
    spans: tuple[tuple[Span, ...], ...]  # what the values of each slice are, in order
    numels: Mapping[str, int]  # of the parameters as a whole
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # where they stand whole

    @classmethod
    def even(
        cls,
        flat: Tensor,
        numels: Mapping[str, int],
        ranks: int,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> LiveBucket:
        """An evenly cut one, in which whole parameters stand one behind the other."""
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
        """How many elements of each slice are values; what is behind them is control."""
        return tuple(sum(span.stop - span.start for span in row) for row in self.spans)

    def values(self, rank: int) -> Tensor:
        """The values of a rank's slice; a view."""
        return self.slices[rank][: self.num_values[rank]]

    def control(self, rank: int) -> Tensor:
        """The control of a rank's slice; a view."""
        return self.slices[rank][self.num_values[rank] :]


class Carrier(ABC):
    """Carries one live bucket, round after round, and remembers what its codec needs."""

    # False: what `gather` brings may differ from what owners gave
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
        """As `gather`, of values that all ranks have already and that their owners have changed.

        Args:
            changes: of the own slice's values, in its memory's order; what is not sent is not kept.
            comm: the ranks. The bucket holds the values that all have; they come to be those with
                the changes as sent, the own slice's too.
        """
        raise NotImplementedError("an exact carrier gathers the values themselves")

    def kept(self, what: str, rank: int) -> Tensor:
        """Numbers that are kept from round to round and saved, one for each value of a slice."""
        raise NotImplementedError("an exact carrier keeps nothing")

    def tensors(self) -> Sequence[Tensor]:
        """All that is remembered."""
        return ()

    def residuals(self) -> StateDict:
        """What codes have lost and this rank will send, by parameter name and what it is."""
        return {}

    def state_dict(self) -> StateDict:
        """What is remembered, by parameter name: flat, of the whole parameter's elements, with
        zeros for those that are not in this bucket.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Remember what `state_dict` gave; parameters of other buckets are skipped."""
        return


class Exchange(Contract, ABC):
    """How every rank gets the sum of one bucket: a frozen dataclass of the exchange's options.

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
        """As plans write it: the name, and the options that are not the default."""
        return written(self)

    def fits(self, topology: Topology) -> bool:
        """Whether to measure it and plan with it among these ranks; a pin may ask anyway."""
        return True

    def at_once(self, topology: Topology) -> int:
        """How many messages a rank sends in a round, each to another rank: what more ranks cost."""
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
        """What a message and a byte of it take."""
        return cluster.pace(str(self))

    def coding_s(
        self, bucket: Bucket, cluster: Cluster, ranks: int, servers: int = 0
    ) -> tuple[float, float]:
        """Seconds that a lane computes beside moving: for `reduce`, and for `gather`.

        Args:
            bucket: that is exchanged.
            cluster: the workers, with what codecs take.
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
        """Sum every rank's `slices[r]` into rank r's, in place. Empty ones are sent by nobody."""

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
    slices: Sequence[Tensor]  # of each rank

    def reduce(self, comm: Comm) -> None:
        self.exchange.reduce_scatter(self.slices, comm)  # gradient 8

    def gather(self, comm: Comm) -> None:
        self.exchange.all_gather(self.slices, comm)


class Coding(ABC):
    """One round of a bucket whose slices travel as messages: codes, with control behind them."""

    slices: Sequence[Tensor]  # of each owner, what this rank has of it now; may be added to

    @abstractmethod
    def message(self, owner: int) -> Tensor:
        """What this rank has now of an owner's slice, as a message. Once a round for each."""

    @abstractmethod
    def landing(self, owner: int) -> Tensor:
        """Where a message of an owner's slice may land: flat, empty if nothing is sent of it."""

    @abstractmethod
    def add(self, owner: int, parts: Iterable[Tensor | None]) -> None:
        """Have this rank's slice be the sum of these messages in their order; None stands for what
        is there.
        """
