"""Gradients that land in buckets as autograd accumulates them, for all strategies with buckets.

Numbers on a GPU are not read, and none is sent there from the host unless that is needed: either
one waits until the GPU has finished all its queued work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from shoal.contracts.period import LEAST
from shoal.contracts.transfer import Round, Transfer
from shoal.core.errors import UsageError
from shoal.core.pieces import local_gradient
from shoal.profiling.identity import ROOT

CLOSELY = 50  # every so many backwards one looks at every element, which is a pass over memory


def history() -> UsageError:
    """Return the error for a backward that keeps a graph of its gradients."""
    return UsageError(
        "a gradient that is exchanged has no history (create_graph=True)",
        do="for a penalty on gradients of inputs use torch.autograd.grad(…, inputs, "
        "create_graph=True)",
    )


class Landing(ABC):
    """The gradients of one transfer's parameters in a backward. The last one makes it ready.

    Each parameter's gradient lands once. A transfer with a bucket has a subclass, and its `take`
    brings a gradient into that bucket.

    On a CPU each gradient is scaled into its place as it lands. On a GPU all gradients wait for the
    last, and one kernel copies them; they are scaled after the sum. 16-bit gradients are scaled at
    once, because their sum could overflow. So are gradients for servers: these are CPUs, which
    expect them scaled.

    Args:
        transfer: the transfer that the parameters belong to.
        parameters: by name.
        flat: the bucket.
        ranks: number of ranks that add to its sums.
        sparse: whether gradients may be sparse tensors.
        served: whether servers sum them.
    """

    def __init__(
        self,
        transfer: Transfer,
        parameters: Mapping[str, nn.Parameter],
        flat: Tensor,
        ranks: int,
        sparse: bool = False,
        served: bool = False,
    ) -> None:
        self._transfer, self._sparse = transfer, sparse
        self.names = {parameter: name for name, parameter in parameters.items()}
        self._ranks, self._period = ranks, transfer.period
        if self._period is not None:
            self._period.join(parameters)
        self._waits = flat.device.type != "cpu" and flat.itemsize > 2 and not served
        self._waiting: list[tuple[Tensor, Tensor]] = []  # places in the bucket, and their gradients
        self._landed: set[nn.Parameter] = set()
        self._gathered: set[nn.Parameter] = set()
        self._closed = False
        # a small parameter, because a NaN mostly spreads to all sums over rows; None on a GPU
        seen = [p for p in self.names if p.device.type == "cpu" and p.numel()]
        self._looked_at = min(seen, key=nn.Parameter.numel, default=None)
        self._backwards = 0
        self._looks_closely = self._looked_at is not None  # look at every element for NaN
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._land) for parameter in self.names
        ]

    @abstractmethod
    def take(self, parameter: nn.Parameter, backward: Round) -> bool:
        """Bring a parameter's `.grad` into the bucket.

        Return whether there was anything.
        """

    def _land(self, parameter: nn.Parameter) -> None:
        gradient = local_gradient(parameter)  # gradient 2
        if gradient is not None and gradient.requires_grad:
            raise history()
        backward = self._transfer.rounds.current()  # gradient 3
        period = self._period
        if backward.accumulating or not (period is None or period.is_due):
            return
        if parameter in self._gathered:
            return  # more of its gradient may come
        if gradient is None:  # its function gave none: unused, as far as an optimizer can see
            return
        if gradient.layout is not torch.strided and not self._sparse:
            layer = self.names[parameter].rpartition(".")[0] or ROOT
            raise UsageError(
                "a gradient is a sparse tensor, which the sample did not show",
                where=f"parameter {self.names[parameter]}, {self._transfer.label}",
                do=f'give parallelize a sample that uses it, or pins={{"{layer}": "sparse"}}',
            )
        if self._closed or parameter in self._landed:
            raise UsageError(
                f"parameter {self.names[parameter]} got a second gradient within one backward",
                where=self._transfer.label,
                do="give parallelize a sample in which it gets both, or use torch.utils.checkpoint "
                "with use_reentrant=False",
            )
        if self._looks_closely:
            if has_nan(gradient) and not has_nan(parameter):
                backward.found_nan(self.names[parameter])
        elif parameter is self._looked_at and _is_nan(gradient) and not _is_nan(parameter):
            backward.found_nan(self.names[parameter])
        if period is not None:
            period.complete(parameter, backward.share)
        self.take(parameter, backward)
        self._landed.add(parameter)
        if len(self._landed) == len(self.names):
            backward.ready(self._transfer)

    def gather(self, names: Set[str]) -> None:
        """Wait for the end of backward with these parameters, as their gradients come in parts."""
        self._gathered = {parameter for parameter, name in self.names.items() if name in names}

    def close(self, backward: Round) -> list[bool]:
        """Take the gradients that have not landed, and return whether each parameter was used.

        Such a gradient may be None, or a tensor that user code read, assigned or kept.
        """
        self._closed = True
        for parameter, name in self.names.items():
            hooks = (parameter._post_accumulate_grad_hooks or {}).values()
            if not all(isinstance(getattr(hook, "__self__", None), Landing) for hook in hooks):
                raise UsageError(
                    f"a hook on the accumulated gradient of {name} sees this rank's own gradient, "
                    "not the global one",
                    where=self._transfer.label,
                    do="do after loss.backward() what the hook does (an optimizer's step, a look "
                    "at .grad)",
                )
        seen = self._landed
        if self._period is not None:
            for parameter in self.names.keys() - seen:
                self._period.complete(parameter, backward.share)
        used = [parameter in seen or self.take(parameter, backward) for parameter in self.names]
        if self._waiting:
            places, gradients = zip(*self._waiting, strict=True)
            torch._foreach_copy_(list(places), list(gradients))
            self._waiting = []
        return used

    def bring(self, gradient: Tensor, place: Tensor) -> None:
        """Bring a gradient to its place in the bucket: now, or with the last one."""
        if self._waits:
            self._waiting.append((place, gradient))
        else:
            torch.mul(gradient, 1.0 / self._ranks, out=place)

    def weigh(self, gradients: Sequence[Tensor], shares: Tensor, backward: Round) -> None:
        """Multiply this rank's part of a sum by its share of rows, and send the share with it."""
        if self._period is None:
            weigh(gradients, shares, backward.share, self._ranks)
        else:  # each step's gradients were multiplied as they were kept
            weigh((), shares, self._period.share + backward.share, self._ranks)

    def divide(self, sums: Tensor, shares: Tensor) -> None:
        """Divide sums over ranks, so that they are the means of all ranks' gradients."""
        divide([sums], shares, self._ranks, self._ranks if self._waits else 1)

    def open(self) -> None:
        """Be ready for the next backward."""
        self._landed.clear()
        self._closed = False
        self._backwards += 1
        self._looks_closely = self._looked_at is not None and self._backwards % CLOSELY == 0

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()


def has_nan(tensor: Tensor) -> bool:
    """Return whether any element of a tensor on the host is NaN: a pass over its memory."""
    values = tensor.detach()
    values = values if values.layout is torch.strided else values.coalesce().values()
    total = values.sum()
    return bool(total != total) and bool(values.isnan().any())  # infinities may sum to NaN


def _is_nan(tensor: Tensor) -> bool:
    """Return whether the first number of a tensor on the host is NaN."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    first = tensor.detach()[(0,) * tensor.dim()]
    return bool(first != first)


_DIGITS, _BEHIND_POINT = 24, 14  # binary digits of a share if the sum's type is too coarse for it


def num_shares(itemsize: int) -> int:
    """Return how many numbers travel with a sum: ranks with a share other than 1, and these shares.

    A 16-bit type would round the sum of shares by percents, so each binary digit of a share
    travels as a number of its own.
    """
    return 2 if itemsize > 2 else 1 + _DIGITS


def weigh(gradients: Sequence[Tensor], shares: Tensor, share: float, ranks: int) -> None:
    """Multiply this rank's part of a sum by its share.

    A share other than 1 is put into `shares`, which is summed too.

    Raises:
        UsageError: on a GPU, a 16-bit type cannot count that many ranks (on a CPU `divide` raises).
    """
    shares.zero_()
    if share != 1:
        if shares.device.type != "cpu":
            _check_counted(shares.dtype, ranks)
        shares[0].fill_(1)
        if len(shares) == 2:
            shares[1].fill_(share)
            # rounded as the shares are
            factor = float(torch.tensor(share, dtype=shares.dtype, device="cpu").real)
        else:
            whole = min(round(share * 2**_BEHIND_POINT), 2**_DIGITS - 1)
            for digit in range(_DIGITS):
                if whole >> digit & 1:
                    shares[1 + digit].fill_(1)
            factor = whole / 2**_BEHIND_POINT
        if gradients:
            torch._foreach_mul_(list(gradients), at_least(factor))


def divide(sums: Sequence[Tensor], shares: Tensor, ranks: int, parts: int = 1) -> None:
    """Divide sums over ranks by the mean of all shares.

    Shares other than 1 were summed with them. On a GPU it always divides, because reading
    whether there are such shares would wait.

    Args:
        sums: tensors to divide, in place.
        shares: the ranks' shares, summed.
        ranks: number of ranks that have added to the sums.
        parts: a further divisor; on a GPU only.

    Raises:
        UsageError: a 16-bit type cannot count that many ranks.
    """
    at_host = shares.device.type == "cpu"
    if at_host:
        if not shares[0]:
            return
        _check_counted(shares.dtype, ranks)
    numbers = shares.real.double()
    sharers, digits = numbers[0], numbers[1:]  # ranks that have sent a share, and each digit
    if len(digits) > 1:
        digits = digits.ldexp(
            torch.arange(-_BEHIND_POINT, _DIGITS - _BEHIND_POINT, device=digits.device)
        )
    mean = ((ranks - sharers + digits.sum()) / ranks).clamp(min=LEAST)
    for total in sums:
        if at_host:
            total.div_(float(mean))
        elif total.itemsize > 2:
            total.div_(mean if parts == 1 else mean * parts)
        else:  # 16 bits would round the mean first
            total.copy_(total.float().div_(mean))


def _check_counted(dtype: torch.dtype, ranks: int) -> None:
    """Raise UsageError if ranks have unlike numbers of rows and a sum cannot count the ranks."""
    most = round(2 / torch.finfo(dtype).eps)
    if ranks > most:
        raise UsageError(
            f"ranks have unlike numbers of rows, and sums in {dtype} count {most} ranks at most",
            got=f"{ranks} ranks",
            do="give every rank as many rows (drop_last=True), or keep parameters in float32, "
            "under autocast",
        )


def mark(flags: Tensor, used: Sequence[bool]) -> None:
    """Set each flag to 1 if this rank used the parameter (the usual case), else to 0."""
    flags.fill_(1)
    for index, is_used in enumerate(used):
        if not is_used:
            flags[index].zero_()


def at_least(share: float) -> float:
    """Return the share, kept away from zero.

    If no rank has rows, a gradient without rows, as a penalty's, must stay as it is.
    """
    return share if share > LEAST else LEAST


def by_kind(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Group parameters by dtype and device, so that each group fits in one flat tensor."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
    return list(kinds.values())
