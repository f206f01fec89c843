"""Exchange: how the sum of one bucket gets to every rank, and the bytes that takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.core.cost import Traffic
from shoal.core.facts import Topology
from shoal.core.pieces import cut, cut_sizes
from shoal.core.registry import Contract
from shoal.core.written import written


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


class Exchange(Contract, ABC):
    """How every rank comes to hold the sum of one bucket. A frozen dataclass whose fields are its
    options.

    In two halves, so that an update can run between them: after `reduce` each rank's slice (see
    `cut`) holds the sum; after `gather` every slice does, with the same bits on every rank.
    Blocking and straight-line.
    """

    package: ClassVar[str] = "shoal.exchange"
    group: ClassVar[str] = "shoal.exchanges"
    # True: it calls the network library's own collective, on GPUs NCCL's
    native: ClassVar[bool] = False
    # False: the result is not the sum (to measure headroom); never chosen by itself
    exact: ClassVar[bool] = True

    def __str__(self) -> str:
        """As plans write it: the name, and the options that are not the default."""
        return written(self)

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
