"""What is looked at before an optimizer's step: that all it updates was exchanged."""

from __future__ import annotations

from functools import partial
from inspect import Signature, signature
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.core.pieces import local_gradient
from shoal.runtime.engine import Engine

_KNOWN = "_shoal_known"


def check_before_steps(optimizer: Optimizer, engine: Engine) -> None:
    """Refuse steps on gradients that were accumulated and not sent."""
    optimizer.register_step_pre_hook(partial(_check_sent, engine, signature(type(optimizer).step)))


def check_known(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse steps of parameters that are neither this model's nor another's that was given
    here.
    """
    known: set[Tensor] = optimizer.__dict__.setdefault(_KNOWN, set())
    if not known:
        optimizer.register_step_pre_hook(partial(_check_known, known))
    known.update(model.parameters())


def _check_known(known: set[Tensor], optimizer: Optimizer, *_: object) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in known and local_gradient(parameter) is not None:
                raise UsageError(
                    "the optimizer has a parameter that is no parallelised model's: each rank "
                    "would train its own",
                    where=f"param_groups[{number}], a parameter of shape {tuple(parameter.shape)}",
                    do="before parallelize make it one of the model's (self.scale = "
                    "nn.Parameter(…)); or parallelise "
                    "the model that has it, too",
                )


def _check_sent(
    engine: Engine,
    its: Signature,
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a step, or within it behind a closure's backward; `its` is the step's signature."""
    of_step = its.bind_partial(*args, **kwargs)
    closure = of_step.arguments.get("closure")
    if closure is None:
        engine.check_sent()
        return None

    def checked() -> Any:
        loss = closure()
        engine.check_sent()
        return loss

    of_step.arguments["closure"] = checked
    return of_step.args, of_step.kwargs
