"""Objects that have a state: what is saved of each, under which names, and how it is put back.

    a module       its state_dict; names and shapes are compared before anything is loaded
    an optimizer   its state_dict, in which parameters have their names in place of numbers
    a list, tuple or dict with such objects in it: each of them
    anything else with state_dict and load_state_dict: what it gives, as plain data
    plain data     itself

Names and shapes are those of one process, so any number of ranks under any plan can go on. All of
it are collectives. Guarded by tests/front/test_saving.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.checkpoint.parts import Spread
from shoal.core.errors import ShoalError, UsageError
from shoal.data.sharded import Positioned
from shoal.optim.extend import kept_state_dict
from shoal.session.additions import uncompiled
from shoal.tensors.cut import SpreadCut, cut_of, is_cut, part_of

_SHOWN = 4  # names that a message lists
Modules = Sequence[tuple[str, nn.Module]]  # with the ways to them


def has_state(value: Any) -> bool:
    """Whether it can give and take a state."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def members(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The objects with a state in a value, each with the way to it."""
    if has_state(value):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from members(part, f"{path}.{key}" if path else str(key))


def modules_of(objects: Mapping[str, Any]) -> Modules:
    """All modules among objects, with the ways to them."""
    found = members(objects)
    return [(path, uncompiled(value)) for path, value in found if isinstance(value, nn.Module)]


def state_of(value: Any, modules: Modules, *, spread: bool = False) -> Any:
    """What is to be saved of a value: plain data and tensors (a collective).

    Args:
        value: an object with a state, such objects in lists or dicts, or plain data.
        modules: that optimizers' parameters have their names in.
        spread: leave layers that are cut, and their optimizer's state, where they are: a `Spread`
            for each tensor.

    Raises:
        UsageError: a loader whose ranks are at positions of their own.
    """
    if isinstance(value, nn.Module):
        return _of_module(uncompiled(value), spread=spread)  # save 4
    if isinstance(value, Optimizer):
        state = kept_state_dict(value, Spread) if spread else value.state_dict()  # save 5
        return _named(value, state, modules)
    if isinstance(value, Positioned):
        return _of_loader(value)
    if has_state(value):
        return value.state_dict()
    if not any(members(value)):
        return value
    if isinstance(value, Mapping):
        return {key: state_of(part, modules, spread=spread) for key, part in value.items()}
    return [state_of(part, modules, spread=spread) for part in value]


def _of_module(module: nn.Module, *, spread: bool) -> Any:
    if not spread or type(module).state_dict is not nn.Module.state_dict:
        return module.state_dict()
    state = module.state_dict(keep_vars=True)  # brings nothing of what is cut
    for name, value in state.items():
        if isinstance(value, Tensor):
            cut = cut_of(value) if is_cut(value) else None
            state[name] = (
                Spread(part_of(value), cut) if isinstance(cut, SpreadCut) else value.detach()
            )
    return state


def _of_loader(loader: Positioned[Any]) -> dict[str, Any]:
    """A loader's position, if it is the same on every rank."""
    state = loader.state_dict()
    if state.get("size", 1) > 1:
        raise UsageError(
            "streams that shard themselves have a position on each rank, and a checkpoint has one",
            got=f"rank {state['rank']} of {state['size']}, in the middle of epoch {state['epoch']}",
            do="save between epochs, or leave the loader out and save loader.state_dict() on each "
            "rank",
        )
    return state


def put_back(value: Any, saved: Any, modules: Modules, path: str) -> None:
    """Let every object in a value take what was saved of it (a collective).

    Raises:
        UsageError: it is the state of another object.
    """
    if isinstance(value, nn.Module):
        module = uncompiled(value)
        check_module(module, saved, path)
        _load(module, saved, path)
    elif isinstance(value, Optimizer):
        _load(value, _numbered(value, saved, modules, path), path)
    elif has_state(value):
        _load(value, saved, path)
    elif isinstance(value, Mapping):
        _check_members(sorted(map(str, value)), sorted(map(str, saved)), path)
        for key, part in value.items():
            put_back(part, saved[key], modules, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        _check_members(len(value), len(saved), path)
        for number, (part, state) in enumerate(zip(value, saved, strict=True)):
            put_back(part, state, modules, f"{path}.{number}")


def _load(value: Any, saved: Any, path: str) -> None:
    try:
        value.load_state_dict(saved)
    except ShoalError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} does not take what was saved of it",
            got=f"{type(error).__name__}: {error}"[:400],
            expected=f"the state of a {type(value).__name__} made as this one is",
            do=f"make {path} as it was made when it was saved, or leave it out",
        ) from error


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
    """An optimizer's parameters, and what they are called.

    They have their names in the first module that has them all. Where there is none the way to the
    module comes first, and where no module has one it is numbered.
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


def _named(optimizer: Optimizer, state: Mapping[str, Any], modules: Modules) -> dict[str, Any]:
    """An optimizer's state with names in place of numbers."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, _Named.of(optimizer, modules).names, strict=True))  # save 6
    groups = [
        {**group, "params": [name_of[number] for number in group["params"]]}
        for group in state["param_groups"]
    ]
    states = {name_of.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": states, "param_groups": groups}


def _numbered(
    optimizer: Optimizer, saved: Mapping[str, Any], modules: Modules, path: str
) -> dict[str, Any]:
    """What `_named` made, with the numbers that parameters have in this optimizer."""
    own = _Named.of(optimizer, modules)
    saved_names = [name for group in saved["param_groups"] for name in group["params"]]
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
        number = number_of.get(key)
        states[key if number is None else number] = (
            value if number is None else _laid(value, own.parameters[number])
        )
    groups, first = [], 0
    for group, current in zip(saved["param_groups"], optimizer.param_groups, strict=False):
        count = len(current["params"])
        groups.append({**group, "params": list(range(first, first + count))})
        first += count
    groups += saved["param_groups"][len(groups) :]  # the optimizer says that there are too many
    return {**saved, "state": states, "param_groups": groups}


def _laid(state: Any, parameter: Tensor) -> Any:
    """A parameter's state, whose tensors lie in memory as the parameter does."""

    def laid(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        if value.stride() == parameter.stride():
            return value
        return torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)

    return {key: laid(value) for key, value in state.items()} if isinstance(state, dict) else state


def check_module(module: nn.Module, saved: Mapping[str, Any], path: str) -> None:
    """Compare names and shapes, before anything changes."""
    if type(module).state_dict is not nn.Module.state_dict:
        return  # only the module itself knows what fits
    own = module.state_dict(keep_vars=True)  # looks at no value
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


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _other_names(what: str, own: Sequence[str], saved: Sequence[str]) -> UsageError:
    missing, more = [n for n in own if n not in set(saved)], [n for n in saved if n not in set(own)]
    near = difflib.get_close_matches(missing[0], more, n=1) if missing else []
    return UsageError(
        f"the checkpoint is of another model than that of {what}: names differ",
        got=f"not saved: {_listed(missing)}; not in {what}: {_listed(more)}",
        expected="the same names",
        do="load it into a model that is made as it was"
        + (f"; {near[0]} may be {missing[0]} today" if near else ""),
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) or "none"
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
