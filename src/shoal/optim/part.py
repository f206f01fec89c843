"""Part: those parameters of an optimizer that one of several has, and what a step does with them.

    whole    this rank has all of the parameter; the optimizer itself updates it      (whole.py)
    owned    ranks or servers own pieces of it, and update these on lanes             (owned.py)
    cut      every rank has a part of it, and the optimizer updates that              (cut.py)
    tail     hosts that run the end of the model have all of it                       (tail.py)
    table    servers have all rows of it                                              (table.py)

An optimizer has parts of each model that it trains. Its methods loop over them, in the same order
on every rank (extend.py). A parameter is in one part only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.pieces import local_gradient, set_local_gradient
from shoal.tensors.cut import SpreadCut, opened

States = dict[nn.Parameter, dict[str, Any]]  # by parameter, as in Optimizer.state


class Part(ABC):
    """Some of an optimizer's parameters, all in the same hands.

    Parameters are looked up at every call, since a group may be added at any time.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @abstractmethod
    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter belongs to this part."""

    @abstractmethod
    def open(self) -> None:
        """A step begins: see to the update of these parameters, before the optimizer's own code."""

    @abstractmethod
    def close(self) -> None:
        """The step has ended, or failed. May be called again, or without `open`."""

    @abstractmethod
    def norms(self, order: float) -> list[Tensor]:
        """Norms of the gradients, in float64 on the CPU, the same on every rank (a collective)."""

    @abstractmethod
    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients by a number (a collective)."""

    @abstractmethod
    def whole_state(self) -> States:
        """The state of these parameters in one-process form, on every rank (a collective)."""

    def kept_state(self, spread: Callable[[Tensor, SpreadCut], Any]) -> States:
        """The same, in which what ranks have parts of may be this rank's part, as `spread` has it.

        A collective, where there is anything else.
        """
        return self.whole_state()

    @abstractmethod
    def take_state(self) -> None:
        """Take over what `optimizer.state` has of these parameters in one-process form."""

    def state_bytes(self) -> int:
        """Bytes of state that this rank keeps outside of `optimizer.state`."""
        return 0

    def parameters(self) -> list[nn.Parameter]:
        """The optimizer's parameters that belong to this part."""
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if self.has(p)]

    def local_gradients(self) -> list[Tensor]:
        """What this rank itself has of the gradients."""
        gradients = map(local_gradient, self.parameters())
        return [gradient for gradient in gradients if gradient is not None]

    def mark(self, parameters: Iterable[Tensor]) -> None:
        """Give an entry in `optimizer.state` to parameters whose state is elsewhere.

        Without any entry, torch.distributed.checkpoint would make a step of its own.
        """
        for parameter in parameters:
            self.optimizer.state.setdefault(parameter, {})


@contextmanager
def hidden(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, cut parameters have no gradient, so that the optimizer leaves them alone."""
    gradients = {parameter: local_gradient(parameter) for parameter in parameters}
    for parameter in gradients:
        set_local_gradient(parameter, None)
    try:
        with opened(gradients):
            yield
    finally:
        for parameter, gradient in gradients.items():
            set_local_gradient(parameter, gradient)


@contextmanager
def shown(optimizer: Optimizer, states: Mapping[nn.Parameter, dict[str, Any]]) -> Iterator[None]:
    """Inside, `optimizer.state` has these states too."""
    before = {parameter: optimizer.state.get(parameter) for parameter in states}
    put(optimizer, states)
    try:
        yield
    finally:
        for parameter, state in before.items():
            optimizer.state.pop(parameter, None)
            if state is not None:
                optimizer.state[parameter] = state


def put(optimizer: Optimizer, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
    """Put states into `optimizer.state`, beside what the user has put there."""
    for parameter, state in states.items():
        both = {**(optimizer.state.pop(parameter, None) or {}), **state}
        if both:
            optimizer.state[parameter] = both
