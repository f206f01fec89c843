"""Objects that have a state: the saved form of each, its names, and the way back.

    a module       its state_dict; names and shapes are compared before anything is loaded
    an optimizer   its state_dict, in which parameters have their names in place of numbers
    a list, tuple or dict with such objects in it: each of them
    any other object with state_dict and load_state_dict: its state, as plain data
    plain data     itself

Names and shapes are the ones of a single process, so any number of ranks under any plan can go on.
All calls are collectives. Guarded by tests/front/test_save_and_load.py.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.checkpoint.parts import Spread
from shoal.checkpoint.tree import decoded, encoded, unsaved_error
from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.contracts.plain import MOST_KEYS
from shoal.core.errors import ShoalError, UsageError
from shoal.data.sharded import Positioned
from shoal.front.stages import LOGGER
from shoal.front.state_checks import check_optimizer, check_parameter, check_plain, wrong_form
from shoal.optim.extend import kept_state_dict
from shoal.optim.part import Keeping
from shoal.session.compiled_models import without_compilation
from shoal.session.session import ranks
from shoal.tensors.cut import SpreadCut, cut_of, is_cut, part_of

_SHOWN = 4  # names that a message lists
Modules = Sequence[tuple[str, nn.Module]]  # modules with the ways to them


def has_state(value: Any) -> bool:
    """Return whether an object can give and take a state."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def members(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the objects with a state in a value, each with the way to it."""
    if has_state(value):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        if depth > MOST_KEYS:
            raise unsaved_error(tuple(path.split(".")[:4]))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from members(part, f"{path}.{key}" if path else str(key), depth + 1)


def modules_of(objects: Mapping[str, Any]) -> Modules:
    """Return all modules among objects, with the ways to them."""
    found = members(objects)
    return [
        (path, without_compilation(value)) for path, value in found if isinstance(value, nn.Module)
    ]


def state_of(value: Any, modules: Modules, *, keeping: Keeping | None = None) -> Any:
    """Return the form of a value to save: plain data and tensors (a collective).

    Args:
        value: an object with a state, such objects in lists or dicts, or plain data.
        modules: modules in which optimizers' parameters have their names.
        keeping: leave layers that are cut, and their optimizer's state, where they are: a `Spread`
            for each tensor. It may leave owners' values where they are, too.
    """
    if isinstance(value, nn.Module):
        return _of_module(without_compilation(value), spread=keeping is not None)  # save 4
    if isinstance(value, Optimizer):
        state = value.state_dict() if keeping is None else kept_state_dict(value, keeping)  # save 5
        return _with_names(value, state, modules)
    if isinstance(value, Positioned):
        return _of_loader(value)
    if has_state(value):
        return value.state_dict()
    if not any(members(value)):
        return value
    if isinstance(value, Mapping):
        return {key: state_of(part, modules, keeping=keeping) for key, part in value.items()}
    return [state_of(part, modules, keeping=keeping) for part in value]


def _of_module(module: nn.Module, *, spread: bool) -> Any:
    if not spread or type(module).state_dict is not nn.Module.state_dict:
        return module.state_dict()
    state = module.state_dict(keep_vars=True)  # `keep_vars` gathers no cut parameter
    for name, value in state.items():
        if isinstance(value, Tensor):
            cut = cut_of(value) if is_cut(value) else None
            state[name] = (
                Spread(part_of(value), cut) if isinstance(cut, SpreadCut) else value.detach()
            )
    return state


def _of_loader(loader: Positioned[Any]) -> dict[str, Any]:
    """Return a loader's position, or each rank's if ranks have rows of their own (a collective)."""
    state = loader.state_dict()
    if loader.source.own is None:
        return state
    tensors = list[Tensor]()

    def take(path: tuple[str, ...], tensor: Any) -> str:
        tensors.append(tensor)
        return str(len(tensors) - 1)

    try:
        form = encoded(state, take)  # also arrays of numpy, and sets
    except UsageError as error:
        LOGGER.warning(
            "a dataset's own state is not saved, so its rows will be read again: %s", error
        )
        tensors.clear()
        form = encoded({key: value for key, value in state.items() if key != "states"}, take)
    told = ranks().gather_objects((json.dumps(form), tensors), "shoal.save: positions of ranks")
    states = [
        decoded(json.loads(text), lambda name, own=own: own[int(name)])  # type: ignore[misc]
        for text, own in told
    ]
    return {"ranks": states} if any(each["position"] for each in states) else state


@dataclass(frozen=True)
class Loading:
    """An object, and the checked state that it is to load.

    Args:
        value: the object.
        state: its state, as its `load_state_dict` takes it.
        path: the way to it.
        known: whether the check found that the state fits. If not, only the object itself knows.
    """

    value: Any
    state: Any
    path: str
    known: bool

    def run(self) -> None:
        """Load the state into the object (a collective).

        Raises:
            UsageError: the object refuses it. It is as before, as far as that can be done.
        """
        can_undo = hasattr(self.value, "__dict__") and not isinstance(self.value, nn.Module)
        before = dict(vars(self.value)) if can_undo else {}
        try:
            self.value.load_state_dict(self.state)
        except Exception as error:  # any error: its own code may refuse in any way
            if can_undo:  # torch's objects replace their attributes, and so do most others
                vars(self.value).update(before)
            if isinstance(error, ShoalError):
                raise
            raise UsageError(
                f"{self.path} does not take what was saved of it",
                got=f"{type(error).__name__}: {error}"[:400],
                expected=f"the state of a {type(self.value).__name__} made as this one is",
                do=f"make {self.path} as it was made when it was saved, or leave it out",
            ) from error


def loadings(value: Any, saved: Any, modules: Modules, path: str) -> Iterator[Loading]:
    """Check the saved state of a value, and yield each object with its own. Nothing changes yet.

    Args:
        value: an object with a state, or such objects in lists or dicts.
        saved: the state, as `state_of` returned it.
        modules: modules in which parameters of optimizers have their names.
        path: the way to the value.

    Raises:
        UsageError: it is the state of another object, or of none.
    """
    if isinstance(value, nn.Module):
        module = without_compilation(value)
        check_module(module, saved, path)
        yield Loading(module, saved, path, known=not _has_own_state(module))
    elif isinstance(value, Optimizer):
        check_optimizer(value, saved, path)
        yield Loading(value, _number(value, saved, modules, path), path, known=True)
    elif has_state(value):
        check_plain(value, saved, path)
        yield Loading(value, saved, path, known=False)
    elif isinstance(value, Mapping):
        if not isinstance(saved, Mapping):
            raise wrong_form(path, saved, "a dict")
        of_name = {str(key): state for key, state in saved.items()}
        _check_members(sorted(map(str, value)), sorted(of_name), path)
        for key, part in value.items():
            yield from loadings(part, of_name[str(key)], modules, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        count = len(saved) if isinstance(saved, list | tuple) else type(saved).__name__
        _check_members(len(value), count, path)
        for number, (part, state) in enumerate(zip(value, saved, strict=True)):
            yield from loadings(part, state, modules, f"{path}.{number}")


def load_all(comm: Comm, wanted: Sequence[Loading]) -> None:
    """Load all states into their objects (a collective).

    Objects with states that only they can check come first, and modules last. So if one refuses,
    no weights have changed, on any rank.
    """
    modules = [one for one in wanted if one.known and isinstance(one.value, nn.Module)]
    optimizers = [one for one in wanted if one.known and not isinstance(one.value, nn.Module)]
    unknown = [one for one in wanted if not one.known]
    for group in (unknown, optimizers, modules):
        agreed(comm, partial(_run, group), "shoal.load: objects take their states")


def _run(group: Sequence[Loading]) -> None:
    for loading in group:
        loading.run()


def _check_members(own: Any, saved: Any, path: str) -> None:
    if own != saved:
        raise UsageError(
            f"{path} has other members than when it was saved",
            got=str(own),
            expected=str(saved),
            do=f"give {path} as it was saved",
        )


@dataclass(frozen=True)
class _Named:
    """An optimizer's parameters, and their names.

    They have their names in the first module that has them all. If no module has them all, the way
    to a module comes first. A parameter in no module gets a number.
    """

    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    known: bool  # whether any module has them

    @classmethod
    def of(cls, optimizer: Optimizer, modules: Modules) -> _Named:
        parameters = tuple(p for group in optimizer.param_groups for p in group["params"])
        names: dict[nn.Parameter, str] = {}
        for path, module in modules:
            of_module = {parameter: name for name, parameter in module.named_parameters()}
            if of_module.keys() >= set(parameters):
                names = of_module
                break
            for parameter, name in of_module.items():
                names.setdefault(parameter, f"{path}.{name}")
        own = tuple(names.get(p, f"parameter {number}") for number, p in enumerate(parameters))
        return cls(parameters, own, any(p in names for p in parameters))


def _with_names(optimizer: Optimizer, state: Mapping[str, Any], modules: Modules) -> dict[str, Any]:
    """Return an optimizer's state with names in place of numbers."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, _Named.of(optimizer, modules).names, strict=True))  # save 6
    groups = [
        {**group, "params": [name_of[number] for number in group["params"]]}
        for group in state["param_groups"]
    ]
    states = {name_of.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": states, "param_groups": groups}


def _number(
    optimizer: Optimizer, saved: Mapping[str, Any], modules: Modules, path: str
) -> dict[str, Any]:
    """Return a state of `_with_names` with the numbers that parameters have in this optimizer."""
    own = _Named.of(optimizer, modules)
    saved_names: list[str] = [name for group in saved["param_groups"] for name in group["params"]]
    known = own.known and not all(name.startswith("parameter ") for name in saved_names)
    if known and sorted(own.names) != sorted(saved_names):
        raise _other_names(f"the optimizer {path}", own.names, saved_names)
    if len(own.names) != len(saved_names):
        raise UsageError(
            f"the optimizer {path} has another number of parameters than when it was saved",
            got=str(len(own.names)),
            expected=str(len(saved_names)),
            do="give it the same parameters",
        )
    order = own.names if known else saved_names
    number_of = {name: number for number, name in enumerate(order)}
    states = {}
    for key, value in saved["state"].items():
        if (number := number_of.get(key)) is None:
            states[key] = value
            continue
        parameter = own.parameters[number]
        check_parameter(optimizer, parameter, value, f"{path}: {key}")
        states[number] = _lay_out(value, parameter)
    groups, first = [], 0
    for group, current in zip(saved["param_groups"], optimizer.param_groups, strict=False):
        count = len(current["params"])
        groups.append({**group, "params": list(range(first, first + count))})
        first += count
    groups += saved["param_groups"][len(groups) :]  # the optimizer itself reports too many groups
    return {**saved, "state": states, "param_groups": groups}


def _lay_out(state: Any, parameter: Tensor) -> Any:
    """Copy a parameter's state so that its tensors have the parameter's memory layout."""

    def lay(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        if value.stride() == parameter.stride():
            return value
        return torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)

    return {key: lay(value) for key, value in state.items()} if isinstance(state, dict) else state


def _has_own_state(module: nn.Module) -> bool:
    return type(module).state_dict is not nn.Module.state_dict


def check_module(module: nn.Module, saved: Any, path: str) -> None:
    """Compare names, shapes and kinds of numbers, before anything changes."""
    if _has_own_state(module):
        return  # only the module itself can judge the state
    if not isinstance(saved, Mapping) or not all(isinstance(name, str) for name in saved):
        raise wrong_form(path, saved, "weights by name")
    own = module.state_dict(keep_vars=True)  # `keep_vars` reads no value
    if own.keys() != saved.keys():
        raise _other_names(f"the model {path}", list(own), list(saved))
    unlike = [
        f"{name}: {_shape(own[name])}, saved {_shape(saved[name])}"
        for name in own
        if _shape(own[name]) != _shape(saved[name])
    ]
    if unlike:
        raise UsageError(
            f"the checkpoint is of another model than {path}: shapes differ",
            got="; ".join(unlike[:_SHOWN]) + (" …" if len(unlike) > _SHOWN else ""),
            do="load it into a model that is made with the same sizes",
        )

    narrowed = [
        f"{name}: {value.dtype}, saved {saved[name].dtype}"
        for name, value in own.items()
        if isinstance(value, Tensor) and not torch.can_cast(saved[name].dtype, value.dtype)
    ]
    if narrowed:
        raise UsageError(
            f"the checkpoint is of another model than {path}: types of numbers differ",
            got=_list_names(narrowed),
            do="load it into a model that is made with the same types",
        )


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _other_names(what: str, own: Sequence[str], saved: Sequence[str]) -> UsageError:
    missing, more = [n for n in own if n not in set(saved)], [n for n in saved if n not in set(own)]
    near = difflib.get_close_matches(missing[0], more, n=1) if missing else []
    return UsageError(
        f"the checkpoint is of another model than that of {what}: names differ",
        got=f"not saved: {_list_names(missing)}; not in {what}: {_list_names(more)}",
        expected="the same names",
        do="load it into a model that is made as it was"
        + (f"; {near[0]} may be {missing[0]} today" if near else ""),
    )


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) or "none"
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
