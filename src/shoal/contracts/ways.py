"""Ways to layers that others run or hold, as strategies are given them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from shoal.contracts.comm import Comm


class TableRows(Protocol):
    """A table whose rows servers have."""

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of these ids, which are different and ascending."""

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        """Add these rows' gradients; ids are different and ascending."""


class TableWay(Protocol):
    """The way to servers that have a model's tables."""

    def give(self, name: str, weight: nn.Parameter) -> TableRows:
        """Give servers a table and its gradient, and leave this rank none of it, in place.

        A collective: those of rank 0 are taken.
        """


class TailWay(Protocol):
    """The way to hosts that run the end of a model."""

    @property
    def model(self) -> nn.Module:
        """All of it."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """What they run, by dotted name."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Those of these modules, by dotted name."""


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
        tables: the way to servers that have tables.
        tail: the way to hosts that run the end of the model.
        model: the model, if a strategy runs its forward by itself.
        holders: the rank of each layer of a pipeline, by name.
        apart: the ways to hosts that hold layers of a pipeline and bring no rows.
        sharing: other modules that hold the site's parameters, too, by name.
        backward_hooks: the backward hooks of all modules, of each its own, as they are now.
    """

    tables: TableWay | None = None
    sharing: Mapping[str, nn.Module] = field(default_factory=dict)
    tail: TailWay | None = None
    model: nn.Module | None = None
    holders: Mapping[str, int] = field(default_factory=dict)
    apart: HeldWay | None = None
    backward_hooks: Sequence[Mapping[int, Any]] = ()
