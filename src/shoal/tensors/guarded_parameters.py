"""Parameters with a gradient or value that may be elsewhere: a reader waits for the right one.

A parameter that owners update is a `GuardedParameter` from parallelize on, and a `ComingParameter`
from `optimizer.step()` until its new value has come. Only the object's class changes: its identity
and memory stay.

    GuardedParameter   `.grad` asks the owners; everything else costs nothing
    ComingParameter    any use of it by torch waits first, and makes it a GuardedParameter again

Copies and pickles of both are plain parameters. Guarded by tests/equivalence/test_access.py.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.pieces import is_clearing, is_tracing, local_gradient

_KEEPER = "_shoal_keeper"
_DATA: Any = vars(torch._C.TensorBase)["data"]


class ParameterKeeper(Protocol):
    """The part of Shoal that keeps guarded parameters' gradients and values."""

    def fetch(self, parameter: nn.Parameter) -> None:
        """Bring the gradient into the parameter."""

    def assign(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Replace the gradient by this one."""

    def arrive(self, parameter: nn.Parameter) -> None:
        """Wait for the new value, and make the parameter a `GuardedParameter` again."""

    def laid_open(self, parameter: nn.Parameter, memory: Tensor) -> None:
        """Note that a script has `.data`, and may write to the memory without a new version."""


class GuardedParameter(nn.Parameter):
    """A parameter with its gradient at its owners."""

    @property
    def grad(self) -> Tensor | None:
        """The mean gradient over the global batch: a collective, while only the owners have it."""
        caller = sys._getframe(1)
        if is_clearing(caller):
            keeper(self).assign(self, None)
        elif not is_tracing(caller):
            keeper(self).fetch(self)
        return local_gradient(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        keeper(self).assign(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        keeper(self).assign(self, None)

    @property
    def data(self) -> Tensor:
        """The value as a tensor outside of autograd."""
        value: Tensor = _DATA.__get__(self)  # waits for a new value that is under way
        keeper(self).laid_open(self, value)
        return value

    @data.setter
    def data(self, value: Tensor) -> None:
        _DATA.__set__(self, value)
        keeper(self).laid_open(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy = nn.Parameter(
            self.detach().clone(memory_format=torch.preserve_format), self.requires_grad
        )
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        vars(plain).update({name: value for name, value in vars(self).items() if name != _KEEPER})
        return plain.__reduce_ex__(protocol)


class ComingParameter(GuardedParameter):
    """A parameter with a new value that is under way."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, ComingParameter):
                keeper(leaf).arrive(leaf)
        return func(*args, **(kwargs or {}))


# Properties that need no value.
_HARMLESS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout")
) | {Tensor.dim, Tensor.numel, Tensor.size, Tensor.stride, Tensor.is_contiguous}


def guard(parameter: nn.Parameter, its_keeper: ParameterKeeper) -> None:
    """Make a parameter a guarded one, with its keeper."""
    parameter.__dict__[_KEEPER] = its_keeper
    parameter.__class__ = GuardedParameter


def unguard(parameter: nn.Parameter) -> None:
    """Make a guarded parameter an ordinary one."""
    del parameter.__dict__[_KEEPER]
    parameter.__class__ = nn.Parameter


def keeper(parameter: nn.Parameter) -> ParameterKeeper:
    """Return the keeper of a guarded parameter."""
    its_keeper: ParameterKeeper = parameter.__dict__[_KEEPER]
    return its_keeper
