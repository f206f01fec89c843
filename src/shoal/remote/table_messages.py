"""What a worker says to a server of one of its tables, which every server has some rows of.

    Pull         ids                            answered by their rows
    Push         ids, gradients of their rows
    Step         the optimizer's settings
    Read…        …Values, …Gradient, …State     answered by all rows, or the state
    Write…       …Values, …Gradient, …State
    Norm, Scale  of the gradient                Norm is answered

A short message takes 64 bytes. Rows that are pulled or read come as they lie, without a message
around them: the worker knows how many. Guarded by tests/remote/test_table_messages.py.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shoal.remote.wire import Data, Message


class TableRole(Protocol):
    """What a server does for one worker with one table. Answers go over the worker's channel."""

    def pull(self, ids: Tensor) -> None: ...
    def push(self, ids: Tensor, gradients: Tensor) -> None: ...
    def step(self, work: Work | None) -> None: ...
    def read_values(self) -> None: ...
    def read_gradient(self) -> None: ...
    def read_state(self, optimizer: int) -> None: ...
    def write_values(self, rows: Tensor | None) -> None: ...
    def write_gradient(self, rows: Tensor | None) -> None: ...
    def write_state(self, optimizer: int, state: Data) -> None: ...
    def norm(self, order: float) -> None: ...
    def scale(self, factor: Tensor) -> None: ...


class TableMessage(Message, frozen=True):
    """What a worker wants of a table."""

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


class Work(Message, frozen=True):
    """How an optimizer updates a table."""

    optimizer: int
    settings: Data  # of the table's group
    attributes: Data


class Step(TableMessage, frozen=True):
    """Make a step; None: as another worker says."""

    work: Work | None

    def do(self, table: TableRole) -> None:
        table.step(self.work)


class ReadValues(TableMessage, frozen=True):
    """Give all rows."""

    def do(self, table: TableRole) -> None:
        table.read_values()


class ReadGradient(TableMessage, frozen=True):
    """Give the gradient."""

    def do(self, table: TableRole) -> None:
        table.read_gradient()


class ReadState(TableMessage, frozen=True):
    """Give an optimizer's state."""

    optimizer: int

    def do(self, table: TableRole) -> None:
        table.read_state(self.optimizer)


class WriteValues(TableMessage, frozen=True):
    """Take other values; None: those that another worker gives."""

    rows: Tensor | None

    def do(self, table: TableRole) -> None:
        table.write_values(self.rows)


class WriteGradient(TableMessage, frozen=True):
    """Take another gradient; None: the one that another worker gives."""

    rows: Tensor | None

    def do(self, table: TableRole) -> None:
        table.write_gradient(self.rows)


class WriteState(TableMessage, frozen=True):
    """Take another state for an optimizer; that of the first worker counts."""

    optimizer: int
    state: Data

    def do(self, table: TableRole) -> None:
        table.write_state(self.optimizer, self.state)


class Norm(TableMessage, frozen=True):
    """Give the norm of the gradient."""

    order: float

    def do(self, table: TableRole) -> None:
        table.norm(self.order)


class Scale(TableMessage, frozen=True):
    """Multiply the gradient."""

    factor: Tensor

    def do(self, table: TableRole) -> None:
        table.scale(self.factor)


class End(Message, frozen=True):
    """This worker asks no more."""


class Gradient(Message, frozen=True):
    """The answer to ReadGradient."""

    rows: Tensor | None  # None: there is none


AnyTableMessage = (
    Pull
    | Push
    | Step
    | ReadValues
    | ReadGradient
    | ReadState
    | WriteValues
    | WriteGradient
    | WriteState
    | Norm
    | Scale
    | End
)
