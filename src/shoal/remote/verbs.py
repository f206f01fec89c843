"""The verbs that workers say to servers: one vocabulary for models, tables, and workers ahead.

    verb       to a model's slices (servers/step_workers.py)     to a table (servers/tables.py)
    Sum        the gradients of a backward, on the lanes    -
    Pull       -                                            answered: the rows of some ids
    Push       -                                            keep these gradients until the step
    MakeStep   update these pieces, and send them back      update, when all workers have asked
    Read       bring an aspect of them to all workers       answered: all rows, or the state
    Write      have this aspect of the own pieces           the same, when all workers have asked
    Norm       of gradients, brought to all workers         answered, when all workers have asked
    ScaleBy    multiply gradients                           the same, when all workers have asked

Workers that step by themselves (servers/geo.py) say three of them: Push adds a difference to the
global weights, Read and Write are about these. All three are answered by the weights.

A verb is a frozen class with the fields that cross. The host that obeys has one `match` over all of
them, and `assert_never` below it: mypy names each host that a new verb has not reached. A host
refuses a verb that its workers never say (`unasked`).

`PartOrder` is the envelope. It says which part of the server a verb is for. `End` comes last on
every way. Guarded by tests/remote/test_verbs.py.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
section 3, for push and pull.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from shoal.core.errors import WorldError
from shoal.remote.wire import Data, Message, MessagePart

T = TypeVar("T")
# Parameters that have a gradient at the server: their numbers, by transfer. A table is a transfer
# of one parameter. None: the same as before
Held = tuple[tuple[int, ...], ...] | None
# Parameters, as numbers of a transfer and of the parameter in it
Numbers = tuple[tuple[int, int], ...]
# Values by number of the transfer, and of the server's piece of it
Values = dict[int, dict[int, Tensor]]
# States by transfer, in their order, and number of the server's piece
States = tuple[dict[int, dict[str, Any]], ...]
# Numbers that codecs have lost, by parameter name and kind
Residuals = dict[str, dict[str, Tensor]]
_SAME_VERSION = "start every rank with the same version of Shoal"


class Aspect(Enum):
    """The aspect of parameters that is read or written."""

    VALUES = "values"
    GRADIENT = "gradient"
    STATE = "state"  # an optimizer has it
    RESIDUALS = "residuals"  # codecs have lost them
    ERROR_BOUND = "error bound"  # codecs keep to it


class Sum(Message, frozen=True):
    """Sum the gradients that workers send on the lanes after a backward.

    Where workers run ahead of one another, it is said once: before the first backward of all.
    """


class Pull(Message, frozen=True):
    """Give the rows of these ids, which are different and ascending."""

    ids: Tensor


class Push(Message, frozen=True):
    """Keep these gradients until the step, or add these differences at once."""

    ids: Tensor | None  # rows that have them; None: all of the slice, as of workers by themselves
    values: Tensor


class PieceOrder(MessagePart, frozen=True):
    """The order to update one piece."""

    group: int  # number of the group that has its settings
    at_owner: bool  # whether the owner has the gradient that counts
    gradient: Tensor | None  # otherwise


class MakeStep(Message, frozen=True):
    """Make a step of an optimizer."""

    optimizer: int  # its place among the model's
    groups: Data  # settings of the groups; None to a table: as another worker says
    attributes: Data  # the optimizer's own
    pieces: dict[int, dict[int, PieceOrder]]  # numbered by transfer and piece; a table has none

    def only(self, transfers: Sequence[int]) -> MakeStep:
        """The part of it that concerns these transfers."""
        numbers = [number for number in self.pieces if number in transfers]
        pieces = {number: self.pieces[number] for number in numbers}
        return MakeStep(self.optimizer, self.groups, self.attributes, pieces)


class Read(Message, frozen=True):
    """Give an aspect of the parameters."""

    aspect: Aspect
    optimizer: int = 0  # number of the one that has the state


class Write(Message, frozen=True):
    """Have an aspect of the parameters as it is here."""

    aspect: Aspect
    content: Data  # None to a table: as another worker says
    optimizer: int = 0  # number of the one that has the state

    def holds(self, kind: type[T]) -> T:
        """The content, which is of this type.

        Raises:
            WorldError: it is of another.
        """
        try:
            return msgspec.convert(self.content.value, kind)
        except Exception as error:  # any kind: the content may be anything
            raise WorldError(
                f"a worker writes {self.aspect.value} of another form",
                got=str(error)[:200],
                do=_SAME_VERSION,
            ) from error


class Norm(Message, frozen=True):
    """Give the norm of these parameters' gradients."""

    parameters: Numbers
    order: float


class ScaleBy(Message, frozen=True):
    """Multiply these parameters' gradients."""

    parameters: Numbers
    factor: Tensor


Verb = Sum | Pull | Push | MakeStep | Read | Write | Norm | ScaleBy


class PartOrder(Message, frozen=True, tag="To"):
    """A verb for one part of the server: a model's slices, or a table.

    Examples:
        >>> order = PartOrder(2, None, Read(Aspect.STATE, optimizer=1))
        >>> order.verb.aspect.value
        'state'
    """

    part: int  # number of the model; of the table on its channel, of the transfer on geo's lane
    held: Held
    verb: Verb


class End(Message, frozen=True):
    """Nothing more follows."""


def unasked(verb: Verb) -> WorldError:
    """The error about a verb that the workers of this part never say."""
    aspect = verb.aspect.value if isinstance(verb, Read | Write) else ""
    return WorldError(
        f"a server is asked for {' '.join([type(verb).__name__, aspect]).strip()}, which workers "
        "of this model do not say",
        do=_SAME_VERSION,
    )
