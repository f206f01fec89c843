"""Ways to layers that other ranks run or hold. Strategies get them when they are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from shoal.contracts.comm import Comm


class TableRows(Protocol):
    """Table of which servers hold the rows."""

    def pull(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids, which are different and ascending."""

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        """Add the gradients of these rows. The ids are different and ascending."""


class TableWay(Protocol):
    """Way to the servers that hold a model's tables."""

    def give(self, name: str, weight: nn.Parameter) -> TableRows:
        """Move a table and its gradient to servers, in place, so that this rank keeps none of it.

        A collective: rank 0's table and gradient are the ones that move.
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


@dataclass(frozen=True)
class Ways:
    """The ways to layers that other hosts or ranks run or hold.

    Args:
        tables: the way to servers that hold tables.
        model: the model, if a strategy runs its forward by itself.
        holders: the rank of each layer of a pipeline, by name.
        apart: the ways to hosts that hold layers of a pipeline and bring no rows.
        sharing: other modules that also hold the site's parameters, by name.
        backward_hooks: the backward hooks that each module has now.
    """

    tables: TableWay | None = None
    sharing: Mapping[str, nn.Module] = field(default_factory=dict)
    model: nn.Module | None = None
    holders: Mapping[str, int] = field(default_factory=dict)
    apart: HeldWay | None = None
    backward_hooks: Sequence[Mapping[int, Any]] = ()
