"""Parameters that other hosts have whole, as the ranks that train see them.

To all but the layers they look whole (tensors/cut.py). Whatever is done with them is done by all of
these ranks together. Guarded by tests/equivalence/test_stage.py and tests/pipeline/test_holding.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.core.pieces import local_gradient, no_elements, set_local_gradient
from shoal.remote.far_cut import FarCut
from shoal.remote.tail_messages import (
    AddGradient,
    Groups,
    ReadTailGradient,
    ReadTailState,
    ReadTailValues,
    StepSettings,
    TailGradient,
    TailMessage,
    TailNorm,
    TailScale,
    TailStep,
    WriteTailGradient,
    WriteTailState,
    WriteTailValues,
)
from shoal.remote.wire import Data
from shoal.tensors.cut import cut_of, is_cut

T = TypeVar("T")


class WayThere(Protocol):
    """The way to the hosts that have some parameters."""

    comm: Comm

    @property
    def speaks(self) -> bool:
        """Whether this rank's settings and values count."""

    def tell(self, message: TailMessage) -> None:
        """Send a message. All ranks that train call this."""

    def ask(self, message: TailMessage, kind: type[T]) -> T:
        """Send it, and wait for the answer."""

    def settle(self) -> None:
        """Wait until all that was told has gone."""


class FarParameters:
    """Parameters that other hosts have.

    Args:
        hosts: the way to them.
        parameters: the parameters by dotted name, each once.
    """

    def __init__(self, hosts: WayThere, parameters: Mapping[str, nn.Parameter]) -> None:
        self.hosts: WayThere = hosts
        self.parameters = dict(parameters)
        self.names = {parameter: name for name, parameter in self.parameters.items()}

    def entered(self) -> None:
        """A backward begins on every rank: gradients that were seen are not all any more."""
        for cut in self._cuts():
            cut.begin()

    def wanted(self) -> list[bool]:
        """Return which parameters the running backward gives a gradient.

        From here on they have one, with the tail.
        """
        wanted = [p.requires_grad and _is_reached(p) for p in self.parameters.values()]
        for parameter, is_wanted in zip(self.parameters.values(), wanted, strict=True):
            if is_wanted:
                _mark(parameter)
        return wanted

    def cleared(self) -> tuple[bool, ...]:
        """Return which parameters have no gradient. Those seen and changed are told of before."""
        for cut in self._cuts():
            cut.tell()
        return tuple(local_gradient(parameter) is None for parameter in self.parameters.values())

    def step(self, number: int, groups: Groups, attributes: Mapping[str, Any]) -> None:
        """Have optimizer `number` make a step by these groups and attributes."""
        settings = StepSettings(self.cleared(), groups, Data(dict(attributes)))
        self.hosts.tell(TailStep(number, settings if self.hosts.speaks else None))

    def norm(self, number: int, groups: Groups, order: float) -> Tensor:
        """The norm of the gradients of optimizer `number`."""
        return self.hosts.ask(TailNorm(number, self.cleared(), groups, order), Tensor)

    def scale(self, number: int, groups: Groups, factor: Tensor) -> None:
        """Multiply the gradients of optimizer `number`."""
        self.hosts.tell(TailScale(number, self.cleared(), groups, factor))

    def state(self, number: int, groups: Groups) -> dict[str, Any]:
        """The state of optimizer `number` by name, in one-process form."""
        answer = self.hosts.ask(ReadTailState(number, self.cleared(), groups), Data)
        states: dict[str, Any] = answer.value
        return states

    def take_state(self, number: int, groups: Groups, states: Mapping[str, Any]) -> None:
        """Give optimizer `number` this state by name, in one-process form."""
        told = dict(states) if self.hosts.speaks else {}
        self.hosts.tell(WriteTailState(number, self.cleared(), groups, Data(told)))
        self.hosts.settle()

    def values(self, name: str) -> Tensor:
        """A parameter."""
        return self.hosts.ask(ReadTailValues(name), Tensor)

    def gradient(self, name: str) -> Tensor | None:
        """A parameter's gradient, if there is one."""
        return self.hosts.ask(ReadTailGradient(name), TailGradient).whole

    def write_values(self, name: str, whole: Tensor) -> None:
        """Give a parameter other values."""
        self.hosts.tell(WriteTailValues(name, whole if self.hosts.speaks else None))
        self.hosts.settle()

    def write_gradient(self, name: str, whole: Tensor) -> None:
        """Give a parameter another gradient."""
        self.hosts.tell(WriteTailGradient(name, whole if self.hosts.speaks else None))
        self.hosts.settle()

    def _cuts(self) -> list[AtTail]:
        return [
            at_tail
            for p in self.parameters.values()
            if is_cut(p) and isinstance(at_tail := cut_of(p), AtTail)
        ]

    def add_gradient(self, name: str, own: Tensor) -> None:
        """Add the mean of all ranks' gradients that were found without the hosts."""
        self.hosts.tell(AddGradient(name, self.cleared(), own))


@final
class AtTail(FarCut):
    """The cut of a parameter of which other hosts have all, and this rank nothing.

    Its local gradient has no elements either; that there is one says that there is one at the tail.
    """

    def __init__(self, name: str, parameter: nn.Parameter, tail: FarParameters) -> None:
        super().__init__(name, parameter, tail.hosts.comm)
        self.tail = tail
        self._key = tail.names[parameter]

    def part(self, whole: Tensor) -> Tensor:
        return no_elements(whole)

    def whole(self, part: Tensor) -> Tensor:
        return self.tail.values(self._key)

    def mean(self, wholes: Tensor) -> Tensor:
        self.begin()
        self.tail.add_gradient(self._key, wholes)
        # later parts of this backward must not take it for one without a gradient
        self._mark()
        return self.part(wholes)

    def write_values(self, whole: Tensor) -> None:
        self.tail.write_values(self._key, whole)

    def write_gradient(self, whole: Tensor) -> None:
        self.tail.write_gradient(self._key, whole)

    def gradient(self, parameter: Tensor, local: Tensor | None) -> Tensor | None:
        if local is None or (self._seen is not None and local is self._its_part):
            return None if local is None else self._seen
        whole = self.tail.gradient(self._key)
        if whole is not None:
            self._show(parameter, whole)
        return whole


def _mark(parameter: nn.Parameter) -> None:
    """Note that there is a gradient, with the tail."""
    set_local_gradient(parameter, torch.empty(0, dtype=parameter.dtype, device="cpu"))


def _is_reached(parameter: nn.Parameter) -> bool:
    """Whether the running backward comes to a parameter."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    accumulator: Any = None if function is None else function.next_functions[0][0]
    return bool(torch._C._will_engine_execute_node(accumulator))
