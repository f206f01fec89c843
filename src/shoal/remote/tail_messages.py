"""What a worker says to its tail host (tail/stage.py), the same as every other worker.

    Open           what the end of the model is
    Forward        a micro-batch's activation
    Output         answered by what the tail has put out
    Loss           its arguments; answered by the loss
    Backward       this worker's weight       answered by activations' gradients, as they lie
    Step           the optimizer's settings
    Read…, Write…  …Values, …Gradient, …State
    AddGradient    one that was found without the tail
    Norm, Scale    of the gradients           Norm is answered
    End            there is nothing more

A tail host takes one message from each of its workers at a time, all of one type and `key`. A short
one takes 64 bytes beside its tensors. Guarded by tests/remote/test_tail_messages.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.remote.wire import Data, Message, Record


class Modes(Record, frozen=True):
    """What the model's code has set that the tail must be run with."""

    training: tuple[bool, ...]  # of every module of the tail, and of the loss
    trainable: tuple[bool, ...]  # of every parameter
    # of every module the plain attributes, if they have changed
    settings: tuple[Data | None, ...]


class Autocast(Record, frozen=True):
    """The type that operations are cast to."""

    enabled: bool
    dtype: torch.dtype


class Group(Record, frozen=True):
    """An optimizer's group: its settings, and names of those parameters that tail hosts have."""

    settings: Data
    parameters: tuple[str, ...]


Groups = tuple[Group, ...]


class TailRole(Protocol):
    """What a tail host does, when each of its workers has asked: by worker, what it has sent."""

    def forward(self, asked: Mapping[int, Forward]) -> None: ...
    def output(self, asked: Mapping[int, Output]) -> None: ...
    def loss(self, asked: Mapping[int, Loss]) -> None: ...
    def backward(self, asked: Mapping[int, Backward]) -> None: ...
    def step(self, asked: Mapping[int, Step]) -> None: ...
    def read_values(self, asked: Mapping[int, ReadValues]) -> None: ...
    def read_gradient(self, asked: Mapping[int, ReadGradient]) -> None: ...
    def read_state(self, asked: Mapping[int, ReadState]) -> None: ...
    def write_values(self, asked: Mapping[int, WriteValues]) -> None: ...
    def write_gradient(self, asked: Mapping[int, WriteGradient]) -> None: ...
    def write_state(self, asked: Mapping[int, WriteState]) -> None: ...
    def add_gradient(self, asked: Mapping[int, AddGradient]) -> None: ...
    def norm(self, asked: Mapping[int, Norm]) -> None: ...
    def scale(self, asked: Mapping[int, Scale]) -> None: ...


class TailMessage(Message, frozen=True):
    """What a worker wants of the tail."""

    @property
    def key(self) -> str:
        """Its name in errors; messages of one key belong together."""
        return type(self).__name__

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        """Have it done; `asked` is it, and what the other workers have sent for the same."""
        raise NotImplementedError


class End(TailMessage, frozen=True):
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
        return f"{type(self).__name__} of forward {self.run}"


class Output(OfRun, frozen=True):
    """Give what the tail has put out."""

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.output(asked)


class Loss(OfRun, frozen=True):
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


class StepSettings(Record, frozen=True):
    """How an optimizer is to make a step."""

    cleared: tuple[bool, ...]
    groups: Groups
    attributes: Data


class Step(TailMessage, frozen=True):
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
        return f"{type(self).__name__} of {self.name}"


class ReadValues(OfParameter, frozen=True):
    """Give a parameter."""

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.read_values(asked)


class ReadGradient(OfParameter, frozen=True):
    """Give a parameter's gradient."""

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.read_gradient(asked)


class WriteValues(OfParameter, frozen=True):
    """Take other values; None: those that another worker of this host gives."""

    whole: Tensor | None

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.write_values(asked)


class WriteGradient(OfParameter, frozen=True):
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
        return f"{type(self).__name__} of optimizer {self.optimizer}"


class Norm(OfOptimizer, frozen=True):
    """Give the norm of the gradients."""

    order: float

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.norm(asked)


class Scale(OfOptimizer, frozen=True):
    """Multiply the gradients."""

    factor: Tensor

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.scale(asked)


class ReadState(OfOptimizer, frozen=True):
    """Give the optimizer's state by name, in one-process form."""

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.read_state(asked)


class WriteState(OfOptimizer, frozen=True):
    """Take this state by name, in one-process form; that of the first worker counts."""

    states: Data

    def do(self, tail: TailRole, asked: Mapping[int, Any]) -> None:
        tail.write_state(asked)


class Gradient(Message, frozen=True):
    """The answer to ReadGradient."""

    whole: Tensor | None  # None: there is none


AnyTailMessage = (
    End
    | Open
    | Forward
    | Output
    | Loss
    | Backward
    | Step
    | ReadValues
    | ReadGradient
    | ReadState
    | WriteValues
    | WriteGradient
    | WriteState
    | AddGradient
    | Norm
    | Scale
)
