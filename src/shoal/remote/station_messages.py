"""Orders to hosts that hold stages of a pipeline and bring no rows.

    OpenStations        the rank of each layer, and how rows are cut into parts
    StationCall         a call of the model
    StationExpressions  functions of its output, for the host with the end
    StationBackward     go back through a call

One rank sends them to every such host, in the order in which all ranks that train do these things.
Orders about parameters and optimizers stand between them (tail_messages.py). Guarded by
tests/pipeline/test_holding.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.remote.tail_messages import AnyTailMessage, OfRun, TailMessage
from shoal.remote.wire import Data, MessagePart

AutocastKinds = tuple[tuple[str, bool, torch.dtype], ...]  # stands by kind of device
PartsForm = tuple[int, dict[str, tuple[bool, ...]]]  # parts, and which tensors of a call are cut
Shapes = tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...]  # forms of each rank's tensors


class OpenStations(TailMessage, frozen=True):
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


class StationCall(OfRun, frozen=True, tag="Call"):
    """Take part in a call of the model."""

    number: int  # stands for the arguments' forms
    arguments: Data | None  # the first rank's, if their forms are new
    shapes: Shapes
    numbers: tuple[int, ...]  # numbers of each rank's forms
    seed: int | None
    thread: ThreadSettings
    settings: ModuleSettings
    oldest: int  # the first call that a rank has still

    def do(self, tail: Any, asked: Mapping[int, Any]) -> None:
        tail.call(self)


class ToldResult(MessagePart, frozen=True):
    """A result that each rank is told."""

    expression: int  # its number; -1 is the output
    number: int
    is_number: bool
    grad: bool


class StationExpressions(OfRun, frozen=True, tag="Expressions"):
    """Compute functions of the output of a call, if the end is here."""

    first: int  # number of the first expression
    functions: tuple[str, ...]  # names in torch; "" is the loss
    threads: tuple[ThreadSettings, ...]
    arguments: Data  # arguments of each function, tensors left out
    shapes: Shapes
    told: tuple[ToldResult, ...]

    def do(self, tail: Any, asked: Mapping[int, Any]) -> None:
        tail.expressions(self)


class StationBackward(OfRun, frozen=True, tag="StationBackward"):
    """Go back through a call, from these results."""

    results: tuple[tuple[int, int], ...]
    cleared: dict[str, bool]  # whether a parameter has no gradient so far
    wanted: dict[str, bool]  # whether it gets one

    def do(self, tail: Any, asked: Mapping[int, Any]) -> None:
        tail.station_backward(self)


AnyStationOrder = AnyTailMessage | OpenStations | StationCall | StationExpressions | StationBackward
