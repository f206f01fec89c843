"""Gradients that land in buckets as autograd accumulates them, for all strategies with buckets.

A number that lies on a GPU is not looked at, and none is brought there from the host, where it is
not needed: either waits for all that the GPU has still to do.
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

CLOSELY = 50  # backwards, in one of which every element is looked at: that is a pass over memory


def history() -> UsageError:
    """The error of a backward whose gradients are to be differentiated again."""
    return UsageError(
        "a gradient that is exchanged has no history (create_graph=True)",
        do="for a penalty on gradients of inputs use torch.autograd.grad(…, inputs, "
        "create_graph=True)",
    )


class Landing(ABC):
    """The gradients of one transfer's parameters in a backward: each once, ready with the last.

    A transfer with a bucket has a subclass, whose `take` brings a gradient into that bucket.

    On a CPU each is scaled into its place as it lands. On a GPU they wait for the last, and one
    kernel brings them all; they are scaled behind the sum. Of 16 bits none waits, since their sum
    might overflow. Of what servers sum none waits: they are CPUs, which expect it scaled.

    Args:
        transfer: whose they are.
        parameters: by name.
        flat: the bucket.
        ranks: how many add to its sums.
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
        self._waiting: list[tuple[Tensor, Tensor]] = []  # places, and what is brought there
        self._landed: set[nn.Parameter] = set()
        self._gathered: set[nn.Parameter] = set()
        self._closed = False
        # a small parameter: a NaN mostly spreads to all sums over rows. None on a GPU
        seen = [p for p in self.names if p.device.type == "cpu" and p.numel()]
        self._looked_at = min(seen, key=nn.Parameter.numel, default=None)
        self._backwards = 0
        self._looks_closely = self._looked_at is not None  # NaN in any element
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._land) for parameter in self.names
        ]

    @abstractmethod
    def take(self, parameter: nn.Parameter, backward: Round) -> bool:
        """Bring what is in a parameter's `.grad` into the bucket.

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
            return  # more of it may come
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
        """Take gradients of these parameters as the backward ends: they come in several parts."""
        self._gathered = {parameter for parameter, name in self.names.items() if name in names}

    def close(self, backward: Round) -> list[bool]:
        """Take what has not landed as it is, and return whether each was used.

        It may be nothing, or what was read, assigned or kept.
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
        """Bring a gradient to its place in the bucket: now, or with the last."""
        if self._waits:
            self._waiting.append((place, gradient))
        else:
            torch.mul(gradient, 1.0 / self._ranks, out=place)

    def weigh(self, gradients: Sequence[Tensor], shares: Tensor, backward: Round) -> None:
        """Multiply what this rank adds to a sum by its share of rows, which goes along."""
        if self._period is None:
            weigh(gradients, shares, backward.share, self._ranks)
        else:  # each step's were multiplied as they were kept
            weigh((), shares, self._period.share + backward.share, self._ranks)

    def divide(self, sums: Tensor, shares: Tensor) -> None:
        """Make the mean over ranks of sums of what was brought."""
        divide([sums], shares, self._ranks, self._ranks if self._waits else 1)

    def open(self) -> None:
        """Be there for the next backward."""
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
    """Whether the first number of a tensor on the host is none."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    first = tensor.detach()[(0,) * tensor.dim()]
    return bool(first != first)


_DIGITS, _BEHIND_POINT = 24, 14  # of a share, where the sum's type is too coarse for it


def num_shares(itemsize: int) -> int:
    """Numbers that go with a sum: how many ranks have a share other than 1, and the sum of those.

    A type of 16 bits would round that sum by percents, so each binary digit goes as a number of its
    own.
    """
    return 2 if itemsize > 2 else 1 + _DIGITS


def weigh(gradients: Sequence[Tensor], shares: Tensor, share: float, ranks: int) -> None:
    """Multiply what a rank adds to a sum by its share.

    A share that is not 1 goes along in `shares`.

    Raises:
        UsageError: on a GPU, as `divide` elsewhere: a type of 16 bits cannot count that many ranks.
    """
    shares.zero_()
    if share != 1:
        if shares.device.type != "cpu":
            _check_counted(shares.dtype, ranks)
        shares[0].fill_(1)
        if len(shares) == 2:
            shares[1].fill_(share)
            # as exactly as those hold it
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

    Those that are not 1 have come with the sums.

    On a GPU always, as nobody looks whether there are any.

    Args:
        sums: what to divide, in place.
        shares: as they have come, summed.
        ranks: how many have added to the sums.
        parts: what else to divide by; on a GPU only.

    Raises:
        UsageError: a type of 16 bits cannot count that many ranks.
    """
    at_host = shares.device.type == "cpu"
    if at_host:
        if not shares[0]:
            return
        _check_counted(shares.dtype, ranks)
    numbers = shares.real.double()
    sharers, digits = numbers[0], numbers[1:]  # ranks that have it, of each
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
        else:  # which would round the mean first
            total.copy_(total.float().div_(mean))


def _check_counted(dtype: torch.dtype, ranks: int) -> None:
    """Refuse unlike numbers of rows where a sum cannot count the ranks."""
    most = round(2 / torch.finfo(dtype).eps)
    if ranks > most:
        raise UsageError(
            f"ranks have unlike numbers of rows, and sums in {dtype} count {most} ranks at most",
            got=f"{ranks} ranks",
            do="give every rank as many rows (drop_last=True), or keep parameters in float32, "
            "under autocast",
        )


def mark(flags: Tensor, used: Sequence[bool]) -> None:
    """Say of each parameter whether this rank used it, as mostly."""
    flags.fill_(1)
    for index, is_used in enumerate(used):
        if not is_used:
            flags[index].zero_()


def at_least(share: float) -> float:
    """A share that is no 0.

    Where no rank has rows, what does not come of rows, as a penalty, is as it was.
    """
    return share if share > LEAST else LEAST


def by_kind(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """The parameters by dtype and device: what can lie in one flat tensor."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
    return list(kinds.values())
