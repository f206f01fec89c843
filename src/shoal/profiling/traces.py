"""Notes all that running a model can change, and puts it back: values and objects.

Noted is everything that the given objects refer to: tensors (value and `.grad`), modules and other
objects (attributes), lists, dicts, sets, arrays, and generators of random numbers. Of functions it
is closures and defaults, and in the user's own files also the globals and classes that they use.

Not noted are things that other threads may be changing (objects with locks, queues or threads),
data sets, loaders, optimizers, and the state of the standard library, torch and Shoal. The cost is
a copy of every tensor and array. Guarded by tests/profiling/test_untraced_runs.py.
"""

from __future__ import annotations

import io
import logging
import queue
import random
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from shoal.profiling.identity import content

Restore = Callable[[], None]

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, CodeType)
_SHARED = (
    threading.Thread,
    threading.Event,
    threading.Condition,
    threading.Semaphore,
    type(threading.Lock()),
    type(threading.RLock()),
    queue.Queue,
    queue.SimpleQueue,
)
_OPAQUE = (
    *_SHARED,
    ModuleType,
    Enum,
    Optimizer,
    Dataset,
    DataLoader,
    Sampler,
    io.IOBase,
    logging.Logger,
    logging.Handler,
    np.memmap,
)
_ABSENT = object()


@final
class Traces:
    """Objects, and all that they refer to, in their state at the time of construction."""

    def __init__(self, *roots: Any) -> None:
        # these keep objects alive, so that an id stays one object's
        self._seen: dict[int, Any] = {}
        self._restores: list[Restore] = []
        self._arrays: list[Restore] = []
        self._tensors: list[_NotedTensor] = []
        todo = list(roots)
        while todo:
            value = todo.pop()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            todo.extend(self._note(value))

    def leaves(self) -> list[Tensor]:
        """List the noted tensors that keep gradients."""
        return [noted.tensor for noted in self._tensors if noted.is_leaf]

    def put_back(self, *, only_seen: bool = False) -> None:
        """Restore everything.

        With `only_seen`, tensors are compared by their version alone, which costs nothing. Arrays
        have no version, and stay as they are.
        """
        for restore in self._restores if only_seen else [*self._restores, *self._arrays]:
            restore()
        with torch.no_grad():
            for noted in self._tensors:
                noted.put_back(only_seen)

    def _note(self, value: Any) -> Iterable[Any]:
        """Note one object, and return the objects that it refers to."""
        if isinstance(value, Tensor):
            if _of_shoal(type(value)):  # its value is a part of another parallelised model
                return ()
            self._tensors.append(_NotedTensor(value))
            return (value._backward_hooks,)
        if isinstance(value, _OPAQUE) or _of_shoal(type(value)):
            return ()
        for kinds, note in _NOTES:
            if isinstance(value, kinds):
                restore, inside = note(value)
                if restore is not None:
                    kept = self._arrays if isinstance(value, np.ndarray) else self._restores
                    kept.append(restore)
                return inside
        return self._object(value)

    def _object(self, value: Any) -> Iterable[Any]:
        """Note the attributes of a module, or of a plain object of the user's own."""
        kind = type(value)
        attributes = getattr(value, "__dict__", None)
        is_module = isinstance(value, nn.Module)
        if not is_module and (
            _is_installed(kind.__module__, libraries=False)
            or any(isinstance(inner, _SHARED) for inner in (attributes or {}).values())
        ):
            return ()
        inside: list[Any] = [kind]
        if attributes is not None:
            self._restores.append(partial(_put_back_dict, attributes, dict(attributes)))
            inside += attributes.values()
        for name in _slots(kind):
            held = getattr(value, name, _ABSENT)
            self._restores.append(partial(_put_back_slot, value, name, held))
            inside.append(held)
        return inside


@final
class _NotedTensor:
    """A tensor and its noted value."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.is_leaf = tensor, tensor.is_leaf
        self._value = tensor.detach().clone()
        self._gradient = tensor.grad if self.is_leaf else None
        self._version = _version(tensor)

    def put_back(self, only_seen: bool) -> None:
        tensor, value = self.tensor, self._value
        if self.is_leaf and not only_seen:
            tensor.grad = self._gradient
        version = _version(tensor)
        if only_seen and version == self._version:
            return
        if tensor.shape != value.shape:
            tensor.data = value.clone()
        # an expanded buffer cannot be written, and so has not changed
        elif not equal(tensor, value):
            tensor.copy_(value)
        self._version = _version(tensor)


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one type are equal. Torch itself compares no sparse ones."""
    if a.layout is torch.strided:
        return torch.equal(a, b)
    return a.shape == b.shape and bool(content(a) == content(b))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


Note = tuple[Restore | None, Iterable[Any]]


def _dict(value: dict[Any, Any]) -> Note:
    # a dict's subclass may return other values than it holds
    held = {key: dict.__getitem__(value, key) for key in value}
    return partial(_put_back_dict, value, held), [*held.keys(), *held.values()]


def _list(value: list[Any]) -> Note:
    before = list(value)

    def restore() -> None:
        if _differ(value, before):
            value[:] = before

    return restore, before


def _deque(value: deque[Any]) -> Note:
    before = list(value)

    def restore() -> None:
        if _differ(value, before):
            value.clear()
            value.extend(before)

    return restore, before


def _set(value: set[Any]) -> Note:
    before = set(value)

    def restore() -> None:
        if value != before:
            value.clear()
            value.update(before)

    return restore, before


def _array(value: np.ndarray[Any, Any]) -> Note:
    before = value.copy()

    def restore() -> None:
        if value.flags.writeable and value.tobytes() != before.tobytes():
            np.copyto(value, before)

    return restore, before.ravel().tolist() if value.dtype == object else ()


def _torch_generator(value: torch.Generator) -> Note:
    state = value.get_state()

    def restore() -> None:
        value.set_state(state)

    return restore, ()


def _python_generator(value: random.Random) -> Note:
    return partial(value.setstate, value.getstate()), ()


def _numpy_generator(value: np.random.Generator) -> Note:
    state = value.bit_generator.state

    def restore() -> None:
        value.bit_generator.state = state

    return restore, ()


def _old_numpy_generator(value: np.random.RandomState) -> Note:
    return partial(value.set_state, value.get_state()), ()


def _frozen(value: Iterable[Any]) -> Note:
    return None, list(value)


def _method(value: MethodType) -> Note:
    return None, (value.__self__, value.__func__)


def _partial(value: partial[Any]) -> Note:
    return None, (value.func, value.args, value.keywords)


def _function(value: FunctionType) -> Note:
    """Note a function's closure, defaults and attributes, and the globals of a user's function."""
    if _is_of_shoal(value.__module__):
        return None, ()
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append((cell, cell.cell_contents))
        except ValueError:  # not filled yet
            continue
    read: dict[str, Any] = {}
    if not _is_installed(value.__module__):
        read = {
            name: value.__globals__[name]
            for name in _names(value.__code__)
            if name in value.__globals__
        }

    def restore() -> None:
        for cell, held in cells:
            if cell.cell_contents is not held:
                cell.cell_contents = held
        for name, held in read.items():
            if value.__globals__.get(name, _ABSENT) is not held:
                value.__globals__[name] = held

    defaults = value.__defaults__ or (), value.__kwdefaults__
    return restore, [held for _, held in cells] + [*read.values(), *defaults, vars(value)]


def _class(value: type) -> Note:
    """Note the attributes of a user's class, and the objects that its methods refer to."""
    if _is_installed(value.__module__):
        return None, ()
    before = _attributes_of(value)

    def restore() -> None:
        now = _attributes_of(value)
        for name, held in before.items():
            if now.get(name, _ABSENT) is not held:
                setattr(value, name, held)
        for name in now.keys() - before.keys():
            delattr(value, name)

    functions = [held for held in vars(value).values() if isinstance(held, FunctionType)]
    return restore, [*before.values(), *functions, *value.__bases__]


_NOTES: tuple[tuple[Any, Callable[[Any], Note]], ...] = (
    (dict, _dict),
    (list, _list),
    (deque, _deque),
    (set, _set),
    (np.ndarray, _array),
    (torch.Generator, _torch_generator),
    (random.Random, _python_generator),
    (np.random.Generator, _numpy_generator),
    (np.random.RandomState, _old_numpy_generator),
    ((tuple, frozenset), _frozen),
    (MethodType, _method),
    (FunctionType, _function),
    (partial, _partial),
    (type, _class),
)


def _put_back_dict(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    if len(value) == len(before) and all(
        key is old and dict.__getitem__(value, key) is held
        for key, (old, held) in zip(value, before.items(), strict=True)
    ):
        return
    value.clear()
    value.update(before)


def _put_back_slot(value: Any, name: str, held: Any) -> None:
    now = getattr(value, name, _ABSENT)
    if now is held:
        return
    if held is _ABSENT:
        object.__delattr__(value, name)
    else:
        object.__setattr__(value, name, held)


def _differ(now: Iterable[Any], before: list[Any]) -> bool:
    listed = list(now)
    return len(listed) != len(before) or any(
        a is not b for a, b in zip(listed, before, strict=True)
    )


def _attributes_of(kind: type) -> dict[str, Any]:
    """Return a class's attributes apart from methods and Python's own."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_abc_")
        and not (name.startswith("__") and name.endswith("__"))
        and not callable(value)
        and not hasattr(value, "__get__")
    }


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                yield f"_{base.__name__.lstrip('_')}{name}" if private else name


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals that a function's code, or code inside it, may read or set."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _of_shoal(kind: type) -> bool:
    return _is_of_shoal(kind.__module__)


def _is_of_shoal(module: str | None) -> bool:
    return str(module).partition(".")[0] == "shoal"


@cache
def _is_installed(module: str | None, libraries: bool = True) -> bool:
    """Return whether a module is Python's, torch's or Shoal's; with `libraries`, or installed."""
    name = module or "builtins"
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names or root in ("builtins", "torch", "numpy", "shoal"):
        return True
    if not libraries:
        return False
    place = getattr(sys.modules.get(name), "__file__", None)
    paths = sysconfig.get_paths()
    installed = [Path(paths[key]).resolve() for key in ("purelib", "platlib", "stdlib")]
    return place is not None and any(Path(place).resolve().is_relative_to(at) for at in installed)
