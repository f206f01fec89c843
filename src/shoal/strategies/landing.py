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


_DIGITS, _BEHIND_POINT = 24, 14  # of a share, where the sum's type is too coarse for it


def num_shares(itemsize: int) -> int:
    """Numbers that go with a sum in a type of so many bytes: how many ranks have a share other than 1, and these' sum.

    A type of 16 bits would round that sum by percents, so each binary digit goes as a number of its own.
    """
    return 2 if itemsize > 2 else 1 + _DIGITS


def weigh(gradients: Sequence[Tensor], shares: Tensor, share: float) -> None:
    """Multiply what a rank adds to a sum by its share, which goes along in `shares` where it is not 1, as mostly."""
    shares.zero_()
    if share != 1:
        shares[0] = 1
        if len(shares) == 2:
            shares[1] = share
            factor = float(shares[1].real)  # as exactly as the tensor holds it
        else:
            whole = min(round(share * 2**_BEHIND_POINT), 2**_DIGITS - 1)
            shares[1:] = torch.tensor([float(whole >> digit & 1) for digit in range(_DIGITS)])
            factor = whole / 2**_BEHIND_POINT
        for gradient in gradients:
            gradient.mul_(at_least(factor))


def divide(sums: Sequence[Tensor], shares: Tensor, ranks: int) -> None:
    """Divide sums over ranks by the mean of all shares, of which those that are not 1 have come with them.

    Raises:
        UsageError: a type of 16 bits cannot count that many ranks.
    """
    others, *digits = shares.real.tolist()
    if others:
        most = round(2 / torch.finfo(shares.dtype).eps)
        if ranks > most:
            raise UsageError(
                f"ranks have unlike numbers of rows, and sums in {shares.dtype} count {most} ranks at most",
                got=f"{ranks} ranks",
                do="give every rank as many rows (drop_last=True), or keep parameters in float32, under autocast",
            )
        total = digits[0]
        if len(digits) > 1:
            total = sum(ranks_with_it * 2.0 ** (digit - _BEHIND_POINT) for digit, ranks_with_it in enumerate(digits))
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
