"""Ways to layers that other ranks run or hold. Strategies get them when they are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import Weighing


class TableRows(Protocol):
    """Table of which servers hold the rows."""

    def pull(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids, which are different and ascending."""

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        """Add the gradients of these rows. The ids are different and ascending."""


class TableWay(Protocol):
    """Way to the servers that hold a model's tables."""

    def give(self, name: str, weight: nn.Parameter, weighs: Weighing) -> TableRows:
        """Move a table and its gradient to servers, in place, so that this rank keeps none of it.

        A collective: rank 0's table and gradient are the ones that move.

        Args:
            name: the table's dotted name.
            weight: the table.
            weighs: tells the weight of this rank's rows in the running backward.
        """


class HeldWay(Protocol):
    """The ways to hosts that hold layers of a pipeline and bring no rows."""

    @property
    def comm(self) -> Comm:
        """All ranks."""

    @property
    def holders(self) -> Mapping[str, int]:
        """The rank of every layer of the model."""

    @property
    def homes(self) -> Mapping[str, int]:
        """The rank of every buffer that training changes."""

    def guide(self, model: nn.Module, trainers: Comm) -> Any:
        """Return the guide that tells these hosts of all calls."""


class ReplicaWay(Protocol):
    """The ranks of this rank's replica of a pipeline, if groups of ranks hold the layers."""

    @property
    def number(self) -> int:
        """The replica's number."""

    @property
    def comm(self) -> Comm:
        """The ranks of the replica."""

    @property
    def holding(self) -> Comm | None:
        """The ranks that hold the same layers as this one; None if it holds none."""

    @property
    def share(self) -> float:
        """The replica's part of all ranks."""

    def holders(self, groups: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the rank of each layer, counted in the replica."""


@dataclass(frozen=True)
class Ways:
    """The ways to layers that other hosts or ranks run or hold.

    Args:
        tables: the way to servers that hold tables.
        model: the model, if a strategy runs its forward by itself.
        holders: the ranks of each layer of a pipeline, by name: one, or a group.
        replica: this rank's replica of the pipeline, if groups hold its layers.
        apart: the ways to hosts that hold layers of a pipeline and bring no rows.
        sharing: other modules that also hold the site's parameters, by name.
        backward_hooks: the backward hooks that each module has now.
    """

    tables: TableWay | None = None
    sharing: Mapping[str, nn.Module] = field(default_factory=dict)
    model: nn.Module | None = None
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    replica: ReplicaWay | None = None
    apart: HeldWay | None = None
    backward_hooks: Sequence[Mapping[int, Any]] = ()
