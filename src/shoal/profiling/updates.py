"""An optimizer's own update, run on other tensors than its own: on pieces of its parameters, or on a trial.

The copy has the class, the settings and the plain attributes of the original, but parameters, state and hooks of its
own, so any torch optimizer is served as it is. Whether it may be given pieces is found by trying: it may, if updating
two halves of a tensor by themselves gives what updating the whole gives.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.pieces import has_line

_SHAPE = (4, 6)  # of the trial: two dimensions, which is what optimizers that look at shapes look for
_STEPS = 3
_RATE = 1e-3  # at least
_WITHIN = 1e-9  # of the largest element, in float64
_ITS_OWN = frozenset({"param_groups", "state"})


def like(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and attributes, without parameters, state and hooks."""
    return made(type(optimizer), attributes(optimizer))


def made(kind: type[Optimizer], its_attributes: Mapping[str, Any]) -> Optimizer:
    """An optimizer of that class with these attributes, without parameters and state."""
    optimizer: Optimizer = object.__new__(kind)
    optimizer.param_groups, optimizer.state = [], defaultdict(dict)
    vars(optimizer).update(its_attributes)
    return optimizer


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Its attributes as they are now (a scaler sets some for one step), tensors cloned, without hooks."""
    methods = {name for name, value in vars(optimizer).items() if isinstance(value, MethodType | FunctionType)}
    methods |= {name for name in vars(optimizer) if callable(getattr(type(optimizer), name, None))}  # replaced ones
    return {
        name: OrderedDict() if name.endswith("_hooks") else value.clone() if isinstance(value, Tensor) else value
        for name, value in vars(optimizer).items()
        if name not in _ITS_OWN | methods and not name.startswith("_shoal")
    }


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings as they are now."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


def part_of(state: Mapping[str, Any], parameter: Tensor, part: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The state of a part of a parameter: that part of every tensor of its shape, a copy of everything else."""
    return {
        name: part(value).clone()
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else copy.deepcopy(value)
        for name, value in state.items()
    }


def whole_updates(parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> dict[Tensor, str]:
    """The parameters of which no part can be updated by itself, and why."""
    reasons: dict[Tensor, str] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            reason = _try(optimizer, group) if group["params"] else ""
            if reason:
                reasons |= dict.fromkeys(group["params"], reason)
    for parameter in parameters:
        if type(parameter) is not nn.Parameter:
            reasons[parameter] = f"a parameter of it is a {type(parameter).__name__}, not a plain nn.Parameter"
        elif not has_line(parameter):
            reasons[parameter] = "a parameter of it has gaps in memory"
    return reasons


def _try(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    """Why the group's parameters must be updated whole, or ''."""
    model: Tensor = max(group["params"], key=lambda parameter: parameter.dim() > 0)
    name = type(optimizer).__name__
    draw = torch.Generator().manual_seed(0)
    numbers = [torch.randn(_SHAPE, generator=draw, dtype=torch.float64).to(model.device) for _ in range(_STEPS + 1)]
    state = optimizer.state.get(model, {})
    if any(isinstance(v, Tensor) and v.numel() > 1 and v.shape != model.shape for v in state.values()):
        return f"{name} keeps a state that is not of its parameter's shape"
    begin = part_of(state, model, lambda tensor: tensor.reshape(-1)[:1].double().expand(_SHAPE))

    def updated(part: Callable[[Tensor], Tensor]) -> Tensor:
        parameter, trial = nn.Parameter(part(numbers[0]).clone()), like(optimizer)
        its, other = settings(group), settings(group)
        for each in (its, other):
            if not float(each.get("lr", _RATE)) >= _RATE:  # a warm-up begins at 0, at which nothing would show
                each["lr"] = torch.full_like(each["lr"], _RATE) if isinstance(each["lr"], Tensor) else _RATE
        trial.param_groups = [{**its, "params": [parameter]}, {**other, "params": []}]
        if begin:
            trial.state[parameter] = part_of(begin, numbers[0], part)
        for gradient in numbers[1:]:
            parameter.grad = part(gradient).clone()
            trial.step()
        first, empty = (settings(each) for each in trial.param_groups)
        if repr(first) != repr(empty):
            raise _Unfit("it counts in its groups, by what they hold")
        return parameter.detach().reshape(-1)

    try:
        whole = updated(lambda tensor: tensor)
        halves = [updated(lambda tensor: tensor.reshape(-1)[:7]), updated(lambda tensor: tensor.reshape(-1)[7:])]
    except Exception as error:
        return f"{name} does not update a part of a tensor ({type(error).__name__}: {str(error)[:80]})"
    if torch.equal(whole, numbers[0].reshape(-1)):
        return f"{name} does not update a copy of a parameter"
    if torch.allclose(whole, torch.cat(halves), rtol=0, atol=_WITHIN * float(whole.abs().max())):
        return ""
    return f"{name} updates a tensor otherwise than its parts"


class _Unfit(Exception):
    """A trial showed that parts will not do."""
