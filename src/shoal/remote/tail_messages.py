"""What a worker says to its tail host (tail/stage.py), the same as every other worker.

    Open                   what the end of the model is
    Forward                a micro-batch's activation
    Output                 answered by what the tail has put out
    TailLoss               its arguments; answered by the loss
    Backward               this worker's weight; answered by activations' gradients, as they lie
    TailStep               the optimizer's settings
    ReadTail…, WriteTail…  …Values, …Gradient, …State
    AddGradient            one that was found without the tail
    TailNorm, TailScale    of the gradients; TailNorm is answered
    TailDone               there is nothing more

A tail host takes one message from each of its workers at a time, all of one type and `key`. A short
one takes 64 bytes beside its tensors: on the wire a message has the short name that is its `tag`.
Guarded by tests/remote/test_tail_messages.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.remote.wire import Data, Message, MessagePart


class Modes(MessagePart, frozen=True):
    """What the model's code has set that the tail must be run with."""

    training: tuple[bool, ...]  # of every module of the tail, and of the loss
    trainable: tuple[bool, ...]  # of every parameter
    # of every module the plain attributes, if they have changed
    settings: tuple[Data | None, ...]


class Autocast(MessagePart, frozen=True):
    """The type that operations are cast to."""

    enabled: bool
    dtype: torch.dtype


class TailGroup(MessagePart, frozen=True):
    """An optimizer's group: its settings, and names of those parameters that tail hosts have."""

    settings: Data
    parameters: tuple[str, ...]


Groups = tuple[TailGroup, ...]


class TailRole(Protocol):
    """What a tail host does, when each of its workers has asked: by worker, what it has sent."""

    def forward(self, asked: Mapping[int, Forward]) -> None: ...
    def output(self, asked: Mapping[int, Output]) -> None: ...
    def loss(self, asked: Mapping[int, TailLoss]) -> None: ...
    def backward(self, asked: Mapping[int, Backward]) -> None: ...
    def step(self, asked: Mapping[int, TailStep]) -> None: ...
    def read_values(self, asked: Mapping[int, ReadTailValues]) -> None: ...
    def read_gradient(self, asked: Mapping[int, ReadTailGradient]) -> None: ...
    def read_state(self, asked: Mapping[int, ReadTailState]) -> None: ...
    def write_values(self, asked: Mapping[int, WriteTailValues]) -> None: ...
    def write_gradient(self, asked: Mapping[int, WriteTailGradient]) -> None: ...
    def write_state(self, asked: Mapping[int, WriteTailState]) -> None: ...
    def add_gradient(self, asked: Mapping[int, AddGradient]) -> None: ...
    def norm(self, asked: Mapping[int, TailNorm]) -> None: ...
    def scale(self, asked: Mapping[int, TailScale]) -> None: ...


class TailMessage(Message, frozen=True):
    """A message of a worker to the tail."""

    @property
    def kind(self) -> str:
        """Name of the message's type, on the wire and in errors."""
        return str(self.__struct_config__.tag)

    @property
    def key(self) -> str:
        """Its name in errors; messages of one key belong together."""
        return self.kind

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        """Have it done; `asked` is it, and what the other workers have sent for the same."""
        raise NotImplementedError


class TailDone(TailMessage, frozen=True, tag="End"):
    """This worker asks no more."""


class Open(TailMessage, frozen=True):
    """Be the end of the model."""

    modules: tuple[str, ...]
    micro_batches: int
    joined: bool
    # by layer, in the order in which gradients come, how hosts share it: "sliced:direct"
    shared: dict[str, str]
    codec: str = ""  # as which activations and their gradients cross


class Forward(TailMessage, frozen=True):
    """A micro-batch."""

    run: int
    index: int
    oldest: int  # the first run that this worker has still
    modes: Modes | None  # with the first one
    of_gradients: bool
    back: bool  # its gradient is to come back
    autocast: Autocast
    activation: Tensor | None
    wide: torch.dtype | None = None  # of the activation, where it is a code, as its gradient is

    @property
    def key(self) -> str:
        return f"micro-batch {self.index} of forward {self.run}"

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.forward(asked)


class OfRun(TailMessage, frozen=True):
    """What is about one forward."""

    run: int

    @property
    def key(self) -> str:
        return f"{self.kind} of forward {self.run}"


class Output(OfRun, frozen=True):
    """Give what the tail has put out."""

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.output(asked)


class TailLoss(OfRun, frozen=True, tag="Loss"):
    """Give the loss; its arguments beside the output are these."""

    index: int
    args: Data
    kwargs: Data
    of_gradients: bool
    autocast: Autocast

    @property
    def key(self) -> str:
        return f"Loss {self.index} of forward {self.run}"

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.loss(asked)


class Backward(OfRun, frozen=True):
    """Go back through a forward, and send activations' gradients."""

    cleared: tuple[bool, ...]  # parameters without a gradient so far
    wanted: tuple[bool, ...]  # and those that are to get one
    weight: float  # of this worker
    slopes: dict[int, Tensor]  # of its losses

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.backward(asked)


class StepSettings(MessagePart, frozen=True):
    """How an optimizer is to make a step."""

    cleared: tuple[bool, ...]
    groups: Groups
    attributes: Data


class TailStep(TailMessage, frozen=True, tag="Step"):
    """Make a step; None: as another worker of this host says."""

    optimizer: int
    settings: StepSettings | None

    @property
    def key(self) -> str:
        return f"Step of optimizer {self.optimizer}"

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.step(asked)


class OfParameter(TailMessage, frozen=True):
    """What is about one parameter."""

    name: str

    @property
    def key(self) -> str:
        return f"{self.kind} of {self.name}"


class ReadTailValues(OfParameter, frozen=True, tag="ReadValues"):
    """Give a parameter."""

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.read_values(asked)


class ReadTailGradient(OfParameter, frozen=True, tag="ReadGradient"):
    """Give a parameter's gradient."""

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.read_gradient(asked)


class WriteTailValues(OfParameter, frozen=True, tag="WriteValues"):
    """Take other values; None: those that another worker of this host gives."""

    whole: Tensor | None

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.write_values(asked)


class WriteTailGradient(OfParameter, frozen=True, tag="WriteGradient"):
    """Take another gradient; None: the one that another worker of this host gives."""

    whole: Tensor | None

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.write_gradient(asked)


class AddGradient(OfParameter, frozen=True):
    """Add the mean of what workers have found without the tail."""

    cleared: tuple[bool, ...]
    gradient: Tensor

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.add_gradient(asked)


class OfOptimizer(TailMessage, frozen=True):
    """What is about one optimizer, of these groups."""

    optimizer: int
    cleared: tuple[bool, ...]
    groups: Groups

    @property
    def key(self) -> str:
        return f"{self.kind} of optimizer {self.optimizer}"


class TailNorm(OfOptimizer, frozen=True, tag="Norm"):
    """Give the norm of the gradients."""

    order: float

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.norm(asked)


class TailScale(OfOptimizer, frozen=True, tag="Scale"):
    """Multiply the gradients."""

    factor: Tensor

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.scale(asked)


class ReadTailState(OfOptimizer, frozen=True, tag="ReadState"):
    """Give the optimizer's state by name, in one-process form."""

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.read_state(asked)


class WriteTailState(OfOptimizer, frozen=True, tag="WriteState"):
    """Take this state by name, in one-process form; that of the first worker counts."""

    states: Data

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.write_state(asked)


class TailGradient(Message, frozen=True, tag="Gradient"):
    """The answer to ReadTailGradient."""

    whole: Tensor | None  # None: there is none


AnyTailMessage = (
    TailDone
    | Open
    | Forward
    | Output
    | TailLoss
    | Backward
    | TailStep
    | ReadTailValues
    | ReadTailGradient
    | ReadTailState
    | WriteTailValues
    | WriteTailGradient
    | WriteTailState
    | AddGradient
    | TailNorm
    | TailScale
)
