"""A model whose end runs on hosts of its own: its parameters, as a worker sees them.

To all but the layers they look whole (tensors/cut.py), and whatever is done with them is done by
all workers together. What goes on in a step: stage_output.py. Guarded by
tests/equivalence/test_stage.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.weighing import UNWEIGHED, Weighing
from shoal.core.errors import UsageError
from shoal.core.names import pins
from shoal.core.pieces import local_gradient, set_local_gradient
from shoal.remote.tail_hosts import (
    TailHosts,
    has_hooks,
    modes,
    modules_of,
    parameters_of,
    plain_settings,
)
from shoal.remote.tail_messages import (
    AddGradient,
    Groups,
    Modes,
    ReadTailGradient,
    ReadTailState,
    ReadTailValues,
    StepSettings,
    TailGradient,
    TailNorm,
    TailScale,
    TailStep,
    WriteTailGradient,
    WriteTailState,
    WriteTailValues,
)
from shoal.remote.wire import Data
from shoal.tensors.crossing import EXACT, RowCrossing
from shoal.tensors.cut import Cut, CutParameter, cut_of, is_cut, part_of

_OVERWRITING = frozenset(("copy_", "fill_", "zero_"))  # which need no values that are there


@dataclass(frozen=True)
class TailFeed:
    """The way in which a worker feeds its batches to the tail."""

    micro_batches: int  # that a batch is cut into
    crossing: RowCrossing = EXACT  # of activations and their gradients
    # every rank calls the body as often as the others, however few rows it has
    alike: bool = False


@final
class FarTail:
    """The tail of one model, as its workers have it.

    Args:
        hosts: the way to them.
        model: all of it.
        modules: those that make the tail, in the order in which they are called, by dotted name.
        loss_fn: what goes with it.
        feed: how batches go there.
    """

    def __init__(
        self,
        hosts: TailHosts,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        loss_fn: Any,
        feed: TailFeed,
    ) -> None:
        self.hosts, self.model, self.modules, self.feed = hosts, model, modules, feed
        self.weighs: Weighing = UNWEIGHED  # this rank's rows, once an engine says it
        self.parameters = parameters_of(modules)
        self.names = {parameter: name for name, parameter in self.parameters.items()}
        self._modules = modules_of(modules.values(), loss_fn)
        self._settings = [plain_settings(module) for module in self._modules]
        self._runs = 0
        # that somebody has still
        self._alive: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.anchor = torch.zeros((), dtype=torch.float32, requires_grad=True, device="cpu")
        self.running: Any = None  # the forward that runs (stage_output.py)

    def begin(self, run: Any) -> tuple[int, Modes]:
        """A forward of the model begins: its number, and what is set."""
        for name, module in self.modules.items():
            hooked = next(
                (type(inner).__name__ for inner in module.modules() if has_hooks(inner)), None
            )
            if hooked is not None:
                raise UsageError(
                    f"a {hooked} has a hook, which would not be called, as it runs on tail hosts",
                    where=f"module {name}",
                    do=f"take it away, or give parallelize {pins(self.layers)}",
                )
        before, self._settings = (
            self._settings,
            [plain_settings(module) for module in self._modules],
        )
        changed = [
            None if old == new else new for old, new in zip(before, self._settings, strict=True)
        ]
        self._runs += 1
        self.running = run
        self._alive[run] = self._runs
        return self._runs, modes(self._modules, self.parameters.values(), changed)

    @property
    def layers(self) -> list[str]:
        """The layers whose parameters are at the tail."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.parameters))

    @property
    def oldest(self) -> int:
        """The number of the first run that somebody has still."""
        return min(self._alive.values(), default=self._runs)

    def entered(self) -> None:
        """A backward begins on every rank: gradients that were seen are not all any more."""
        for cut in self._cuts():
            cut.begin()

    def wanted(self) -> list[bool]:
        """Which parameters the running backward gives a gradient.

        From here on they have one, with the tail.
        """
        wanted = [p.requires_grad and _is_reached(p) for p in self.parameters.values()]
        for parameter, is_wanted in zip(self.parameters.values(), wanted, strict=True):
            if is_wanted:
                _mark(parameter)
        return wanted

    def cleared(self) -> tuple[bool, ...]:
        """Which parameters have no gradient. Those seen and changed are told of before."""
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
        self.hosts.channel.settle()

    def values(self, name: str) -> Tensor:
        """A parameter."""
        return self.hosts.ask(ReadTailValues(name), Tensor)

    def gradient(self, name: str) -> Tensor | None:
        """A parameter's gradient, if there is one."""
        return self.hosts.ask(ReadTailGradient(name), TailGradient).whole

    def write_values(self, name: str, whole: Tensor) -> None:
        """Give a parameter other values."""
        self.hosts.tell(WriteTailValues(name, whole if self.hosts.speaks else None))
        self.hosts.channel.settle()

    def write_gradient(self, name: str, whole: Tensor) -> None:
        """Give a parameter another gradient."""
        self.hosts.tell(WriteTailGradient(name, whole if self.hosts.speaks else None))
        self.hosts.channel.settle()

    def _cuts(self) -> list[AtTail]:
        return [
            at_tail
            for p in self.parameters.values()
            if is_cut(p) and isinstance(at_tail := cut_of(p), AtTail)
        ]


@final
class AtTail(Cut):
    """How a parameter is cut of which tail hosts have all, and this rank nothing.

    Its local gradient has no elements either; that there is one says that there is one at the tail.
    """

    def __init__(self, name: str, parameter: nn.Parameter, tail: FarTail) -> None:
        super().__init__(name, parameter, tail.hosts.comm)
        self._parameter, self.tail = parameter, tail
        self._key = tail.names[parameter]

    def part(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1)[:0]

    def whole(self, part: Tensor) -> Tensor:
        return self.tail.values(self._key)

    def mean(self, wholes: Tensor) -> Tensor:
        self.begin()
        self.tail.hosts.tell(AddGradient(self._key, self.tail.cleared(), wholes))
        # what comes next in this backward must not take it for one without a gradient
        _mark(self._parameter)
        return self.part(wholes)

    def change(
        self, function: Callable[..., Any], subject: Tensor, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        def whole(leaf: Any) -> Any:
            return cut_of(leaf).whole(part_of(leaf)) if isinstance(leaf, CutParameter) else leaf

        values = torch.empty(self.like.shape, dtype=self.like.dtype, device="cpu")
        if function.__name__ not in _OVERWRITING:
            values = self.whole(subject)
        args, kwargs = pytree.tree_map(whole, (tuple(args), dict(kwargs)))
        # as torch does, or refuses it
        function(values.requires_grad_(subject.requires_grad), *args, **kwargs)
        self.tail.write_values(self._key, values.detach())

    def gradient(self, parameter: Tensor, local: Tensor | None) -> Tensor | None:
        if local is None or (self._seen is not None and local is self._its_part):
            return None if local is None else self._seen
        whole = self.tail.gradient(self._key)
        if whole is not None:
            self._show(parameter, whole)
        return whole

    def assign(self, parameter: Tensor, whole: Tensor | None) -> None:
        super().assign(parameter, whole)
        self._version = -1  # the tail does not know it

    def tell(self) -> None:
        """Give the tail a gradient that somebody has seen and changed."""
        seen = self._seen
        if (
            seen is not None
            and local_gradient(self._parameter) is self._its_part
            and seen._version != self._version
        ):
            self.tail.write_gradient(self._key, seen)
            self._version = seen._version

    def begin(self) -> None:
        """A backward begins: what somebody saw of the gradient is not all of it any more."""
        self.tell()
        if self._seen is not None and local_gradient(self._parameter) is not None:
            _mark(self._parameter)
        self._seen = self._its_part = None


def _mark(parameter: nn.Parameter) -> None:
    """Note that there is a gradient, with the tail."""
    set_local_gradient(parameter, torch.empty(0, dtype=parameter.dtype, device="cpu"))


def _is_reached(parameter: nn.Parameter) -> bool:
    """Whether the running backward comes to a parameter."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    accumulator: Any = None if function is None else function.next_functions[0][0]
    return bool(torch._C._will_engine_execute_node(accumulator))
