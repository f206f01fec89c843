"""What a worker says to a server of one of its tables, which every server has some rows of.

    Pull                   ids                            answered by their rows
    Push                   ids, gradients of their rows
    TableStep              the optimizer's settings
    ReadTable…             …Values, …Gradient, …State     answered by all rows, or the state
    WriteTable…            …Values, …Gradient, …State
    TableNorm, TableScale  of the gradient                TableNorm is answered
    TableDone              there is nothing more

A short message takes 64 bytes: on the wire it has the short name that is its `tag`. Rows that are
pulled or read come as they lie, without a message around them: the worker knows how many. Guarded
by tests/remote/test_table_messages.py.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shoal.remote.wire import Data, Message


class TableRole(Protocol):
    """What a server does for one worker with one table. Answers go over the worker's channel."""

    def pull(self, ids: Tensor) -> None: ...
    def push(self, ids: Tensor, gradients: Tensor) -> None: ...
    def step(self, work: TableUpdate | None) -> None: ...
    def read_values(self) -> None: ...
    def read_gradient(self) -> None: ...
    def read_state(self, optimizer: int) -> None: ...
    def write_values(self, rows: Tensor | None) -> None: ...
    def write_gradient(self, rows: Tensor | None) -> None: ...
    def write_state(self, optimizer: int, state: Data) -> None: ...
    def norm(self, order: float) -> None: ...
    def scale(self, factor: Tensor) -> None: ...


class TableMessage(Message, frozen=True):
    """A message of a worker about a table."""

    table: int  # by number
    has_gradient: bool  # whether this worker contributes to the gradient, so far

    def do(self, table: TableRole) -> None:
        """Have it done."""
        raise NotImplementedError


class Pull(TableMessage, frozen=True):
    """Give the rows of these ids, which are different and ascending."""

    ids: Tensor

    def do(self, table: TableRole) -> None:
        table.pull(self.ids)


class Push(TableMessage, frozen=True):
    """Keep these rows' gradients until the step."""

    ids: Tensor
    gradients: Tensor

    def do(self, table: TableRole) -> None:
        table.push(self.ids, self.gradients)


class TableUpdate(Message, frozen=True, tag="Work"):
    """The update of a table by an optimizer."""

    optimizer: int
    settings: Data  # of the table's group
    attributes: Data


class TableStep(TableMessage, frozen=True, tag="Step"):
    """Make a step; None: as another worker says."""

    work: TableUpdate | None

    def do(self, table: TableRole) -> None:
        table.step(self.work)


class ReadTableValues(TableMessage, frozen=True, tag="ReadValues"):
    """Give all rows."""

    def do(self, table: TableRole) -> None:
        table.read_values()


class ReadTableGradient(TableMessage, frozen=True, tag="ReadGradient"):
    """Give the gradient."""

    def do(self, table: TableRole) -> None:
        table.read_gradient()


class ReadTableState(TableMessage, frozen=True, tag="ReadState"):
    """Give an optimizer's state."""

    optimizer: int

    def do(self, table: TableRole) -> None:
        table.read_state(self.optimizer)


class WriteTableValues(TableMessage, frozen=True, tag="WriteValues"):
    """Take other values; None: those that another worker gives."""

    rows: Tensor | None

    def do(self, table: TableRole) -> None:
        table.write_values(self.rows)


class WriteTableGradient(TableMessage, frozen=True, tag="WriteGradient"):
    """Take another gradient; None: the one that another worker gives."""

    rows: Tensor | None

    def do(self, table: TableRole) -> None:
        table.write_gradient(self.rows)


class WriteTableState(TableMessage, frozen=True, tag="WriteState"):
    """Take another state for an optimizer; that of the first worker counts."""

    optimizer: int
    state: Data

    def do(self, table: TableRole) -> None:
        table.write_state(self.optimizer, self.state)


class TableNorm(TableMessage, frozen=True, tag="Norm"):
    """Give the norm of the gradient."""

    order: float

    def do(self, table: TableRole) -> None:
        table.norm(self.order)


class TableScale(TableMessage, frozen=True, tag="Scale"):
    """Multiply the gradient."""

    factor: Tensor

    def do(self, table: TableRole) -> None:
        table.scale(self.factor)


class TableDone(Message, frozen=True, tag="End"):
    """This worker asks no more."""


class GradientRows(Message, frozen=True, tag="Gradient"):
    """The answer to ReadTableGradient."""

    rows: Tensor | None  # None: there is none


AnyTableMessage = (
    Pull
    | Push
    | TableStep
    | ReadTableValues
    | ReadTableGradient
    | ReadTableState
    | WriteTableValues
    | WriteTableGradient
    | WriteTableState
    | TableNorm
    | TableScale
    | TableDone
)
