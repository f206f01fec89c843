"""Parameters that other hosts have whole, as the ranks that train see them.

To all but the layers they look whole (tensors/cut.py). All of these ranks together do a thing with
them. The first rank speaks for all: ranks compare their orders before, so that each takes the
answer to its own. Guarded by tests/pipeline/test_holding.py and tests/equivalence/test_stage.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import Weighing
from shoal.core.pieces import local_gradient, no_elements, set_local_gradient
from shoal.remote.far_cut import FarCut
from shoal.remote.holding_hosts import HoldingHosts
from shoal.remote.station_messages import Groups, HeldOrder
from shoal.remote.verbs import Aspect, MakeStep, Norm, Push, Read, ScaleBy, Write
from shoal.remote.wire import Data
from shoal.tensors.cut import cut_of, is_cut

T = TypeVar("T")


@final
class HolderWay:
    """The way of the ranks that train to one host that holds layers and brings no rows.

    Args:
        hosts: the ways to all of these hosts.
        number: the host's number among them.
        trainers: the ranks that train.
    """

    def __init__(self, hosts: HoldingHosts, number: int, trainers: Comm) -> None:
        self.comm, self.trainers = hosts.orders, trainers
        self._hosts, self._number = hosts, number

    def tell(self, order: HeldOrder) -> None:
        """Send an order. All ranks that train call this."""
        if isinstance(order.verb, MakeStep):
            self._meet(order)
        if not self.trainers.rank:
            self._hosts.way(self._number).post(order)

    def ask(self, order: HeldOrder, kind: type[T]) -> T:
        """Send an order, and wait for the answer."""
        self._meet(order)
        way = self._hosts.way(self._number)
        if not self.trainers.rank:
            way.post(order)
        return way.answer(kind)

    def settle(self) -> None:
        """Wait until all orders have gone."""
        self._hosts.way(self._number).settle()

    def _meet(self, order: HeldOrder) -> None:
        self.trainers.numbers([0] * self.trainers.size, f"order to other hosts: {order.key}")


@final
class FarParameters:
    """Parameters that one host has.

    Args:
        way: the way to it.
        parameters: the parameters by dotted name, each once.
    """

    def __init__(self, way: HolderWay, parameters: Mapping[str, nn.Parameter]) -> None:
        self.way = way
        self.parameters = dict(parameters)
        self.names = {parameter: name for name, parameter in self.parameters.items()}

    def entered(self) -> None:
        """Note that a backward begins on every rank: gradients seen before are not complete."""
        for cut in self._cuts():
            cut.begin()

    def wanted(self) -> list[bool]:
        """Return which parameters the running backward gives a gradient.

        From here on they have one, at the host.
        """
        wanted = [p.requires_grad and _is_reached(p) for p in self.parameters.values()]
        for parameter, is_wanted in zip(self.parameters.values(), wanted, strict=True):
            if is_wanted:
                _mark(parameter)
        return wanted

    def cleared(self) -> tuple[bool, ...]:
        """Return which parameters have no gradient. The host first gets gradients that changed."""
        for cut in self._cuts():
            cut.tell()
        return tuple(local_gradient(parameter) is None for parameter in self.parameters.values())

    def step(self, number: int, groups: Groups, attributes: Mapping[str, Any]) -> None:
        """Let optimizer `number` make a step by these groups and attributes."""
        verb = MakeStep(number, Data(None), Data(dict(attributes)), {})
        self.way.tell(self._of_optimizer(verb, number, groups))

    def norm(self, number: int, groups: Groups, order: float) -> Tensor:
        """Return the norm of the gradients of optimizer `number`."""
        return self.way.ask(self._of_optimizer(Norm((), order), number, groups), Tensor)

    def scale(self, number: int, groups: Groups, factor: Tensor) -> None:
        """Multiply the gradients of optimizer `number`."""
        self.way.tell(self._of_optimizer(ScaleBy((), factor), number, groups))

    def state(self, number: int, groups: Groups) -> dict[str, Any]:
        """Return the state of optimizer `number` by name, in one-process form."""
        order = self._of_optimizer(Read(Aspect.STATE, number), number, groups)
        states: dict[str, Any] = self.way.ask(order, Data).value
        return states

    def take_state(self, number: int, groups: Groups, states: Mapping[str, Any]) -> None:
        """Give optimizer `number` this state by name, in one-process form."""
        verb = Write(Aspect.STATE, Data(dict(states)), number)
        self.way.tell(self._of_optimizer(verb, number, groups))
        self.way.settle()

    def _of_optimizer(self, verb: Any, number: int, groups: Groups) -> HeldOrder:
        return HeldOrder(verb, "", number, self.cleared(), groups)

    def values(self, name: str) -> Tensor:
        """Return a parameter."""
        whole: Tensor = self.way.ask(HeldOrder(Read(Aspect.VALUES), name), Data).value
        return whole

    def gradient(self, name: str) -> Tensor | None:
        """Return a parameter's gradient, if there is one."""
        whole: Tensor | None = self.way.ask(HeldOrder(Read(Aspect.GRADIENT), name), Data).value
        return whole

    def write_values(self, name: str, whole: Tensor) -> None:
        """Give a parameter other values."""
        self.way.tell(HeldOrder(Write(Aspect.VALUES, Data(whole)), name))
        self.way.settle()

    def write_gradient(self, name: str, whole: Tensor) -> None:
        """Give a parameter another gradient."""
        self.way.tell(HeldOrder(Write(Aspect.GRADIENT, Data(whole)), name))
        self.way.settle()

    def add_gradient(self, name: str, own: Tensor) -> None:
        """Add the mean of all ranks' gradients that did not come from a call of the model."""
        mean, trainers = own.detach().clone().contiguous(), self.way.trainers
        trainers.numbers([mean.numel()] * trainers.size, f"penalty on {name}")
        trainers.all_reduce(mean)
        verb = Push(None, mean.div_(trainers.size))
        self.way.tell(HeldOrder(verb, name, cleared=self.cleared()))

    def _cuts(self) -> list[AtHost]:
        return [
            at_host
            for p in self.parameters.values()
            if is_cut(p) and isinstance(at_host := cut_of(p), AtHost)
        ]


@final
class AtHost(FarCut):
    """The cut of a parameter of which other hosts have all, and this rank nothing.

    Its local gradient has no elements either. If there is one, the host has one.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, far: FarParameters, weighs: Weighing
    ) -> None:
        super().__init__(name, parameter, far.way.comm, weighs)
        self.far, self._key = far, far.names[parameter]

    def part(self, whole: Tensor) -> Tensor:
        return no_elements(whole)

    def whole(self, part: Tensor) -> Tensor:
        return self.far.values(self._key)

    def write_values(self, whole: Tensor) -> None:
        self.far.write_values(self._key, whole)

    def write_gradient(self, whole: Tensor) -> None:
        self.far.write_gradient(self._key, whole)

    def mean(self, wholes: Tensor) -> Tensor:
        self.begin()
        self.far.add_gradient(self._key, wholes)
        self._mark()  # later parts of this backward must not take it for one without a gradient
        return self.part(wholes)

    def gradient(self, parameter: Tensor, local: Tensor | None) -> Tensor | None:
        if local is None or (self._seen is not None and local is self._its_part):
            return None if local is None else self._seen
        whole = self.far.gradient(self._key)
        if whole is not None:
            self._show(parameter, whole)
        return whole


def _mark(parameter: nn.Parameter) -> None:
    """Note that there is a gradient, at the host."""
    set_local_gradient(parameter, torch.empty(0, dtype=parameter.dtype, device="cpu"))


def _is_reached(parameter: nn.Parameter) -> bool:
    """Return whether the running backward comes to a parameter."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    accumulator: Any = None if function is None else function.next_functions[0][0]
    return bool(torch._C._will_engine_execute_node(accumulator))
