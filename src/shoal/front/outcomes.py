"""`outcome`: a step as it was predicted, and as it goes, with the term that was off most."""

from __future__ import annotations

from torch import nn

from shoal.core.outcome import Outcome, Spending
from shoal.front.planned import attached_of
from shoal.planner.measured import has_terms, outcome_of
from shoal.profiling.links import probe_now
from shoal.session.compiled import uncompiled
from shoal.session.session import Attached, Session, current


def outcome(model: nn.Module) -> Outcome | None:
    """A step of a parallelised model as it was predicted, and as it goes: print it.

    It is this rank's: the middle half of its last 256 steps. Each rank can ask for itself, at any
    time. `shoal train` prints that of the slowest rank at its end.

    Returns:
        The outcome. None where a process trains the model by itself, or has made no two steps yet.

    Raises:
        UsageError: the model was not parallelised, or before `init`.

    Examples:
        >>> import shoal, torch
        >>> _ = shoal.init()
        >>> model, loss_fn = torch.nn.Linear(4, 2), torch.nn.MSELoss()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _ = shoal.parallelize(
        ...     model, loss_fn, optimizer, sample=(torch.ones(8, 4), torch.zeros(8, 2))
        ... )
        >>> print(shoal.outcome(model))
        None
    """
    attached = attached_of(model)
    if attached is None:
        return None
    return outcome_of(attached.plan, attached.profile, attached.cluster, [spending(attached)])


def outcome_of_ranks(model: nn.Module) -> Outcome | None:
    """That of the slowest rank, the same on every rank, and what links carry now (a collective).

    Where ranks do not keep step it is this rank's own, and none waits for another.
    """
    session = current()
    attached = session.attached.get(uncompiled(model))
    if attached is None:
        return None
    if not has_terms(attached.plan):
        return outcome(model)
    ranks = session.comm.gather_objects(spending(attached), "what steps took", Spending)
    links = links_now(session, attached)
    return outcome_of(attached.plan, attached.profile, attached.cluster, ranks, links)


def spending(attached: Attached) -> Spending:
    """What this rank's main thread spends in a step of a model."""
    return attached.engine.spent.told(attached.engine.routes.waits())


def links_now(session: Session, attached: Attached) -> tuple[float, float] | None:
    """What the slowest link carried as it was measured, and carries now (a collective).

    None where nobody measured it. Lanes end first what they do.
    """
    link = attached.cluster.link
    if not link.tried or session.others:
        return None
    session.threads[attached.running.number].drain()
    return link.tried, probe_now(session.comm, link)
