"""`scaled_lr`: a learning rate that was found for another batch, for this one.

    linear   rate · k        k = batch ÷ base_batch
    sqrt     rate · √k
    warm-up  from the rate itself, evenly up to that, in so many steps

References: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
sections 2.1 and 2.2 (linear); Krizhevsky, "One weird trick for parallelizing convolutional neural
networks", 2014, section 5 (sqrt).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_COUNTED, check_number, check_whole
from shoal.front.stages import Stages
from shoal.session.session import ranks

_RULES: Mapping[str, Any] = {"linear": float, "sqrt": sqrt}
_ROWS = 1e-3, MOST_COUNTED  # bounds of a batch, which may be a mean


def scaled_lr(
    optimizer: Optimizer,
    *,
    batch: float,
    base_batch: float,
    rule: str = "linear",
    warmup_steps: int = 0,
) -> LinearLR:
    """Scale an optimizer's learning rates from one batch to another, after a warm-up.

    Call it once, before any other scheduler is made, and `step()` it behind `optimizer.step()`. It
    goes with others in torch's SequentialLR and ChainedScheduler. Rank 0 logs both batches, of all
    ranks and of one.

    Args:
        optimizer: with the learning rates of the base batch.
        batch: rows of all ranks in a step.
        base_batch: rows that the learning rates were found for.
        rule: "linear" multiplies them by k = batch ÷ base_batch, "sqrt" by its root. For SGD linear
            is usual, for Adam and LAMB sqrt.
        warmup_steps: in which they rise evenly from those of the base batch. Where the batch is
            smaller than that there is no warm-up.

    Returns:
        A scheduler of torch's. After the warm-up it leaves the rates alone.

    Raises:
        UsageError: a number is none, or there is no such rule.

    Examples:
        >>> import shoal, torch
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1)
        >>> scheduler = shoal.scaled_lr(optimizer, batch=512, base_batch=64, warmup_steps=2)
        >>> for _ in range(3):
        ...     print(round(optimizer.param_groups[0]["lr"], 3))
        ...     optimizer.step()
        ...     scheduler.step()
        0.1
        0.45
        0.8
    """
    _check(optimizer, batch, base_batch, rule, warmup_steps)
    factor = _RULES[rule](batch / base_batch)
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr"):
            if name not in group:
                continue
            if isinstance(group[name], Tensor):
                group[name].mul_(factor)
            else:
                group[name] *= factor
    warms_up = warmup_steps > 0 and factor > 1
    comm = ranks()
    of_ranks = f" ({batch / comm.size:g} a rank on {comm.size} ranks)" if comm.size > 1 else ""
    warm_up = f", after a warm-up of {warmup_steps} steps" if warms_up else ""
    Stages(speaks=comm.rank == 0).say(
        f"batch of all ranks {batch:g}{of_ranks}, base batch {base_batch:g}: learning rates "
        f"× {factor:g} ({rule}){warm_up}"
    )
    return LinearLR(
        optimizer,
        start_factor=1 / factor if warms_up else 1.0,
        total_iters=warmup_steps if warms_up else 1,
    )


def _check(optimizer: Any, batch: Any, base_batch: Any, rule: Any, warmup_steps: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            "the optimizer is not a torch optimizer",
            got=type(optimizer).__name__,
            do="call scaled_lr(optimizer, batch=…, base_batch=…) for each optimizer",
        )
    for name, value in (("batch", batch), ("base_batch", base_batch)):
        do = "give the rows of all ranks in a step, as batch=512"
        check_number(f"{name} is a number of rows above 0", value, *_ROWS, do=do)
    if not isinstance(rule, str) or rule not in _RULES:
        raise UsageError(
            "there is no such rule for learning rates",
            got=repr(rule)[:80],
            expected="one of " + ", ".join(_RULES),
            do='give rule="linear"',
        )
    check_whole("warmup_steps is a number of steps", warmup_steps, 0, do="give 0 for none")
