"""Guide: tells hosts that hold layers and bring no rows of all that ranks with rows do.

    a call of the model     the forms of all ranks' inputs, and changes in the model
    functions of its output their names and arguments, for the host with the end
    backward                the results that it comes from, and parameters that get gradients

The first rank speaks for all: ranks compare their calls among themselves before. Each order is one
message to each such host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.state import OF_LOSS
from shoal.pipeline.calls import ModelCall, Shape
from shoal.pipeline.expressions import EndResult, Expression, ThreadModes
from shoal.pipeline.told_functions import (
    LOSS_NAME,
    Reference,
    as_data,
    name_of,
    settings_of,
    shapes_of,
)
from shoal.remote.far_parameters import FarParameters
from shoal.remote.holding_hosts import plain_settings
from shoal.remote.station_messages import (
    ModuleSettings,
    StationBackward,
    StationCall,
    StationExpressions,
    StationOrder,
    ToldResult,
)
from shoal.remote.wire import Data
from shoal.tensors.cut import is_cut

Telling = tuple[EndResult, bool, bool]  # a result; is it a number; may a gradient come back


@dataclass(frozen=True)
class ToldCall:
    """A call of the model as all ranks with rows have told one another.

    Args:
        shapes: the shapes and types of each rank's tensors.
        numbers: the number of the forms of each rank's arguments.
        seed: a seed of random numbers; None in evaluation.
    """

    shapes: Sequence[Sequence[Shape]]
    numbers: Sequence[int]
    seed: int | None


@final
class ChangedSettings:
    """Settings of modules and values of tensors that hosts have as well, as far as they change.

    Args:
        model: the model.
        loss_fn: the loss.
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._modules = dict(model.named_modules())
        if isinstance(loss_fn, nn.Module):
            self._modules |= {f"{OF_LOSS}{name}": m for name, m in loss_fn.named_modules()}
        self._model = model
        self._trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self.local: set[str] = set()  # names of buffers that each rank changes by itself
        self._training = {name: module.training for name, module in self._modules.items()}
        self._plain = {name: plain_settings(module) for name, module in self._modules.items()}
        self._grads = dict.fromkeys(self._trainable, True)
        self._seen: dict[str, tuple[int, int]] = {}
        self.see()

    def see(self) -> None:
        """Note that hosts have the present values of tensors."""
        self._see(self._tensors())

    def _see(self, tensors: Mapping[str, Tensor]) -> None:
        self._seen = {name: (id(t), t._version) for name, t in tensors.items()}

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self._model.named_buffers())
        found |= {name: p for name, p in self._frozen.items() if not is_cut(p)}
        return {name: tensor for name, tensor in found.items() if name not in self.local}

    def take(self) -> ModuleSettings:
        """Return all that has changed since the last time."""
        training = {n: m.training for n, m in self._modules.items()}
        plain = {name: plain_settings(module) for name, module in self._modules.items()}
        grads = {name: p.requires_grad for name, p in self._trainable.items()}
        tensors = self._tensors()
        changed = ModuleSettings(
            {n: is_on for n, is_on in training.items() if is_on != self._training[n]},
            {n: Data(values) for n, values in plain.items() if values != self._plain[n]},
            {n: is_on for n, is_on in grads.items() if is_on != self._grads[n]},
            {
                name: tensor.detach().clone()
                for name, tensor in tensors.items()
                if self._seen.get(name) != (id(tensor), tensor._version)
            },
        )
        self._training, self._plain, self._grads = training, plain, grads
        self._see(tensors)
        return changed


@final
@dataclass
class Guide:
    """Tells hosts that bring no rows of the ranks' calls of a model.

    Args:
        trainers: the ranks that bring rows.
        tell: sends a message to all of these hosts; None on other ranks than the first.
        far: the parameters of each host.
        changed: settings that have changed.
    """

    trainers: Comm
    tell: Callable[[StationOrder], None] | None
    far: Sequence[FarParameters]
    changed: ChangedSettings
    _known: set[int] = field(default_factory=set)
    _calls: int = 0
    _alive: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)

    @property
    def by_name(self) -> dict[str, FarParameters]:
        """The host of each parameter that these hosts have, by name."""
        return {name: far for far in self.far for name in far.parameters}

    def called(self, run: Any, call: ModelCall, told: ToldCall) -> None:
        """Tell of a call of the model, which `run` is."""
        self._calls += 1
        self._alive[run] = self._calls
        if self.tell is None:
            return
        # batch 1: the first rank speaks for all
        settings = self.changed.take()
        number, arguments = told.numbers[0], None
        if number not in self._known:
            self._known.add(number)
            arguments = Data(call.with_tensors([t.detach() for t in call.tensors]))
        self.tell(
            StationCall(
                self._calls,
                number,
                arguments,
                shapes_of(told.shapes),
                tuple(told.numbers),
                told.seed,
                settings_of(ThreadModes.now()),
                settings,
                min(self._alive.values()),
            )
        )

    def computes(
        self,
        run: Any,
        order: Mapping[Expression, int],
        call: ModelCall,
        shapes: Sequence[Sequence[Shape]],
        telling: Sequence[Telling],
    ) -> None:
        """Tell of functions of a call's output that are computed now.

        Args:
            run: the call.
            order: the functions in their order, and the number that each gets.
            call: their arguments.
            shapes: the shapes and types of each rank's tensors.
            telling: the results that ranks are told.
        """
        if self.tell is None:
            return
        number = self._alive[run]

        def reference(result: EndResult) -> Reference:
            return number, *place(result, order)

        (arguments, constants), _ = call.with_tensors(call.tensors)
        self.tell(
            StationExpressions(
                number,
                min(order.values(), default=0),
                tuple(map(_name, order)),
                tuple(settings_of(each.modes) for each in order),
                Data(as_data((arguments, constants), reference)),
                shapes_of(shapes),
                tuple(
                    ToldResult(*place(r, order), is_number, grad) for r, is_number, grad in telling
                ),
            )
        )

    def goes_back(self, run: Any, results: Sequence[tuple[int, int]]) -> None:
        """Tell of a backward through a call, from these results."""
        cleared: dict[str, bool] = {}
        wanted: dict[str, bool] = {}
        for far in self.far:
            cleared |= dict(zip(far.parameters, far.cleared(), strict=True))
        for far in self.far:
            wanted |= dict(zip(far.parameters, far.wanted(), strict=True))
        if self.tell is not None:
            self.tell(StationBackward(self._alive[run], tuple(results), cleared, wanted))


def place(result: EndResult, order: Mapping[Expression, int] | None = None) -> tuple[int, int]:
    """Return the number of a result's expression, -1 for the output, and its own number.

    Args:
        result: the result.
        order: numbers that expressions are about to get.
    """
    number = (order or {}).get(result.expression, result.expression.number)
    return -1 if number is None else number, result.number


def _name(expression: Expression) -> str:
    if expression.is_loss or expression.function is None:
        return LOSS_NAME
    return name_of(expression.function) or LOSS_NAME
