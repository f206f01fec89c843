"""Gradients that land in buckets as autograd accumulates them: what every strategy that takes buckets needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.core.errors import UsageError
from shoal.core.pieces import local_gradient


@dataclass(frozen=True)
class _Hook:
    """A transfer's own, which tells it from others."""

    work: Callable[[nn.Parameter], None]

    def __call__(self, parameter: nn.Parameter) -> None:
        gradient = local_gradient(parameter)
        if gradient is not None and gradient.requires_grad:
            raise history()
        self.work(parameter)


def history() -> UsageError:
    """The error of a backward whose gradients are to be differentiated again."""
    return UsageError(
        "a gradient that is exchanged has no history (create_graph=True)",
        do="for a penalty on gradients of inputs use torch.autograd.grad(…, inputs, create_graph=True)",
    )


def on_landing(parameter: nn.Parameter, work: Callable[[nn.Parameter], None]) -> RemovableHandle:
    """Have `work(parameter)` called whenever autograd has accumulated its gradient."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(_Hook(work))
    return handle


def by_kind(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """The parameters by dtype and device: what can lie in one flat tensor."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
    return list(kinds.values())


def second_gradient(name: str, label: str) -> UsageError:
    """The error of a parameter whose gradient is sent already when another part of it comes."""
    return UsageError(
        f"parameter {name} got a second gradient within one backward",
        where=label,
        do="use torch.utils.checkpoint with use_reentrant=False, and do not nest backward calls",
    )


def refuse_hooks(name: str, parameter: Tensor, label: str) -> None:
    """Refuse another hook on the accumulated gradient beside those of transfers."""
    if not all(isinstance(hook, _Hook) for hook in (parameter._post_accumulate_grad_hooks or {}).values()):
        raise UsageError(
            f"a hook on the accumulated gradient of {name} sees this rank's own gradient, not the global one",
            where=label,
            do="do after loss.backward() what the hook does (an optimizer's step, a look at .grad)",
        )
