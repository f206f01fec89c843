"""Border of the model as autograd sees it: gradients are weighed in, and weighed back out.

    forward     x ──▶ [inward] ──▶ model ──▶ [outward] ──▶ output
    backward   dx ◀──  ÷ w    ◀── model ◀──    × w    ◀── d output    here the engine's round opens
                                    │
                               parameters      × base, however their gradient came

The base is this rank's weight in the global mean (weights.py), for the call by which backward comes
in first. Usually it travels with the gradients that the engine sends (Engine.called), and no rank
waits for the others' rows. Otherwise a hook on each parameter multiplies the gradient from
autograd. A layer that sends gradients during backward does it there (contracts/transfer.py,
`Rounds.weighs`). So a term of the loss is weighed by whatever way it reaches a parameter: an
attribute, a hook, a penalty.

w is 1 except in two cases. Another call in the same backward may have other shares of rows, and a
loss may weigh itself. Then w is that weight over the base. Because it is divided out again, every
parameter is weighed once, even if one model feeds another (a GAN) or itself. A gradient with
respect to inputs is the same as without shoal. A gradient penalty makes a graph of backward itself.
The same identities form its border, with their places changed.

This costs two calls for each tensor. If a call is not the only one until backward, it costs one
more call for each parameter. Guarded by tests/equivalence/test_rows.py, test_backward.py and
test_terms.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.batch import DEPTH, OPAQUE
from shoal.contracts.loss_attributes import keep, kept_values_of
from shoal.contracts.row_weights import OwnHook, accumulates
from shoal.core.errors import UsageError
from shoal.core.names import pins
from shoal.engine.engine import Engine
from shoal.engine.weights import Weight
from shoal.pipeline.absent_tensors import Absent
from shoal.pipeline.output import EndOutput
from shoal.remote.stage_output import StageOutput
from shoal.strategies.landing import history
from shoal.tensors.cut import is_cut
from shoal.tensors.cut_output import CutOutput


@final
class Border:
    """Border at which gradients enter one parallelised model, and leave it."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.engine = engine
        # the model's hooks hold this object, so it must not hold the model
        self._model = ref(model)
        self._kind = type(model)
        self._given = [
            _NotedParameter(name, p, p.dtype, p.device, None if is_cut(p) else p.stride())
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
        self._checked = -1  # autograd's number of the last backward for which the model was checked
        self._known = {id(p) for p in model.parameters()}
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        # Autograd makes a parameter's accumulator on first use, and tells by node whether a
        # backward will run it.
        self._accumulators = [accumulator(p) for p in self._trainable]
        self._num_weighed = sum(not is_cut(p) for p in self._trainable)
        # every crossing depends on it: see `_trains`
        self.anchor = torch.zeros((), dtype=torch.float32, requires_grad=True, device="cpu")
        self._anchored = accumulator(self.anchor)
        # name of a loss that weighs itself, if a backward of another loss needs a warning
        self.awaited_loss = ""

    def check(self) -> None:
        """Raise UsageError if a frozen parameter trains now, or one has another type.

        It is also raised if the model itself is of another class, as FSDP makes it.
        """
        if (model := self._model()) is not None and type(model) is not self._kind:
            raise UsageError(
                f"the model is of another class than when it was parallelised: {type(model)}",
                expected=str(self._kind),
                do="leave out fully_shard(model), or whatever else changes it: parallelize does "
                "its work",
            )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"parameter {name} was frozen when the model was parallelised, and trains now",
                    where=name,
                    do="parallelise while it is trainable and freeze it afterwards, until it is to "
                    "train",
                )
        for noted in self._given:
            noted.check()

    @property
    def trains(self) -> bool:
        """Whether any parameter is to be trained now, rather than frozen."""
        return any(parameter.requires_grad for parameter in self._trainable)

    def outward(self, output: Any, weight: Weight) -> Any:
        """Return the output with its tensors through the border.

        Unknown classes are changed in place.
        """
        return _map_tensors(
            output, lambda tensor: _cross(tensor, BorderCrossing(self, weight, outward=True)), DEPTH
        )

    def pass_kept_outward(self, weight: Weight) -> None:
        """Pass tensors that modules have kept in a call through the border, in place."""
        if (model := self._model()) is None:
            return

        def change(tensor: Tensor) -> Tensor:
            new = tensor.grad_fn is not None and type(tensor.grad_fn).__name__ != _CROSSED
            return _cross(tensor, BorderCrossing(self, weight, outward=True)) if new else tensor

        for module in model.modules():
            for name, value in kept_values_of(module).items():
                keep(module, name, _map_tensors(value, change, 0))

    def inward(self, inputs: Any, weight: Weight) -> Any:
        """Return the inputs, through the border."""
        return _map_tensors(
            inputs, lambda tensor: _cross(tensor, BorderCrossing(self, weight, outward=False)), 0
        )

    def weight(self, weight: Weight) -> float | None:
        """Open the engine's round for a gradient at the border.

        Return the gradient's factor, or None.
        """
        if not self._trains():
            return None
        task = torch._C._current_graph_task_id()
        if task != self._checked:
            self._check_whole()
            self._checked = task
        backward = self.engine.begin()  # gradient 1
        if self.awaited_loss and not backward.was_called:
            self._warn_of_loss()
        if backward.weight is None:
            self.weigh_parameters()
        if weight.base is not weight:  # a loss that weighs itself
            backward.base(weight)
            return weight.over(weight.base)
        relative = weight.over(backward.base(weight))
        if relative is not None:
            self._refuse_hooks()
        return relative

    def _warn_of_loss(self) -> None:
        """Warn, once, that the loss of a backward is not the one that weighs itself."""
        self.awaited_loss, said = "", self.awaited_loss
        warnings.warn(
            f"a backward has come whose loss was not made by the {said}",
            stacklevel=2,
        )

    def _refuse_hooks(self) -> None:
        """Refuse forward hooks if two calls with different weights meet, because a hook may have
        kept values of either.
        """
        model = self._model()
        for name, module in model.named_modules() if model is not None else ():
            if module is not model and module._forward_hooks:
                raise UsageError(
                    "one backward has gradients of two calls of the model, in which ranks have "
                    "unlike shares of the rows, and a forward hook may keep of either",
                    where=f"module {name or type(model).__name__}",
                    do="call backward once for each call of the model, or take the hook away",
                )

    def weighs(self, call: Weight | None = None) -> float | None:
        """Return the factor of this rank's rows for gradients that leave it in this backward, or
        None.

        `call` is the call that the backward belongs to, if it is known.
        """
        return self.engine.weighs(call) if self._trains() else None

    def weigh_parameters(self) -> None:
        """Multiply each parameter's gradient as it comes from now on, if it is to be weighed."""
        hooks = self.engine.hooks
        if len(hooks) == self._num_weighed:
            return
        for parameter, accumulator in zip(self._trainable, self._accumulators, strict=True):
            # parameters that are cut are weighed on the way; a frozen one may be thawed later
            weighed = not is_cut(parameter) and parameter.requires_grad
            if weighed and accumulator not in hooks:
                hooks[accumulator] = parameter.register_hook(_Weighs(self.engine, accumulator))

    def _check_whole(self) -> None:
        """Raise UsageError if the model trains other parameters than when it was parallelised.

        Their gradients would not be exchanged.

        It is called in backward, because during forward `torch.func.functional_call` may replace
        parameters.
        """
        if (model := self._model()) is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            here = {
                id(parameter): name
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
            gone = [
                noted.name
                for noted in self._given
                if id(noted.parameter) not in here and noted.parameter.requires_grad
            ]
        added = [name for number, name in here.items() if number not in self._known]
        for name in gone[:1] or added[:1]:
            change = "is no longer the model's" if gone else "is new"
            raise UsageError(
                f"parameter {name} {change}: the model was changed after parallelize",
                where=name,
                do="add, replace and tie layers before parallelize; freeze what is to be taken out "
                "later",
            )

    def _trains(self) -> bool:
        """Return whether the running backward is for the model's parameters."""
        runs = torch._C._will_engine_execute_node
        try:
            if any(runs(node) for node in self._accumulators):
                self._check_history()
                return True
        except RuntimeError as error:
            layer = self._asked_for().rpartition(".")[0]
            raise UsageError(
                "torch.autograd.grad with respect to parameters gives a rank its own gradients, "
                "which nobody exchanges",
                where=f"layer {layer}" if layer else "",
                do="use loss.backward() and read .grad; with respect to inputs torch.autograd.grad "
                "is right. If an autograd.Function asks for them in its own backward, as an "
                f"adjoint does, and the layer is cut: give parallelize {pins([layer])}, and so for "
                "every layer that it calls",
            ) from error
        # The accumulators of tensors inside reentrant checkpointing run in a backward of their own
        # within this one. This, too, is a backward of everything, and the anchor takes part in it.
        return runs(self._anchored) and any(p.requires_grad for p in self._trainable)

    def _check_history(self) -> None:
        """Raise UsageError if a gradient is to have a history, of which a rank has only a part."""
        if torch.is_grad_enabled() and any(map(is_cut, self._trainable)):
            raise history()

    def _asked_for(self) -> str:
        """Return the name of a parameter that the running torch.autograd.grad captures."""
        for noted, node in zip(self._given, self._accumulators, strict=True):
            try:
                torch._C._will_engine_execute_node(node)
            except RuntimeError:
                return noted.name
        return ""


@final
@dataclass(frozen=True)
class _Weighs(OwnHook):
    """Hook on a parameter that weighs its gradient."""

    engine: Engine
    accumulator: Any

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None or not accumulates([self.accumulator]):
            return None
        weight = self.engine.weighs()
        return None if weight is None else grad * weight


@final
@dataclass(frozen=True)
class _NotedParameter:
    """Trainable parameter as it was when the model was parallelised."""

    name: str
    parameter: Tensor
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] | None  # None for a part, which has strides of its own

    def check(self) -> None:
        """Raise UsageError if the parameter was converted."""
        with torch._C.DisableTorchFunctionSubclass():
            plain, trains = self.parameter, self.parameter.requires_grad
            present = plain.dtype, plain.device, None if self.strides is None else plain.stride()
        then = self.dtype, self.device, self.strides
        if trains and present != then:
            raise UsageError(
                f"parameter {self.name} was converted after parallelize",
                where=self.name,
                got="{} on {}, with strides {}".format(*present),
                expected="{} on {}, with strides {}, as it was then".format(*then),
                do="convert the model, model.to(...), before parallelize; for mixed precision use "
                "torch.autocast",
            )


@final
@dataclass(frozen=True)
class BorderCrossing:
    """Way of one call over the border, in one direction."""

    border: Border
    weight: Weight
    outward: bool

    def back(self, grad: Tensor) -> Tensor:
        """Return the gradient, weighed. If it is part of a graph, gradients that come back through
        it are weighed, too.
        """
        weight = self.border.weight(self.weight)
        if weight is not None and self.outward:
            grad = grad * weight
        elif weight:  # the gradient is 0 if the weight is
            grad = grad / weight
        return (
            _cross(grad, BorderCrossing(self.border, self.weight, not self.outward))
            if grad.requires_grad
            else grad
        )


_CROSSED = "_IdentityBackward"  # class of the node that has made a tensor which has crossed


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, crossing: BorderCrossing) -> Tensor:
        ctx.crossing = crossing
        # An output may be changed in place, which torch refuses for a view. A change of an input in
        # place should be refused, because the caller's own tensor would change without its history.
        return value.detach() if crossing.outward else value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.crossing.back(grad), None, None


def _cross(tensor: Tensor, crossing: BorderCrossing) -> Tensor:
    # a tensor of another rank's layers, in an object that the model returns
    if isinstance(tensor, Absent):
        return tensor
    if isinstance(tensor, EndOutput):
        return tensor.over(lambda loss: _cross(loss, crossing))
    if isinstance(tensor, StageOutput):
        return tensor.over(lambda ticket: _cross(ticket, crossing))
    # tensors made from it cross the border, with this rank's rows alone
    if isinstance(tensor, CutOutput):
        return tensor.over(lambda made: _cross(made, crossing) if made.requires_grad else made)
    crossed: Tensor = _Identity.apply(tensor, crossing.border.anchor, crossing)  # type: ignore[no-untyped-call]
    return crossed


def accumulator(parameter: Tensor) -> Any:
    """Return the node of autograd's graph that adds to a parameter's `.grad`."""
    # takes the part's node if the parameter is cut
    with torch._C.DisableTorchFunctionSubclass():
        function = parameter.view_as(parameter).grad_fn
    assert function is not None
    return function.next_functions[0][0]


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor], depth: int) -> Any:
    """Return the value with every tensor that needs a gradient changed, each once.

    Containers are rebuilt if anything in them changed. Items and attributes of other objects are
    set in place, down to `depth` levels.
    """
    done: dict[int, Any] = {}
    originals: list[Any] = []  # kept alive, so that no id is used twice

    def tree(value: Any, depth: int) -> Any:
        leaves, form = pytree.tree_flatten(value)
        changed = [leaf_of(leaf, depth) for leaf in leaves]
        if all(new is old for new, old in zip(changed, leaves, strict=True)):
            return value
        return pytree.tree_unflatten(changed, form)

    def leaf_of(leaf: Any, depth: int) -> Any:
        if id(leaf) not in done:
            originals.append(leaf)
            done[id(leaf)] = leaf
            if isinstance(leaf, Tensor):
                new = change(leaf) if leaf.requires_grad else leaf
                done[id(leaf)] = done[id(new)] = new
            elif depth and not isinstance(leaf, OPAQUE):
                inside(leaf, depth - 1)
        return done[id(leaf)]

    def inside(holder: Any, depth: int) -> None:
        if isinstance(holder, MutableMapping):
            for key, item in list(holder.items()):
                new = tree(item, depth)
                if new is not item:
                    holder[key] = new
        for name in {
            **getattr(holder, "__dict__", {}),
            **getattr(holder, "__dataclass_fields__", {}),
        }:
            old = getattr(holder, name, None)
            new = tree(old, depth)
            if new is not old:
                object.__setattr__(holder, name, new)

    try:
        return tree(value, depth)
    # these functions refer to one another, and would keep outputs alive until the garbage collector
    # runs
    finally:
        done.clear()
        originals.clear()
