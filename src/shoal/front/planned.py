"""`plan_of`: the plan that a model follows, and who runs it."""

from __future__ import annotations

from torch import nn

from shoal.core.errors import UsageError
from shoal.core.plan import Plan
from shoal.session.additions import uncompiled
from shoal.session.session import Attached, current


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a parallelised model follows; None where a process trains it by itself.

    That is where there is one process only, and after `unparallelize`.

    Print it, or have one rank `.save("plan.json")` it for `parallelize(plan="plan.json")`. The
    model may be compiled since.

    Raises:
        UsageError: the model was not parallelised, or before `init`.

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
    attached = attached_of(model)
    return attached.plan if attached else None


def attached_of(model: nn.Module) -> Attached | None:
    """What runs a parallelised model; None where a process trains it by itself.

    Raises:
        UsageError: the model was not parallelised, or before `init`.
    """
    session = current()
    model = uncompiled(model)
    if model in session.released:
        return None
    if model not in (session.attached if session.comm.size > 1 else session.optimizers):
        raise UsageError(
            "the model is not parallelised",
            got=type(model).__name__,
            do="call shoal.parallelize first",
        )
    return session.attached.get(model)
