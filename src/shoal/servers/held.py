"""Parameters that this host has for the ranks that train, and the optimizers that update them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, assert_never, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.core.pieces import no_elements
from shoal.remote.channel import Channel
from shoal.remote.station_messages import Groups, HeldOrder
from shoal.remote.verbs import (
    Aspect,
    MakeStep,
    Norm,
    Pull,
    Push,
    Read,
    ScaleBy,
    Sum,
    Write,
    unasked,
)
from shoal.remote.wire import Data
from shoal.tensors.cut import Cut


@final
class HeldParameters:
    """Parameters on this host, which ranks read, write and have updated.

    Args:
        parameters: the parameters by dotted name.
        optimizers: the optimizers that update them.
        channels: the ways of answers to the ranks that train.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        channels: Sequence[Channel[Any]],
    ) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self._channels = channels

    def clear(self, cleared: Sequence[bool]) -> None:
        """Drop gradients of parameters that have none with the ranks that train."""
        for parameter, none in zip(self._parameters.values(), cleared, strict=True):
            if none:
                parameter.grad = None

    @torch.no_grad()
    def obey(self, order: HeldOrder) -> None:
        """Obey an order; the answer goes to all ranks that train."""
        verb = order.verb
        if not order.name:
            self.clear(order.cleared)
            self._regroup(order.optimizer, order.groups)
        match verb:
            case MakeStep():
                self._step(order.optimizer, verb)
            case Read():
                self._answer(Data(self._read(order, verb)))
            case Write():
                self._write(order, verb)
            case Norm(_, order_of_norm):
                optimizer: Any = self._optimizers[order.optimizer]  # extended
                self._answer(optimizer.clip_grad_norm_(math.inf, order_of_norm))
            case ScaleBy(_, factor):
                self._scale(order.optimizer, factor)
            case Push(None, gradient):
                self.clear(order.cleared)
                parameter = self._parameters[order.name]
                before = parameter.grad
                parameter.grad = gradient if before is None else before + gradient
            case Push() | Pull() | Sum():
                raise unasked(verb)
            case _:
                assert_never(verb)

    def _answer(self, content: Any) -> None:
        for channel in self._channels:
            channel.post(content)

    @torch.enable_grad()
    def _step(self, number: int, verb: MakeStep) -> None:
        optimizer = self._optimizers[number]
        for name in ("grad_scale", "found_inf"):  # a scaler's, for one step
            vars(optimizer).pop(name, None)
        vars(optimizer).update(verb.attributes.value)
        optimizer.step()

    def _regroup(self, number: int, groups: Groups) -> None:
        self._optimizers[number].param_groups[:] = [
            {
                **group.settings.value,
                "params": [self._parameters[name] for name in group.parameters],
            }
            for group in groups
        ]

    def _read(self, order: HeldOrder, verb: Read) -> Any:
        match verb.aspect:
            case Aspect.VALUES:
                return self._parameters[order.name].detach().clone()
            case Aspect.GRADIENT:
                gradient = self._parameters[order.name].grad
                return None if gradient is None else gradient.detach().clone()
            case Aspect.STATE:  # states by name, in one-process form
                state = self._optimizers[order.optimizer].state_dict()["state"]
                names = enumerate(self._held(order.optimizer))
                return {name: state[place] for place, name in names if place in state}
        raise unasked(verb)

    def _write(self, order: HeldOrder, verb: Write) -> None:
        match verb.aspect:
            case Aspect.VALUES:
                self._parameters[order.name].copy_(verb.holds(Tensor))
            case Aspect.GRADIENT:
                self._parameters[order.name].grad = verb.holds(Tensor)
            case Aspect.STATE:
                self._write_state(order.optimizer, verb.holds(dict))
            case _:
                raise unasked(verb)

    def _write_state(self, number: int, states: Mapping[str, Any]) -> None:
        optimizer = self._optimizers[number]
        whole = optimizer.state_dict()
        for place, name in enumerate(self._held(number)):
            whole["state"].pop(place, None)
            if states.get(name):
                whole["state"][place] = states[name]
        optimizer.load_state_dict(whole)

    def _scale(self, number: int, factor: Tensor) -> None:
        for group in self._optimizers[number].param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    gradient.mul_(factor.to(gradient.dtype))

    def _held(self, number: int) -> list[str]:
        """Return the names of an optimizer's parameters, in their order."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        return [
            names[p] for group in self._optimizers[number].param_groups for p in group["params"]
        ]


def leave(optimizers: Sequence[Optimizer], kept: Set[nn.Parameter]) -> None:
    """Leave optimizers these parameters alone, and their state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in kept]
        for parameter in [p for p in optimizer.state if p not in kept]:
            del optimizer.state[parameter]


@final
class Nowhere(Cut):
    """A parameter of which this host has no element, and gets none."""

    def part(self, whole: Tensor) -> Tensor:
        return no_elements(whole)

    def whole(self, part: Tensor) -> Tensor:
        raise self._refused()

    def mean(self, wholes: Tensor) -> Tensor:
        raise self._refused()

    def change(
        self, function: Callable[..., Any], subject: Tensor, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        raise self._refused()

    def gradient(self, parameter: Tensor, local: Tensor | None) -> Tensor | None:
        return local

    def _refused(self) -> UsageError:
        return UsageError(
            "a host that brings no rows uses a parameter that it does not hold",
            where=f"parameter {self.name}",
            do="give the layers that use it to one rank",
        )
