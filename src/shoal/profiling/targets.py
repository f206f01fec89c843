"""Counts of torch's own losses, seen in one call, so that you need not pass a `count`.

    call    one cross_entropy, nll_loss or linear_cross_entropy gives the loss: a mean over the
            targets that it does not ignore, each with the weight of its class
    place   the same targets in the batch, where training can count them

Class probabilities as targets have no such count: torch divides these by the number of rows, with
class weights, too. The cost is one call of the loss, and in training a sum over the targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoal.core.errors import UsageError
from shoal.core.terms import Targets

_USUAL = -100  # the target that torch ignores by default
_LOSSES = (F.cross_entropy, F.nll_loss, getattr(F, "linear_cross_entropy", F.nll_loss))
Path = tuple[int | str, ...]


@dataclass(frozen=True)
class LossCall:
    """One call of a loss of torch's that is a mean over its targets."""

    value: Tensor
    target: Tensor
    ignored: int
    weight: Tensor | None


@final
class LossCalls(TorchFunctionMode):
    """Notes the calls of torch's losses that count targets."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LossCall] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if func in _LOSSES and isinstance(value, Tensor):
            given = inspect.signature(func).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            said = given.arguments
            is_mean = said["reduction"] == "mean" and said.get("size_average") is None
            if is_mean and said.get("reduce") is None and not said["target"].is_floating_point():
                call = LossCall(value, said["target"], said["ignore_index"], said["weight"])
                self.calls.append(call)
        return value


@dataclass(frozen=True)
class SeenTargets:
    """Targets that a sample shows: all places that fit, and whether they are as many as rows."""

    fitting: tuple[Targets, ...]
    matters: bool


def targets_of(
    calls: Iterable[LossCall],
    loss: Any,
    tensors: Iterable[tuple[Path, Tensor]],
    holder: Any,
    rows: int = 0,
) -> SeenTargets | None:
    """Return how a loss counts its targets, if one of torch's losses is all of it.

    Args:
        calls: the calls that were noted while the loss was computed.
        loss: the loss.
        tensors: tensors of the batch, one of which has the targets, with the ways to them.
        holder: the loss's function, which may hold class weights.
        rows: the number of rows; 0: it does not matter whether there are as many targets.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    # NaN is the mean over no target
    value = loss.detach().nan_to_num()
    same = [call for call in calls if torch.equal(call.value.detach().nan_to_num(), value)]
    if len(same) != 1:
        return None
    (call,) = same
    weights = () if call.weight is None else tuple(call.weight.detach().double().tolist())
    held_as = "" if call.weight is None else _held_as(holder, call.weight)
    fitting, matters = [], False
    for path, targets, skipped in _places(call, list(tensors)):
        ignores = call.ignored != _USUAL or bool((targets == call.ignored).any())
        by_size = not weights and not ignores
        fitting.append(Targets(path, skipped, call.ignored, weights, held_as, by_size))
        matters = matters or not by_size or (rows > 0 and targets.numel() != rows)
    return SeenTargets(tuple(fitting), matters) if fitting else None


def _places(
    call: LossCall, tensors: Sequence[tuple[Path, Tensor]]
) -> Iterator[tuple[Path, Tensor, int]]:
    """Yield tensors with the targets, the ways to them, and the number skipped in a row.

    First the ones that are the same throughout, then the ones that count the same targets.
    """
    wanted, ignored = call.target.flatten().cpu(), call.ignored
    found = [
        (path, targets, skipped)
        for path, tensor in reversed(tensors)  # labels mostly come last
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        for skipped in range(min(tensor.dim(), 2))
        if (targets := tensor[..., skipped:].cpu()).numel()
    ]
    for path, targets, skipped in found:
        # some pad at the end of each row, for the targets that they skip
        padded = F.pad(targets, (0, skipped), value=ignored)
        if torch.equal(targets.flatten(), wanted) or torch.equal(padded.flatten(), wanted):
            yield path, targets, skipped
    for path, targets, skipped in found:
        if torch.equal(targets[targets != ignored], wanted[wanted != ignored]):
            yield path, targets, skipped


def _held_as(holder: Any, weight: Tensor) -> str:
    """Return the dotted attribute of a module that is these weights; "" if there is none."""
    if not isinstance(holder, nn.Module):
        return ""
    for name, module in holder.named_modules():
        for attribute, value in _attributes(module):
            if value is weight:
                return f"{name}.{attribute}" if name else attribute
    return ""


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.named_buffers(recurse=False)
    yield from vars(module).items()


def count_targets(targets: Targets, target: Any, holder: Any = None) -> Tensor:
    """Return the sum of the weights of the targets that count.

    Args:
        targets: how they are counted.
        target: the tensor with the targets.
        holder: the loss's function, of which the weights may be an attribute.

    Raises:
        UsageError: this is no tensor of whole numbers.
    """
    if not isinstance(target, Tensor):
        raise UsageError(
            "the targets of a loss are not where they were in the sample",
            got=type(target).__name__,
            do="give batches of the sample's form, or say count=, the number of targets that count",
        )
    if target.is_floating_point():  # probabilities of classes: a mean over rows
        rows = target.numel() / target.shape[min(1, target.dim() - 1)]
        return torch.tensor(rows, device="cpu")
    target = target[..., targets.skipped :] if targets.skipped else target
    if targets.by_size:
        return torch.tensor(target.numel(), device="cpu")
    counts = target != targets.ignored
    if not targets.weights:
        return torch.count_nonzero(counts)
    weight = _weight(targets, holder).to(target.device, torch.float64)
    total: Tensor = (weight[target.masked_fill(~counts, 0).long()] * counts).sum()
    return total


def _weight(targets: Targets, holder: Any) -> Tensor:
    held: Any = holder
    for name in targets.held_as.split(".") if targets.held_as else ():
        held = getattr(held, name, None)
    if targets.held_as and isinstance(held, Tensor):
        return held.detach()
    return torch.tensor(targets.weights, dtype=torch.float64, device="cpu")
