"""Checks before an optimizer's step: whether gradients were exchanged, and which scaler steps."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from inspect import Signature
from types import FrameType
from typing import Any, final

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.core.pieces import local_gradient
from shoal.optim.closure_loss import LossOfRanks

_STEP = GradScaler.step.__code__
_MOST_FRAMES = 24  # callers of a step
_SELDOM = 64  # steps of a fused optimizer on a device, from one look to the next

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def check_optimizer(optimizer: Any) -> None:
    """Refuse anything but a torch optimizer. The error names the optimizer inside a wrapper."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if isinstance(optimizer, Optimizer) and isinstance(hooks, OrderedDict):
        return
    held: Mapping[str, Any] = optimizer if isinstance(optimizer, Mapping) else {}
    held = held or getattr(optimizer, "__dict__", {})
    inside = [name for name, value in held.items() if isinstance(value, Optimizer)]
    kind = type(optimizer).__name__
    do = "call parallelize(model, loss_fn, optimizer, sample=(x, y))"
    if isinstance(optimizer, Mapping) and inside:
        do = "give a list of them: list(optimizers.values())"
    elif inside:
        do = f"give the optimizer inside, as wrapper.{inside[0]}, and step the wrapper as before"
    elif isinstance(optimizer, Optimizer):
        do = f"have {kind}.__init__ call super().__init__(params, defaults), or give the optimizer "
        do += "that it wraps"
    raise UsageError(
        "the optimizer is not a torch optimizer"
        if not isinstance(optimizer, Optimizer)
        else "the optimizer was not set up by torch.optim.Optimizer.__init__, so a step of it "
        "cannot be followed",
        got=kind,
        do=do,
    )


def check_parameters(optimizer: Optimizer, known: Iterable[set[Tensor]]) -> None:
    """Refuse steps of parameters outside these sets, which belong to parallelised models."""
    known = list(known)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if local_gradient(parameter) is None or any(parameter in model for model in known):
                continue
            raise UsageError(
                "the optimizer has a parameter that is no parallelised model's: each rank "
                "would train its own",
                where=f"param_groups[{number}], a parameter of shape {tuple(parameter.shape)}",
                do="before parallelize make it one of the model's (self.scale = "
                "nn.Parameter(…)), or parallelise "
                "the model that has it, too; or give parallelize left_alone=[the parameter], where "
                "your program itself keeps it right among ranks",
            )


def checked_step(
    declared: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    check: Callable[[], None],
    of_ranks: LossOfRanks | None = None,
) -> Arguments | None:
    """Check before a step, or after a closure's backward. Return the step's arguments then.

    `declared` is the signature of the step. `of_ranks` gives the closure's loss over all ranks.
    """
    step = declared.bind_partial(*args, **kwargs)
    closure = step.arguments.get("closure")
    if closure is None:
        check()
        return None

    def checked() -> Any:
        loss = closure() if of_ranks is None else of_ranks.of(closure)
        check()
        return loss

    step.arguments["closure"] = checked
    return step.args, step.kwargs


@final
class SeenScaler:
    """The state of the GradScaler that last stepped an optimizer, as numbers by name.

    Gradients are summed while they are scaled, so ranks with unlike scales train different models.
    An optimizer does not know its scaler. But `scaler.step(optimizer)` calls `optimizer.step()`, so
    the scaler is found among the callers of a step. Ranks compare its state in the next backward
    (engine/common_state.py). To read it costs nothing, because the scaler has waited for the device
    just before. It has not if the optimizer is a fused one: then a look is taken once in many
    steps.
    """

    def __init__(self) -> None:
        self.state: Mapping[str, float] = {}
        self._steps = 0

    def look(self, optimizer: Optimizer) -> None:
        """Find the scaler among the callers of a step, and note its state."""
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_MOST_FRAMES):
            if frame is None or frame.f_code is _STEP:
                break
            frame = frame.f_back
        if frame is None or frame.f_code is not _STEP:
            return
        scaler: GradScaler = frame.f_locals["self"]
        waits = getattr(optimizer, "_step_supports_amp_scaling", False) and scaler._device != "cpu"
        if not waits or self._steps % _SELDOM == 0:
            state = scaler.state_dict() or {"scale": 1.0}  # without a state, it is disabled
            self.state = {name.lstrip("_"): float(value) for name, value in state.items()}
        self._steps += 1
