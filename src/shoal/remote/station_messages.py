"""Orders to hosts that hold stages of a pipeline and bring no rows.

    OpenStations        the rank of each layer, and how rows are cut into parts
    StationCall         a call of the model
    StationExpressions  functions of its output, for the host with the end
    StationBackward     go back through a call
    HeldOrder           a verb for parameters that the host holds, by name (verbs.py)

One rank sends them to every such host, in the order in which all ranks that train do these things.
`End` comes last. Guarded by tests/pipeline/test_holding.py and tests/remote/test_held_orders.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.remote.verbs import End, Verb
from shoal.remote.wire import Data, Message, MessagePart

AutocastKinds = tuple[tuple[str, bool, torch.dtype], ...]  # stands by kind of device
PartsForm = tuple[int, dict[str, tuple[bool, ...]]]  # parts, and which tensors of a call are cut
Shapes = tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...]  # forms of each rank's tensors


class OpenStations(Message, frozen=True):
    """Hold the layers of this host's rank."""

    holders: dict[str, int]  # the rank of each layer; -1 of a layer that every rank has
    buffers: dict[
        str, tuple[bool, int]
    ]  # whether a buffer that training changes is a mean, and its rank
    parts: PartsForm
    codec: str


class ThreadSettings(MessagePart, frozen=True):
    """Settings of a thread that change results of functions."""

    grad: bool
    autocast: AutocastKinds


class ModuleSettings(MessagePart, frozen=True):
    """Changes of the model and the loss since the last call."""

    training: dict[str, bool]  # modes by name of a module
    attributes: dict[str, Data]  # plain ones of a module, by its name
    trainable: dict[str, bool]  # flags by name of a parameter
    tensors: dict[str, Tensor]  # buffers and frozen parameters


class StationCall(Message, frozen=True, tag="Call"):
    """Take part in a call of the model."""

    run: int
    number: int  # stands for the arguments' forms
    arguments: Data | None  # the first rank's, if their forms are new
    shapes: Shapes
    numbers: tuple[int, ...]  # numbers of each rank's forms
    seed: int | None
    thread: ThreadSettings
    settings: ModuleSettings
    oldest: int  # the first call that a rank has still


class ToldResult(MessagePart, frozen=True):
    """A result that each rank is told."""

    expression: int  # its number; -1 is the output
    number: int
    is_number: bool
    grad: bool


class StationExpressions(Message, frozen=True, tag="Expressions"):
    """Compute functions of the output of a call, if the end is here."""

    run: int
    first: int  # number of the first expression
    functions: tuple[str, ...]  # names in torch; "" is the loss
    threads: tuple[ThreadSettings, ...]
    arguments: Data  # arguments of each function, tensors left out
    shapes: Shapes
    told: tuple[ToldResult, ...]


class StationBackward(Message, frozen=True, tag="Backward"):
    """Go back through a call, from these results."""

    run: int
    results: tuple[tuple[int, int], ...]
    cleared: dict[str, bool]  # whether a parameter has no gradient so far
    wanted: dict[str, bool]  # whether it gets one


class HeldGroup(MessagePart, frozen=True):
    """An optimizer's group: its settings, and names of its parameters that the host holds."""

    settings: Data
    parameters: tuple[str, ...]


Groups = tuple[HeldGroup, ...]


class HeldOrder(Message, frozen=True, tag="Held"):
    """A verb for parameters that the host holds: one by name, or all of an optimizer.

    Read is answered by `Data`, Norm by a tensor.

    Examples:
        >>> from shoal.remote.verbs import Aspect, Read
        >>> HeldOrder(Read(Aspect.GRADIENT), "head.weight").key
        'Read gradient of head.weight'
    """

    verb: Verb
    name: str = ""  # of one parameter; '' says all of an optimizer
    optimizer: int = 0
    cleared: tuple[bool, ...] = ()  # parameters without a gradient so far
    groups: Groups = ()

    @property
    def key(self) -> str:
        """Its name in errors: ranks compare it before one of them sends the order."""
        aspect = getattr(self.verb, "aspect", None)
        verb = " ".join([type(self.verb).__name__, *([aspect.value] if aspect else [])])
        return f"{verb} of {self.name or f'optimizer {self.optimizer}'}"


StationOrder = OpenStations | StationCall | StationExpressions | StationBackward | HeldOrder | End
