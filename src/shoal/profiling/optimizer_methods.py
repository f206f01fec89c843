"""An optimizer's own methods apart from `step`: which of them use the state of parameters.

Schedule-free optimizers have `eval()` and `train()`, others swap averages or slow weights. If a
rank has only a part of the state, such a method would find nothing there, and do nothing in
silence. So each method with `state` in its code is tried, on a copy that has made some steps. A
method that cannot be tried, because it needs arguments, counts as one that uses the state. But if
`step` calls it, it is a part of the step, as pytorch_optimizer's `init_group(group)` is, and owners
call it.

Methods of torch.optim.Optimizer are left out, because Shoal serves them (optim/extend.py).
Guarded by tests/profiling/test_optimizer_methods.py.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, final

from torch.optim import Optimizer


def methods_of_state(kind: type[Optimizer]) -> list[str]:
    """Name the public methods of a class that use `state`, themselves or through other methods.

    Methods of torch's own classes are left out.
    """
    own = {
        name: function
        for each in reversed(kind.__mro__)
        # torch's only such method is Adagrad's `share_memory`, which is for threads
        if not each.__module__.startswith("torch.optim")
        for name, function in vars(each).items()
        if isinstance(function, FunctionType)
    }
    of_step = _names("step", own, set()) if "step" in own else set()
    return [
        name
        for name, function in own.items()
        if not name.startswith("_")
        and not hasattr(Optimizer, name)
        and not (name in of_step and _wants_arguments(function))
        and "state" in _names(name, own, set())
    ]


def _wants_arguments(method: FunctionType) -> bool:
    """Return whether it cannot be called without arguments."""
    _, *others = inspect.signature(method).parameters.values()
    various = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return any(p.default is p.empty and p.kind not in various for p in others)


def reads_state(trial: Optimizer, name: str) -> bool:
    """Return whether a method of a copy, which has a state, reads or replaces the state.

    Return True also if it cannot be called without arguments.
    """
    state = trial.state
    watched = _WatchedState(state)
    trial.state = watched
    try:
        getattr(trial, name)()
        return watched.used or trial.state is not watched
    except Exception:  # the method is the user's own, and may raise any exception
        return True
    finally:
        trial.state = state


@final
class _WatchedState(defaultdict[Any, Any]):
    """An optimizer state that notes whether it is read."""

    def __init__(self, state: Any) -> None:
        super().__init__(dict, state)
        self.used = False

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and name != "used":
            self.used = True
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        self.used = True
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.used = True
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self.used = True
        return super().__iter__()

    def __setitem__(self, key: Any, value: Any) -> None:
        self.used = True
        super().__setitem__(key, value)


def _names(name: str, own: dict[str, FunctionType], seen: set[str]) -> set[str]:
    """Collect all names in a function's code, and in the methods of its class that it calls."""
    seen.add(name)
    found: set[str] = set()
    for code in _codes(own[name]):
        found |= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    for other in found & own.keys() - seen:
        found |= _names(other, own, seen)
    return found


def _codes(function: FunctionType) -> Iterator[CodeType]:
    """Yield the code of a function, of the function that it wraps, and of functions inside it."""
    left: list[CodeType] = [inspect.unwrap(function).__code__]
    try:  # a decorator need not name the function that it wraps
        inside = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # not there yet
        inside = []
    left += [value.__code__ for value in inside if isinstance(value, FunctionType)]
    while left:
        code = left.pop()
        yield code
        left += [const for const in code.co_consts if isinstance(const, CodeType)]
