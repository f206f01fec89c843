"""A replay: the model's own forward for one micro-batch, as far as one station computes it.

    before the station    layers elsewhere are stood in for; functions on absent tensors give forms
    its first call        the values that cross the cut arrive
    the station           runs as it is written
    behind its last call  the values that cross the next cut leave; the rest of forward does not run

The rank that holds the station's layers replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import UsageError
from shoal.core.random_state import undrawn
from shoal.pipeline.absent_tensors import Absent, Forms, Undecided, is_empty, present
from shoal.pipeline.record import (
    Alias,
    ForwardRecord,
    Returned,
    returned,
    signature,
    undecided,
)
from shoal.pipeline.trees import leaves_in, tensors_in
from shoal.pipeline.unhooked_modules import without_hooks
from shoal.pipeline.walk import END, Name, Position, Walk
from shoal.tensors.cut import is_cut, opened

FIRST: Position = ()  # before all events
LAST: Position = (END,)  # the end, behind all events


class Departed(BaseException):
    """A station has computed its part. The rest of forward is elsewhere.

    No Exception, which a model's forward might catch.
    """


@dataclass(frozen=True)
class StationSpan:
    """The events of a station: from one cut to before the next.

    Args:
        begin: the position before which its values arrive.
        end: the position before which its results leave.
        arriving: names of the values that arrive, in order.
        leaving: names of the values that leave, in order.
    """

    begin: Position
    end: Position
    arriving: tuple[Name, ...] = ()
    leaving: tuple[Name, ...] = ()

    def is_split_by(self, position: Position) -> bool:
        """Return whether the span begins or ends inside of the call at a position."""
        return any(
            len(cut) > len(position) and cut[: len(position)] == position
            for cut in (self.begin, self.end)
        )


def spans(record: ForwardRecord, cuts: Sequence[Position]) -> list[StationSpan]:
    """Return the stations' spans between cuts."""
    bounds = [FIRST, *cuts, LAST]
    live = [(), *(tuple(record.live(cut)) for cut in cuts), ()]
    return [
        StationSpan(bounds[i], bounds[i + 1], live[i], live[i + 1]) for i in range(len(bounds) - 1)
    ]


Arrive = Callable[[Sequence[Absent]], Sequence[Tensor]]


@dataclass(frozen=True)
class Modules:
    """The modules of a model.

    Args:
        names: their dotted names.
        parameters: returns all parameters of a module.
    """

    names: Mapping[nn.Module, str]
    parameters: Callable[[nn.Module], Sequence[nn.Parameter]]

    @classmethod
    def of(cls, model: nn.Module) -> Modules:
        """Take a model's modules."""
        known = {module: list(module.parameters()) for module in model.modules()}
        names = {module: name for name, module in model.named_modules()}

        def parameters(module: nn.Module) -> Sequence[nn.Parameter]:
            # a forward may make a module, such as a loss
            return known[module] if module in known else list(module.parameters())

        return cls(names, parameters)


@final
class Replay(Walk):
    """Replays a forward for one station.

    Args:
        record: the forward on the sample.
        span: the station's events; None to compute forms only.
        forms: computes forms.
        modules: the model's modules.
        arrive: returns the values that have arrived, for these absent tensors.
    """

    def __init__(
        self,
        record: ForwardRecord,
        span: StationSpan | None,
        forms: Forms,
        modules: Modules,
        arrive: Arrive,
    ) -> None:
        super().__init__()
        self._record, self._forms, self._modules = record, forms, modules.names
        self._parameters = modules.parameters
        self._span = span or StationSpan(LAST, LAST)
        self._arrive = arrive
        self._is_here = self._span.begin == FIRST
        self._needed = {*self._span.arriving, *self._span.leaving}
        # calls that leave values behind otherwise than by returning them (self.aux = …)
        self._entered = {made[:depth] for made, _ in self._needed for depth in range(1, len(made))}
        self._kept: dict[Name, Any] = {}

    def check_ended(self) -> None:
        """Raise UsageError if forward has ended, and the station has not begun or not ended."""
        missed = self._span.end if self._is_here else self._span.begin
        if missed != LAST:
            event = self._record.calls.get(missed) or self._record.functions.get(missed)
            raise other_way("the end of forward", expected=f"a call of {event}")

    def leaving(self) -> list[Tensor]:
        """Return the values that leave."""
        return [present(each) for each in self._crossing(self._span.leaving)]

    def _crossing(self, names: Sequence[Name]) -> list[Any]:
        """Return the tensors of these names, which cross a cut."""
        for position, number in names:
            if (position, number) not in self._kept:
                frame = self._record.calls.get(position[:-1]) or "the model itself"
                maker = self._record.calls.get(position) or self._record.functions.get(position)
                raise other_way(
                    f"the forward of {frame}",
                    expected=f"a result of {maker}, which the next rank needs",
                )
        return [self._kept[name] for name in names]

    def function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        position = self.here
        self._reach(position)
        if self._is_here:
            output = self._compute(function, args, kwargs)
        elif not self._can_compute(position, args, kwargs):
            output = self._form(function, args, kwargs)
        else:
            args, kwargs = present((args, kwargs))
            output = function(*args, **kwargs)
        if made := tensors_in(output):
            self.passed()
            self._keep(position, made)
        return output

    def module(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        position, span = self.called(), self._span
        self._check(position, module)
        self._reach(position)
        looks = position in self._record.looking and not self._is_here
        if position in self._entered or span.is_split_by(position):
            check_hooks(module, self._modules.get(module, ""))
            looks = True
        if looks:
            output = self.walk_into(position, module, args, kwargs)
        elif self._is_here or self._can_compute(position, args, kwargs):
            with self.aside(), opened(self._parameters(module)):
                args, kwargs = present((args, kwargs))
                output = call(module, *args, **kwargs)
        else:
            with self.aside():
                output = self._skip(position, module, args, kwargs)
        self._keep(position, tensors_in(output))
        return output

    def is_checkpointed(self) -> bool:
        begin = self.here
        if begin not in self._record.checkpoints:
            return False
        first, end = self._record.checkpoints[begin]
        self._reach(first)
        return self._is_here and not self._span.end < end

    def values(self, args: Any) -> Any:
        return present(args)

    def _reach(self, position: Position) -> None:
        """Begin or end the station at its cuts."""
        if position >= self._span.end:
            raise Departed
        if not self._is_here and position >= self._span.begin:
            with self.aside():
                self._begin()

    def _begin(self) -> None:
        absent = self._crossing(self._span.arriving)
        for place, value in zip(absent, self._arrive(absent), strict=True):
            place.slot.value = value
        self._is_here = True

    def _can_compute(self, position: Position, args: Any, kwargs: Any) -> bool:
        """Return whether results outside of the station follow from inputs that are here."""
        return position in self._record.given and not any(map(is_empty, leaves_in((args, kwargs))))

    def _compute(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = present((args, kwargs))
        leaves = leaves_in((args, kwargs))
        used = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and is_cut(leaf)]
        if not used:
            return function(*args, **kwargs)
        with opened(used):  # parameters of the station itself
            return function(*args, **kwargs)

    def _form(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves = leaves_in((args, kwargs))
        if function in _GETTERS and not is_empty(args[0]):
            return function(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            with undrawn():  # a constant, or drawn at random
                output = function(*args, **kwargs)
            return self._forms.likes(output)
        try:
            first = args[0] if args else None
            if isinstance(first, Absent) and function in _OF_ABSENT:
                return function(*args, **kwargs)
            return self._forms.called(function, args, kwargs)
        except Undecided as error:
            if not any(map(is_empty, leaves)):  # inputs that decide the way are here
                args, kwargs = present((args, kwargs))
                return function(*args, **kwargs)
            raise self._undecided_error(str(error)) from None

    def _skip(self, position: Position, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the results of a call elsewhere, as absent tensors."""
        known = signature(args, kwargs, module)
        forms = self._record.returned.get((position, known))
        if forms is None:
            forms = self._form_of(module, args, kwargs)
            self._record.returned[position, known] = forms
        given = tensors_in((args, kwargs))

        def absent(leaf: Any, device: torch.device | None, grad: bool) -> Any:
            if isinstance(leaf, Alias):
                return given[leaf.number]
            if device is None:
                return leaf
            return self._forms.absent(leaf.shape, leaf.dtype, device, grad=grad)

        leaves = [
            absent(*each)
            for each in zip(forms.leaves, forms.devices, forms.takes_grad, strict=True)
        ]
        return pytree.tree_unflatten(leaves, forms.form)

    def _form_of(self, module: nn.Module, args: Any, kwargs: Any) -> Returned:
        def form(*args: Any, **kwargs: Any) -> Any:
            values = {
                name: self._forms.form(tensor)
                for tensors in (module.named_parameters(), module.named_buffers())
                for name, tensor in tensors
            }
            with without_hooks(module):
                return torch.func.functional_call(module, values, args, kwargs)

        with self.aside():
            try:
                output = self._forms.called(form, args, kwargs)
            except Undecided as error:
                raise self._undecided_error(str(error)) from None
        return returned(args, kwargs, output)

    def _keep(self, position: Position, made: Sequence[Tensor]) -> None:
        for number, tensor in enumerate(made):
            if (name := (position, number)) in self._needed:
                self._kept[name] = tensor

    def _check(self, position: Position, module: nn.Module) -> None:
        name, expected = self._modules.get(module, ""), self._record.calls.get(position)
        if name != expected:
            raise other_way(
                f"a call of {name or type(module).__name__}",
                got=name,
                expected=expected if expected is not None else "no call of a module",
            )

    def _undecided_error(self, function: str) -> UsageError:
        return undecided(function, self._record.calls.get(self._frames[-1][0], ""))


def other_way(where: str, got: str = "", expected: str = "") -> UsageError:
    """Return the error of a forward that makes other calls than the recorded one."""
    return UsageError(
        "forward goes another way than it went for the sample",
        where=where,
        got=got,
        expected=expected,
        do="leave out the pipeline, or let forward make the same calls for every batch",
    )


def check_hooks(module: nn.Module, name: str) -> None:
    """Raise UsageError if a module that no rank computes by itself has a backward hook."""
    if module._backward_hooks or module._backward_pre_hooks:
        raise UsageError(
            "a backward hook is on a module whose layers several ranks hold",
            where=f"module {name or type(module).__name__}",
            do="put it on modules that one rank holds, or on the parameters",
        )


_GETTERS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "device", "dtype", "ndim", "requires_grad", "layout", "is_cuda")
)
_OF_ABSENT = frozenset([*_GETTERS, Tensor.size, Tensor.dim, Tensor.numel])
