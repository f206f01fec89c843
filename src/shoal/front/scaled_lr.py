"""`scaled_lr`: a learning rate that was found for one batch, scaled to another.

    linear   rate · k        k = batch ÷ base_batch
    sqrt     rate · √k
    warm-up  rises evenly from the unscaled rate to the scaled one

References: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
sections 2.1 and 2.2 (linear); Krizhevsky, "One weird trick for parallelizing convolutional neural
networks", 2014, section 5 (sqrt).

A run that goes on with another number of ranks has another batch, and its checkpoint has the rates
of the batch before. `ScaledLR` takes only its position from there, and keeps the rates of its own
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose, sqrt
from typing import Any, final
from weakref import ref

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

    Call it once, before you make any other scheduler, and call its `step()` after
    `optimizer.step()`. It works with others in torch's SequentialLR and ChainedScheduler. Rank 0
    logs the batch of all ranks and of one.

    Args:
        optimizer: an optimizer with the learning rates of the base batch.
        batch: rows of all ranks in a step.
        base_batch: rows for which the learning rates were found.
        rule: "linear" multiplies rates by k = batch ÷ base_batch, "sqrt" by its root. For SGD
            linear is usual, for Adam and LAMB sqrt.
        warmup_steps: steps in which rates rise evenly from the base batch's. There is no warm-up if
            the batch is smaller than the base batch.

    Returns:
        A scheduler of torch's. After the warm-up it leaves the rates alone. If it loads the state
        of a scheduler for another batch, the rates follow its own batch.

    Raises:
        UsageError: an argument is no such number, or the rule is unknown.

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
        _multiply(group, factor, "lr", "initial_lr")
    warms_up = warmup_steps > 0 and factor > 1
    comm = ranks()
    of_ranks = f" ({batch / comm.size:g} a rank on {comm.size} ranks)" if comm.size > 1 else ""
    warm_up = f", after a warm-up of {warmup_steps} steps" if warms_up else ""
    Stages(speaks=comm.rank == 0).say(
        f"batch of all ranks {batch:g}{of_ranks}, base batch {base_batch:g}: learning rates "
        f"× {factor:g} ({rule}){warm_up}"
    )
    return ScaledLR(
        optimizer,
        start_factor=1 / factor if warms_up else 1.0,
        total_iters=warmup_steps if warms_up else 1,
    )


@final
class ScaledLR(LinearLR):
    """A warm-up to the rates of a batch, also if a checkpoint has the rates of another one.

    A checkpoint's optimizer may take its state before this scheduler or after it. Either way its
    groups then say with `initial_lr` for which batch their rates are.
    """

    _loaded: tuple[list[float], float, int] | None

    def __init__(self, optimizer: Optimizer, start_factor: float, total_iters: int) -> None:
        super().__init__(optimizer, start_factor=start_factor, total_iters=total_iters)
        self._loaded = None  # bases, start factor and length of the warm-up in the checkpoint
        own = ref(self)

        def follow(_: Optimizer) -> None:
            if (scheduler := own()) is not None:
                scheduler._follow()

        optimizer.register_load_state_dict_post_hook(follow)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a LinearLR."""
        state: dict[str, Any] = super().state_dict()
        state.pop("_loaded", None)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a position from a checkpoint, and keep the rates of this batch."""
        kept = {name: getattr(self, name) for name in ("base_lrs", "start_factor", "total_iters")}
        super().load_state_dict(state_dict)
        self._loaded = [float(rate) for rate in self.base_lrs], self.start_factor, self.total_iters
        self.__dict__.update(kept)
        self._follow()

    def _follow(self) -> None:
        """Give the rates of this batch to each group that has the checkpoint's."""
        if self._loaded is None:
            return
        bases, start, length = self._loaded
        before = _warm_up_factor(start, length, self.last_epoch)
        now = _warm_up_factor(self.start_factor, self.total_iters, self.last_epoch)
        groups = zip(self.optimizer.param_groups, bases, self.base_lrs, strict=False)
        for group, old, new in groups:
            is_old = isclose(float(group.get("initial_lr", new)), float(old), rel_tol=1e-9)
            if is_old and not isclose(float(old), float(new), rel_tol=1e-9):
                _multiply(group, float(new) * now / (float(old) * before), "lr")
                _multiply(group, float(new) / float(old), "initial_lr")
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _warm_up_factor(start: float, length: int, step: int) -> float:
    """Return the factor of a warm-up at a step."""
    return start + (1 - start) * min(step, length) / length


def _multiply(group: dict[str, Any], factor: float, *names: str) -> None:
    """Multiply rates of a group, in place if they are tensors."""
    for name in names:
        if isinstance(group.get(name), Tensor):
            group[name].mul_(factor)
        elif name in group:
            group[name] *= factor


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
