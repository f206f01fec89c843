"""Part: the parameters of an optimizer that are held in one way, and their work in a step.

    whole    this rank has all of it; the optimizer itself updates it         (whole_parameters.py)
    owned    ranks or servers own pieces of it, and update these on lanes     (owned_pieces.py)
    cut      every rank has a part of it, and the optimizer updates that      (cut.py)
    far      hosts that hold layers and bring no rows have all of it          (far.py)
    table    servers have all rows of it                                      (table.py)

An optimizer has parts of each model that it trains. Its methods loop over them, in the same order
on every rank (extend.py). A parameter is in one part only.

If a parameter's state is not whole here, `optimizer.state` has a `FarState` of it (far_state.py). A
user may change, replace or delete it by hand. `absorb` lets the part take that over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.core.pieces import local_gradient, set_local_gradient
from shoal.optim.far_state import FarState, here
from shoal.tensors.cut import SpreadCut, opened

States = dict[nn.Parameter, dict[str, Any]]  # states by parameter, as in Optimizer.state


@dataclass(frozen=True)
class Keeping:
    """The forms in which parts of this rank stand in an optimizer's state.

    Args:
        spread: a function of a part of a tensor, and of its cut.
        owned: whether values that ranks own in pieces stand as `Owned`. If not, all ranks get them.
    """

    spread: Callable[[Tensor, SpreadCut], Any]
    owned: bool = False


class Part(ABC):
    """Parameters of an optimizer that are held in the same way.

    Every call looks the parameters up again, because a group may be added at any time.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._entries: dict[nn.Parameter, FarState] = {}
        self._brought: States | None = None
        # tensors that were brought before, and their versions
        self._stale: list[tuple[ref[Tensor], int]] = []

    @abstractmethod
    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter belongs to this part."""

    @abstractmethod
    def open(self) -> None:
        """Begin a step: arrange the update of these parameters, before the optimizer's own code."""

    @abstractmethod
    def close(self) -> None:
        """End a step, or clean up after a failed one. May be called again, or without `open`."""

    @abstractmethod
    def norms(self, order: float) -> list[Tensor]:
        """Return the gradients' norms, in float64 on the CPU, on every rank (a collective)."""

    @abstractmethod
    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients by a number (a collective)."""

    @abstractmethod
    def whole_state(self) -> States:
        """Return the parameters' state in one-process form, on every rank (a collective)."""

    def kept_state(self, keeping: Keeping) -> States:
        """Return the state of these parameters in the forms of `keeping`.

        It may have only this rank's part of a value. A collective, unless all values stay in parts.
        """
        return self.whole_state()

    @abstractmethod
    def take_state(self) -> None:
        """Take over the state of these parameters from `optimizer.state`, in one-process form."""

    def state_bytes(self) -> int:
        """Return the bytes of state that this rank keeps outside of `optimizer.state`."""
        return 0

    def parameters(self) -> list[nn.Parameter]:
        """List the optimizer's parameters that belong to this part."""
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if self.has(p)]

    def local_gradients(self) -> list[Tensor]:
        """List the gradients that this rank itself has."""
        gradients = map(local_gradient, self.parameters())
        return [gradient for gradient in gradients if gradient is not None]

    def mark(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give parameters an entry in `optimizer.state`, although their state is not in it.

        Without any entry, torch.distributed.checkpoint would make a step of its own.
        """
        state, entries = self.optimizer.state, self._entries
        for parameter in parameters:
            if parameter not in entries:
                entries[parameter] = FarState(here(state.get(parameter)), self._bring)
            state[parameter] = entries[parameter]

    @torch.no_grad()
    def absorb(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take over changes made by hand in `optimizer.state` (a collective if there are any)."""
        listed, state, entries = list(parameters), self.optimizer.state, self._entries
        if self._stale:
            self._check_stale()
        if self._brought is None:
            if all(map(is_, map(state.get, listed), map(entries.get, listed))):
                return
            if not any(map(self._is_changed, listed)):
                return
        whole = self.whole_state() if self._brought is None else self._brought
        states: States = {}
        for parameter in dict.fromkeys([*listed, *whole]):
            entry = state.get(parameter)
            if entry is not entries.get(parameter):
                states[parameter] = here(entry)
                entries.pop(parameter, None)
            elif self._brought is None:
                states[parameter] = whole.get(parameter, {})
            else:
                names, values = whole.get(parameter, {}), here(entry)
                states[parameter] = {name: values[name] for name in names if name in values}
        self._send_back()
        for parameter, values in states.items():
            state.pop(parameter, None)
            if values:
                state[parameter] = values
        self.take_state()
        self.mark(list(entries))  # some have no state now, but the user's own keys

    def load(self) -> None:
        """Take over a state that `load_state_dict` has put into `optimizer.state`."""
        self._send_back()
        self._stale.clear()
        self._entries.clear()
        self.take_state()

    def _is_changed(self, parameter: nn.Parameter) -> bool:
        """Return whether a user has replaced a parameter's entry."""
        entry, own = self.optimizer.state.get(parameter), self._entries.get(parameter)
        return entry is not own and (own is not None or bool(entry))

    @torch.inference_mode(False)  # the tensors are used outside of it
    @torch.no_grad()
    def _bring(self) -> None:
        """Bring the states of all parameters into their entries (a collective)."""
        if self._brought is not None:
            return
        whole = self._brought = self.whole_state()
        for parameter, values in whole.items():
            if (entry := self._entries.get(parameter)) is not None:
                dict.update(entry, {**values, **here(entry)})

    def _send_back(self) -> None:
        """Take all fetched states out of the entries again."""
        for parameter, values in (self._brought or {}).items():
            for name, value in values.items():
                if (entry := self._entries.get(parameter)) is not None:
                    dict.pop(entry, name, None)
                if isinstance(value, Tensor):
                    self._stale.append((ref(value), value._version))
        self._brought = None

    def _check_stale(self) -> None:
        """Refuse changes of tensors that were read before the last step: owners miss them."""
        kept = [(view, version) for view, version in self._stale if view() is not None]
        for view, version in kept:
            tensor = view()
            if tensor is not None and tensor._version != version:
                raise UsageError(
                    "a tensor of the optimizer's state was changed that was read before the last "
                    "step or state_dict: the state itself is elsewhere by now",
                    where=f"{type(self.optimizer).__name__}, a tensor of shape "
                    f"{tuple(tensor.shape)}",
                    do="read optimizer.state[parameter] anew each time that you change it",
                )
        self._stale = kept

    def release(self) -> None:
        """Leave the user's own keys in the entries, and nothing else."""
        self._send_back()
        for parameter, entry in self._entries.items():
            entry.bring = None
            if self.optimizer.state.get(parameter) is entry:
                del self.optimizer.state[parameter]
                put(self.optimizer, {parameter: here(entry)})
        self._entries.clear()


@contextmanager
def hidden(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Hide the gradients of cut parameters in the context, so that the optimizer skips them."""
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
    """Add these states to `optimizer.state` in the context."""
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
    """Put states into `optimizer.state`, and keep the user's keys there."""
    for parameter, state in states.items():
        both = {**here(optimizer.state.pop(parameter, None)), **state}
        if both:
            optimizer.state[parameter] = both
