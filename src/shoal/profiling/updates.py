"""An optimizer's own update, run on other tensors: on pieces of its parameters, or on a trial.

The copy has the class, the settings and the plain attributes of the original, but parameters, state
and hooks of its own, so any torch optimizer can be used. A trial shows whether it may update
pieces: it may if updates of a tensor's two halves, each by itself, equal the whole's update. An
optimizer that looks at whole tensors (Adafactor, LARS) fails this trial. It may still be used for
whole parameters if updates of two of them, each by itself, equal the update of both at once.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from shoal.contracts.probe import Layer, Probe, Trial
from shoal.core.facts import Facts, first
from shoal.core.pieces import has_line
from shoal.profiling.optimizer_methods import methods_of_state, reads_state
from shoal.profiling.sparse import is_sparse
from shoal.remote.optimizers import OptimizerForm, kind_of, name_of
from shoal.remote.wire import Data

# shapes for trials: optimizers may treat matrices and convolutions differently
_SHAPES = (4, 6), (4, 3, 2, 1)
_LARGE = 1e3
_STEPS = 3
_RATE = 1e-3  # least learning rate in a trial
# difference, as a share of the largest element in float64, up to which results count as equal
_WITHIN = 1e-9
_ITS_OWN = frozenset({"param_groups", "state"})


def like(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer of the same class and attributes, without parameters, state and hooks."""
    return made(type(optimizer), attributes(optimizer))


def made(kind: type[Optimizer], its_attributes: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer of that class with these attributes, without parameters and state."""
    optimizer: Optimizer = object.__new__(kind)
    optimizer.param_groups, optimizer.state = [], defaultdict(dict)
    vars(optimizer).update(its_attributes)
    return optimizer


def form_of(optimizer: Optimizer) -> OptimizerForm:
    """Describe the optimizer for another host (UsageError if that host cannot know its class)."""
    return OptimizerForm(name_of(type(optimizer)), Data(attributes(optimizer)))


def made_of(form: OptimizerForm) -> Optimizer:
    """Make an optimizer from another host's description, without parameters and state."""
    return made(kind_of(form.kind), form.attributes.value)


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Copy its attributes, tensors cloned, without hooks. A scaler sets some for one step."""
    methods = {
        name
        for name, value in vars(optimizer).items()
        if isinstance(value, MethodType | FunctionType)
    }
    # methods that a user has replaced
    methods |= {name for name in vars(optimizer) if callable(getattr(type(optimizer), name, None))}
    return {
        name: OrderedDict() if name.endswith("_hooks") else _clone(value)
        for name, value in vars(optimizer).items()
        if name not in _ITS_OWN | methods and not name.startswith("_shoal")
    }


def make_step(
    copy: Optimizer, groups: Sequence[Mapping[str, Any]], plain_attributes: Mapping[str, Any]
) -> None:
    """Have a copy make a step with these groups, parameters, settings and attributes."""
    for name in vars(copy).keys() - plain_attributes.keys() - _ITS_OWN:
        delattr(copy, name)
    vars(copy).update(plain_attributes)
    copy.param_groups = [dict(group) for group in groups]
    step_without_hooks(copy)


def step_without_hooks(copy: Optimizer) -> None:
    """Run a copy's step without the hooks of register_optimizer_step_post_hook."""
    step: Any = type(copy).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(copy)


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a group's present settings."""
    return {name: _clone(value) for name, value in group.items() if name != "params"}


def _clone(value: Any) -> Any:
    """Clone the tensors in a value, also in containers (a pair of betas)."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def part_of(
    state: Mapping[str, Any], parameter: Tensor, part: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Cut tensors of the parameter's shape in its state to this part, and copy the rest."""
    return {
        name: part(value).clone()
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else copy.deepcopy(value)
        for name, value in state.items()
    }


@dataclass(frozen=True)
class UpdateFacts(Facts):
    """Reasons why a layer's parameters cannot be updated on other ranks, or in parts."""

    whole: str = ""  # why its optimizer cannot update parts of its parameters by themselves
    joint: str = ""  # why not even whole parameters, each by itself
    # whether a gradient comes although no PyTorch function was seen to read the parameter: C++
    # code?
    unread: bool = False


@final
class UpdateProbe(Probe):
    """Tries the optimizers on parts of parameters."""

    def measure(self, layer: Layer, trial: Trial) -> UpdateFacts:
        together = trial.once(_together)
        found = [together[p] for p in layer.parameters.values() if p in together]
        return UpdateFacts(
            whole=first(why.whole for why in found),
            joint=first(why.joint for why in found),
            unread=bool(layer.parameters.keys() & trial.step.ready_s.keys() - trial.read),
        )


def _together(trial: Trial) -> dict[Tensor, JointUpdate]:
    sparse = {
        parameter
        for layer in trial.layers
        for name, parameter in layer.parameters.items()
        if is_sparse(layer, name, trial.step)
    }
    return whole_updates(trial.sample.model.parameters(), trial.optimizers, sparse)


@dataclass(frozen=True)
class JointUpdate:
    """Reasons why elements of a parameter must be updated together; "" if they need not."""

    whole: str  # why no part of it can be updated by itself
    joint: str = ""  # why even the whole parameter cannot be


def whole_updates(
    parameters: Iterable[Tensor],
    optimizers: Iterable[Optimizer],
    sparse: Set[Tensor] = frozenset(),
) -> dict[Tensor, JointUpdate]:
    """Return the parameters with no part that can be updated by itself, and why.

    The `sparse` parameters have gradients that are sparse tensors.
    """
    groups = [
        (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        if group["params"]
    ]
    found = [
        (why, held)
        for optimizer, group in groups
        for held, is_sparse in _by_layout(group["params"], sparse)
        for why in [_try(optimizer, group, is_sparse)]
    ]
    reasons = {parameter: why for why, held in found if why.whole for parameter in held}
    listed = list(parameters)
    # parameters without an optimizer may join this one
    if whole := [why for why, _ in found if why.whole]:
        reasons |= dict.fromkeys(set(listed).difference(*(held for _, held in found)), whole[0])
    overlapping = _overlapping([p for p in listed if type(p) is nn.Parameter])
    for parameter in listed:
        reason = ""
        if type(parameter) is not nn.Parameter:
            reason = f"a parameter of it is a {type(parameter).__name__}, not a plain nn.Parameter"
        elif not has_line(parameter):
            reason = "a parameter of it has gaps in memory"
        elif parameter in overlapping:
            reason = "a parameter of it shares memory with another one, "
            reason += "which two owners would both update"
        if reason:
            reasons[parameter] = JointUpdate(reason, reason)
    return reasons


def _by_layout(
    parameters: Sequence[Tensor], sparse: Set[Tensor]
) -> list[tuple[list[Tensor], bool]]:
    """Split parameters into the ones with dense and with sparse gradients, without empty groups."""
    halves = [([p for p in parameters if (p in sparse) == kind], kind) for kind in (False, True)]
    return [(held, kind) for held, kind in halves if held]


def _overlapping(parameters: Sequence[Tensor]) -> set[Tensor]:
    """Return the parameters that share memory with another of them, as after `a.data = b.data`."""
    found: set[Tensor] = set()
    # the end of the memory that has been seen, and the parameter there
    reach: dict[torch.device, tuple[int, Tensor]] = {}
    for parameter in sorted((p for p in parameters if p.numel()), key=lambda p: p.data_ptr()):
        end, other = reach.get(parameter.device, (0, parameter))
        if parameter.data_ptr() < end:
            found |= {parameter, other}
        reach[parameter.device] = max(
            (end, other),
            (parameter.data_ptr() + parameter.nbytes, parameter),
            key=lambda pair: pair[0],
        )
    return found


def _try(optimizer: Optimizer, group: Mapping[str, Any], sparse: bool = False) -> JointUpdate:
    """Return why the group's parameters must be updated together.

    Their gradients are sparse tensors if `sparse` is set.
    """
    matrix, convolution = _SHAPES
    trials: list[tuple[Sequence[int], _Gradient]] = [
        (matrix, gradient) for gradient in (_draw, _large, _across)
    ]
    if any(parameter.dim() > len(matrix) for parameter in group["params"]):
        trials.append((convolution, _draw))
    found = [_tried(optimizer, group, *trial, sparse) for trial in trials]
    whole, joint = (
        next(filter(None, reasons), "")
        for reasons in ([t.whole for t in found], [t.joint for t in found])
    )
    if not joint:
        tensor = _TrialTensor.of(optimizer, group, matrix, _draw, sparse)
        joint = _used_by_methods(optimizer, tensor)
    return JointUpdate(whole or joint, joint)


def _used_by_methods(optimizer: Optimizer, tensor: _TrialTensor) -> str:
    """Return why an optimizer's own methods need the state of whole parameters, if any does."""
    trial = tensor.trained()
    names = [name for name in methods_of_state(type(optimizer)) if reads_state(trial, name)]
    kind = type(optimizer).__name__
    methods = ", ".join(f"{kind}.{name}()" for name in names)
    return f"{methods} would not find the state that it uses" if names else ""


# makes a gradient from random numbers and a parameter
_Gradient = Callable[[Tensor, Tensor], Tensor]


def _draw(numbers: Tensor, parameter: Tensor) -> Tensor:
    return numbers


def _large(numbers: Tensor, parameter: Tensor) -> Tensor:
    """Return large gradients, because some optimizers clip."""
    return _LARGE * numbers


def _across(numbers: Tensor, parameter: Tensor) -> Tensor:
    """Return gradients at right angles to each row, as before a normalisation, for AdamP."""
    along = (numbers * parameter).sum(1, keepdim=True) / parameter.square().sum(1, keepdim=True)
    return numbers - along * parameter


_Part = Callable[[Tensor], Tensor]  # cuts a part from a tensor


@dataclass(frozen=True)
class _TrialTensor:
    """A tensor that copies of an optimizer update, whole or in parts."""

    optimizer: Optimizer
    group: Mapping[str, Any]
    begin: Tensor
    gradients: Sequence[Tensor]  # one a step
    # state at the beginning; None if its shape is not its parameter's
    state: Mapping[Any, Any] | None
    sparse: bool  # whether its gradients are sparse tensors

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        shape: Sequence[int],
        gradient: _Gradient,
        sparse: bool = False,
    ) -> _TrialTensor:
        """Make a trial tensor of this shape, with such gradients, in the state of a parameter."""
        model: Tensor = max(group["params"], key=lambda parameter: parameter.dim() > 0)
        draw = torch.Generator("cpu").manual_seed(0)
        begin, *drawn = (
            torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu")
            for _ in range(_STEPS + 1)
        )
        gradients = [gradient(numbers, begin).to(model.device) for numbers in drawn]
        state = optimizer.state.get(model, {})
        large = (v for v in state.values() if isinstance(v, Tensor) and v.numel() > 1)
        shaped = (
            part_of(state, model, lambda tensor: tensor.reshape(-1)[:1].double().expand(shape))
            if all(value.shape == model.shape for value in large)
            else None
        )
        return cls(optimizer, group, begin.to(model.device), gradients, shaped, sparse)

    def updated(self, *parts: _Part, beside: bool = False) -> Tensor:
        """Update parts of the tensor, each as a parameter, by one optimizer.

        With `beside`, the optimizer copies its attributes from another one without these
        parameters, as in training.
        """
        parameters = [nn.Parameter(part(self.begin).clone()) for part in parts]
        trial, real = like(self.optimizer), like(self.optimizer)
        trial.param_groups = [
            {**_with_rate(self.group), "params": parameters},
            {**_with_rate(self.group), "params": []},
        ]
        real.param_groups = [{**settings(group), "params": []} for group in trial.param_groups]
        if self.state:
            for parameter, part in zip(parameters, parts, strict=True):
                trial.state[parameter] = part_of(self.state, self.begin, part)
        for gradient in self.gradients:
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = self._in_layout(part(gradient))
            if beside:
                vars(trial).update(attributes(real))
                step_without_hooks(real)
            step_without_hooks(trial)
        first, empty = (settings(group) for group in trial.param_groups)
        if repr(first) != repr(empty):
            raise _Unfit("it counts in its groups, by what they hold")
        return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])

    def trained(self) -> Optimizer:
        """Return a copy of the optimizer that has made its steps of the tensor."""
        parameter = nn.Parameter(self.begin.clone())
        trial = like(self.optimizer)
        trial.param_groups = [{**_with_rate(self.group), "params": [parameter]}]
        if self.state:
            trial.state[parameter] = part_of(self.state, self.begin, lambda tensor: tensor)
        for gradient in self.gradients:
            parameter.grad = self._in_layout(gradient)
            step_without_hooks(trial)
        return trial

    def _in_layout(self, gradient: Tensor) -> Tensor:
        """Return a gradient in the layout that the optimizer expects."""
        return gradient.to_sparse(1) if self.sparse else gradient.clone()

    def differs(self, one: _Part, other: _Part, together: Tensor) -> bool:
        """Return whether two parts updated by themselves differ from both updated together."""
        return _unlike(together, torch.cat([self.updated(one), self.updated(other)]))


def _with_rate(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings, with a learning rate that moves values: a warm-up begins at 0."""
    copied = settings(group)
    if not float(copied.get("lr", _RATE)) >= _RATE:
        rate = copied["lr"]
        copied["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, Tensor) else _RATE
    return copied


def _unlike(one: Tensor, other: Tensor) -> bool:
    return not torch.allclose(one, other, rtol=0, atol=_WITHIN * float(one.abs().max()))


def _tried(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    shape: Sequence[int],
    gradient: _Gradient,
    sparse: bool,
) -> JointUpdate:
    """Return why they must, as a tensor of this shape with such gradients shows."""
    name = type(optimizer).__name__
    if _needs_closure(optimizer):
        reason = f"{name} does not update a part of a tensor: each step needs a closure"
        return JointUpdate(reason, reason)
    tensor = _TrialTensor.of(optimizer, group, shape, gradient, sparse)
    whole = joint = ""
    try:
        together = tensor.updated(lambda t: t[:2], lambda t: t[2:])
        if torch.equal(together, tensor.begin.reshape(-1)):
            joint = f"{name} does not update a copy of a parameter"
        elif tensor.differs(lambda t: t[:2], lambda t: t[2:], together):
            joint = f"{name} updates several tensors otherwise than each by itself"
        elif _unlike(together, tensor.updated(lambda t: t[:2], lambda t: t[2:], beside=True)):
            joint = f"{name} keeps a state of parameters outside of its `state`"
    except Exception as error:
        joint = (
            f"{name} does not update a tensor by itself ({type(error).__name__}: {str(error)[:80]})"
        )
    try:
        if tensor.state is None:
            whole = f"{name} keeps a state that is not of its parameter's shape"
        elif tensor.differs(
            lambda t: t.reshape(-1)[:7], lambda t: t.reshape(-1)[7:], tensor.updated(lambda t: t)
        ):
            whole = f"{name} updates a tensor otherwise than its parts"
    except Exception as error:
        whole = (
            f"{name} does not update a part of a tensor ({type(error).__name__}: {str(error)[:80]})"
        )
    return JointUpdate(whole or joint, joint)


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return whether a step cannot be made without a closure, as in LBFGS."""
    parameters = inspect.signature(type(optimizer).step).parameters
    return "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty


class _Unfit(Exception):
    """A trial showed that parts will not do."""
