"""Gradients that land in buckets as autograd accumulates them: what every strategy that takes buckets needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.core.errors import UsageError
from shoal.core.pieces import local_gradient

_LEAST = 2.0**-60  # multiplied and divided by, a number keeps its bits (float16: becomes 0); added to 1 it is nothing


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


SHARES = 2  # numbers that go with a sum: how many ranks have a share other than 1, and what their shares are together


def weigh(gradients: Sequence[Tensor], shares: Tensor, share: float) -> None:
    """Multiply what a rank adds to a sum by its share, which goes along in `shares` where it is not 1, as mostly."""
    shares.zero_()
    if share != 1:
        shares[0], shares[1] = 1, share
        factor = at_least(float(shares[1].real))  # as exactly as the tensor holds it
        for gradient in gradients:
            gradient.mul_(factor)


def divide(sums: Sequence[Tensor], shares: Tensor, ranks: int) -> None:
    """Divide sums over ranks by the mean of all shares, of which those that are not 1 have come with them."""
    others, total = shares.real.tolist()
    if others:
        mean = at_least((ranks - others + total) / ranks)
        for each in sums:
            each.div_(mean)


def at_least(share: float) -> float:
    """A share that is no 0: where no rank has any rows, what does not come of rows, as a penalty, is as it was."""
    return share if share > _LEAST else _LEAST


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
