"""`is_parallelized`, and `plan_of`: the plan that a model follows, and its running parts."""

from __future__ import annotations

from torch import nn

from shoal.core.errors import UsageError
from shoal.core.plan import Plan
from shoal.session.compiled_models import without_compilation
from shoal.session.pending_model import pending_of
from shoal.session.session import Attached, current, found


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan that a model follows; None if a process trains it by itself.

    That is so if the model is not parallelised, in one process, after `unparallelize`, and, without
    a sample, before the first batch. See `is_parallelized`.

    Print it, or let one rank `.save("plan.json")` it for `parallelize(plan="plan.json")`. You may
    have compiled the model since.

    Examples:
        >>> import shoal, torch
        >>> alone = shoal.init().size == 1
        >>> model, loss_fn = torch.nn.Linear(4, 2), torch.nn.MSELoss()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _ = shoal.parallelize(
        ...     model, loss_fn, optimizer, sample=(torch.ones(8, 4), torch.zeros(8, 2))
        ... )
        >>> (shoal.plan_of(model) is None) == alone
        True
    """
    session = found()
    attached = None if session is None else session.attached.get(without_compilation(model))
    return attached.plan if attached else None


def is_parallelized(model: nn.Module) -> bool:
    """Return whether `parallelize` was given this model, without `unparallelize` since.

    One rank alone counts, too. You may have compiled the model since.

    Examples:
        >>> import shoal, torch
        >>> _ = shoal.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> shoal.is_parallelized(model)
        False
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> _ = shoal.parallelize(model, None, optimizer)
        >>> shoal.is_parallelized(model)
        True
    """
    session = found()
    return session is not None and without_compilation(model) in session.optimizers


def attached_of(model: nn.Module) -> Attached | None:
    """Return the running parts of a parallelised model; None if a process trains it by itself.

    Raises:
        UsageError: the model was not parallelised, or before `init`.
    """
    session = current()
    model = without_compilation(model)
    if model in session.released or pending_of(model) is not None:
        return None
    if model not in (session.attached if session.comm.size > 1 else session.optimizers):
        raise UsageError(
            "the model is not parallelised",
            got=type(model).__name__,
            do="call shoal.parallelize first",
        )
    return session.attached.get(model)
