"""Checks of a saved state before an object takes it: its class, its form, its numbers.

torch's own optimizers and schedulers take any state of the right length: AdamW's goes into SGD, and
a text into a learning rate. The next step fails then, or is wrong. Objects that torch does not
know are left to their own `load_state_dict`. Guarded by tests/front/test_state_checks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.core.errors import UsageError

# states of torch's optimizers that have the shape of their parameter
_LIKE_PARAMETER = {
    *("ax", "acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq"),
    *("momentum_buffer", "prev", "square_avg", "step_size", "sum"),
}


def class_of(value: Any) -> str:
    """Return the class that a checkpoint names; '' if classes of such objects are not compared."""
    return type(value).__name__ if isinstance(value, Optimizer | LRScheduler) else ""


def check_class(value: Any, saved: str, path: str) -> None:
    """Refuse the state of an object of another class.

    A class of the script's own may also derive from the saved one. Adam and AdamW are different,
    though one of torch's classes derives from the other.

    Args:
        value: the object that is to take the state.
        saved: the name of the class that was saved; '' if the checkpoint does not say it.
        path: the way to the object, for the message.
    """
    own = class_of(value)
    if not saved or saved == own:
        return
    bases = {kind.__name__ for kind in type(value).__mro__}
    if not _is_torchs(value) and saved in bases:
        return
    raise UsageError(
        f"{path} was of another class when it was saved",
        got=own or type(value).__name__,
        expected=saved,
        do=f"make {path} of the class {saved} again, or leave it out to begin anew",
    )


def check_optimizer(optimizer: Optimizer, saved: Any, path: str) -> None:
    """Refuse a state that no optimizer has given, as `stateful` names its parameters."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        raise wrong_form(path, saved, "the state of an optimizer")
    groups = saved.get("param_groups")
    if not isinstance(groups, list):
        raise wrong_form(path, groups, "a list of parameter groups")
    for number, group in enumerate(groups):
        names = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise wrong_form(f"{path}: group {number}", group, "names of parameters")
    own = [len(group["params"]) for group in optimizer.param_groups]
    lengths = [len(group["params"]) for group in groups]
    if sum(own) == sum(lengths) and own != lengths:
        raise UsageError(
            f"the optimizer {path} has other groups of parameters than when it was saved",
            got=f"groups of {', '.join(map(str, own))} parameters",
            expected=f"groups of {', '.join(map(str, lengths))}",
            do="give it the same groups",
        )
    if _is_torchs(optimizer):
        for current, group in zip(optimizer.param_groups, groups, strict=False):
            _check_options(optimizer.defaults, current, group, path)


def _check_options(
    defaults: Mapping[str, Any], own: Mapping[str, Any], saved: Mapping[str, Any], path: str
) -> None:
    """Refuse options of a group that torch's optimizer cannot use, or that lack a number."""
    numbers = {name for name, value in defaults.items() if _is_number(value) or _is_list(value)}
    if missing := sorted(numbers - saved.keys()):
        raise wrong_form(path, f"no {', '.join(missing)}", "the options of such an optimizer")
    for name in own.keys() & saved.keys() - {"params"}:
        _check_alike(own[name], saved[name], f"{path}: {name}")


def check_parameter(optimizer: Optimizer, parameter: Tensor, state: Any, where: str) -> None:
    """Refuse a parameter's state that torch would take, and that its step could not use."""
    if not _is_torchs(optimizer):
        return
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise wrong_form(where, state, "the state of a parameter")
    for key, value in state.items():
        if key == "momentum_buffer" and value is None:
            continue  # SGD has none before its first step
        if key in _LIKE_PARAMETER:
            shape = value.shape if isinstance(value, Tensor) else None
            if shape != parameter.shape:
                got = f"{type(value).__name__} {'' if shape is None else list(shape)}"
                raise wrong_form(f"{where}/{key}", got, f"a tensor {list(parameter.shape)}")
        elif key == "step":
            _check_alike(0, value, f"{where}/{key}")


def check_plain(value: Any, saved: Any, path: str) -> None:
    """Refuse a state of one of torch's own schedulers or scalers that has another form."""
    if not _is_torchs(value) or isinstance(value, nn.Module):
        return
    if not isinstance(saved, Mapping):
        raise wrong_form(path, saved, f"the state of a {type(value).__name__}")
    own = value.state_dict()
    for name in own.keys() & saved.keys():
        _check_alike(own[name], saved[name], f"{path}.{name}")


def _check_alike(own: Any, saved: Any, where: str) -> None:
    """Refuse text in place of numbers, and so on for lists and dicts. Let other values pass."""
    if _is_number(own):
        if not _is_number(saved):
            raise wrong_form(where, saved, "a number")
    elif isinstance(own, bool):
        if isinstance(saved, str | Mapping) or _is_list(saved):
            raise wrong_form(where, saved, "True or False")
    elif isinstance(own, Mapping):
        if not isinstance(saved, Mapping):
            raise wrong_form(where, saved, "a dict")
    elif isinstance(own, tuple):
        if not _is_list(saved) or len(saved) != len(own):
            raise wrong_form(where, saved, f"{len(own)} values")
        for one, other in zip(own, saved, strict=True):
            _check_alike(one, other, where)
    elif isinstance(own, list):
        if not _is_list(saved):
            raise wrong_form(where, saved, "a list")
        for item in saved if own else ():
            _check_alike(own[0], item, where)


def wrong_form(where: str, got: Any, expected: str) -> UsageError:
    """Return the error about a state that no such object has given."""
    return UsageError(
        f"{where} does not take what was saved of it",
        got=got[:200] if isinstance(got, str) else f"{type(got).__name__} {str(got)[:80]}",
        expected=expected,
        do="load another checkpoint, or leave it out",
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_torchs(value: Any) -> bool:
    return type(value).__module__.startswith("torch.")
