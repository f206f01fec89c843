"""Parameters that this host has for the ranks that train, and the optimizers that update them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError
from shoal.remote.tail_messages import (
    AddGradient,
    Groups,
    OfOptimizer,
    ReadTailGradient,
    ReadTailState,
    ReadTailValues,
    TailGradient,
    TailNorm,
    TailScale,
    TailStep,
    WriteTailGradient,
    WriteTailState,
    WriteTailValues,
)
from shoal.remote.wire import Data
from shoal.tensors.cut import Cut

About = TypeVar("About", bound=OfOptimizer)


class HeldParameters(ABC):
    """Parameters on this host, which ranks read, write and have updated.

    Args:
        among: the hosts that share them.
        workers: the ranks that speak to this host.
        all_workers: number of ranks that train.
        parameters: the parameters by dotted name.
        optimizers: the optimizers that update them.
    """

    def __init__(
        self,
        among: Comm,
        workers: Sequence[int],
        all_workers: int,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._among, self._workers, self._all_workers = among, workers, all_workers
        self._parameters, self._optimizers = parameters, optimizers

    @abstractmethod
    def _answer_all(self, content: Any) -> None:
        """Answer all ranks that speak to this host."""

    def _clear(self, cleared: Sequence[bool]) -> None:
        for parameter, none in zip(self._parameters.values(), cleared, strict=True):
            if none:
                parameter.grad = None

    def step(self, asked: Mapping[int, TailStep]) -> None:
        first = asked[self._workers[0]]
        assert first.settings is not None  # it speaks for all
        self._clear(first.settings.cleared)
        optimizer = self._optimizers[first.optimizer]
        for name in ("grad_scale", "found_inf"):  # a scaler's, for one step
            vars(optimizer).pop(name, None)
        vars(optimizer).update(first.settings.attributes.value)
        self._regroup(first.optimizer, first.settings.groups)
        optimizer.step()

    def _regroup(self, number: int, groups: Groups) -> None:
        self._optimizers[number].param_groups[:] = [
            {
                **group.settings.value,
                "params": [self._parameters[name] for name in group.parameters],
            }
            for group in groups
        ]

    def read_values(self, asked: Mapping[int, ReadTailValues]) -> None:
        parameter = self._parameters[asked[self._workers[0]].name]
        self._answer_all(parameter.detach().clone())  # of all tail hosts together

    def read_gradient(self, asked: Mapping[int, ReadTailGradient]) -> None:
        gradient = self._parameters[asked[self._workers[0]].name].grad
        self._answer_all(TailGradient(None if gradient is None else gradient.detach().clone()))

    @torch.no_grad()
    def write_values(self, asked: Mapping[int, WriteTailValues]) -> None:
        first = asked[self._workers[0]]
        assert first.whole is not None  # it speaks for all
        self._parameters[first.name].copy_(first.whole)

    def write_gradient(self, asked: Mapping[int, WriteTailGradient]) -> None:
        first = asked[self._workers[0]]
        self._parameters[first.name].grad = first.whole

    @torch.no_grad()
    def add_gradient(self, asked: Mapping[int, AddGradient]) -> None:
        """A gradient that workers have found without the tail: the mean of all of theirs."""
        first = asked[self._workers[0]]
        self._clear(first.cleared)
        gradients = torch.stack([message.gradient for message in asked.values()])
        mean = gradients.sum(0) / self._all_workers
        if self._among.size > 1:
            self._among.all_reduce(mean)
        parameter = self._parameters[first.name]
        before = parameter.grad
        parameter.grad = mean if before is None else before + mean

    def norm(self, asked: Mapping[int, TailNorm]) -> None:
        first = self._prepare(asked)
        optimizer: Any = self._optimizers[first.optimizer]  # which has been extended
        self._answer_all(optimizer.clip_grad_norm_(math.inf, first.order))

    @torch.no_grad()
    def scale(self, asked: Mapping[int, TailScale]) -> None:
        first = self._prepare(asked)
        for group in self._optimizers[first.optimizer].param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    gradient.mul_(first.factor.to(gradient.dtype))

    def read_state(self, asked: Mapping[int, ReadTailState]) -> None:
        """Answer with the state of every parameter, in one-process form."""
        number = self._prepare(asked).optimizer
        state = self._optimizers[number].state_dict()["state"]
        names = enumerate(self._held(number))
        self._answer_all(Data({name: state[place] for place, name in names if place in state}))

    def write_state(self, asked: Mapping[int, WriteTailState]) -> None:
        first = self._prepare(asked)
        optimizer, states = self._optimizers[first.optimizer], first.states.value
        whole = optimizer.state_dict()
        for place, name in enumerate(self._held(first.optimizer)):
            whole["state"].pop(place, None)
            if states.get(name):
                whole["state"][place] = states[name]
        optimizer.load_state_dict(whole)

    def _prepare(self, asked: Mapping[int, About]) -> About:
        """Return the first worker's message about an optimizer, and take its groups."""
        first = asked[self._workers[0]]
        self._clear(first.cleared)
        self._regroup(first.optimizer, first.groups)
        return first

    def _held(self, number: int) -> list[str]:
        """Names of an optimizer's parameters, in their order."""
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
        return whole.reshape(-1)[:0]

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
