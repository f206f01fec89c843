"""An optimizer's own methods besides `step`: which of them use the state of parameters.

Schedule-free ones have `eval()` and `train()`, others swap averages or slow weights. Where a rank
has a part of the state only, such a method would find nothing there, and do nothing in silence. So
each whose code names `state` is tried, on a copy that has made some steps. One that cannot be tried
(it wants arguments) is taken to use it, unless `step` calls it. Then it is a part of the step, as
`init_group(group)` of pytorch_optimizer's is, and owners make that.

Those of torch.optim.Optimizer are not among them: these are served (optim/extend.py).
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
    """Names of the public methods of a class whose code, or what it calls of its own, names it.

    Not those of torch's own classes.
    """
    own = {
        name: function
        for each in reversed(kind.__mro__)
        # of torch's own only Adagrad has one, `share_memory`, which is for threads
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
    """Whether it cannot be called with itself alone."""
    _, *others = inspect.signature(method).parameters.values()
    various = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return any(p.default is p.empty and p.kind not in various for p in others)


def reads_state(trial: Optimizer, name: str) -> bool:
    """Whether a method of a copy, which has a state, reads or replaces it.

    Also where it cannot be called without arguments.
    """
    state = trial.state
    watched = _WatchedState(state)
    trial.state = watched
    try:
        getattr(trial, name)()
        return watched.used or trial.state is not watched
    except Exception:  # of whatever kind: it is somebody's own
        return True
    finally:
        trial.state = state


@final
class _WatchedState(defaultdict[Any, Any]):
    """An optimizer state that notes whether somebody reads it."""

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
    """All names in the code of a function, and of those of the class that it names."""
    seen.add(name)
    found: set[str] = set()
    for code in _codes(own[name]):
        found |= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    for other in found & own.keys() - seen:
        found |= _names(other, own, seen)
    return found


def _codes(function: FunctionType) -> Iterator[CodeType]:
    """Its code, that of what it wraps, and of functions within."""
    left: list[CodeType] = [inspect.unwrap(function).__code__]
    try:  # a decorator may not say what it wraps
        inside = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # not there yet
        inside = []
    left += [value.__code__ for value in inside if isinstance(value, FunctionType)]
    while left:
        code = left.pop()
        yield code
        left += [const for const in code.co_consts if isinstance(const, CodeType)]
