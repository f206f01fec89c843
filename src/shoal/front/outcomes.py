"""`outcome`: a step as predicted and as measured, with the term that was off most."""

from __future__ import annotations

from torch import nn

from shoal.core.outcome import Outcome, Spending
from shoal.front.plan_queries import attached_of
from shoal.planner.measured_steps import has_terms, outcome_of
from shoal.profiling.links import probe_now
from shoal.session.compiled_models import without_compilation
from shoal.session.session import Attached, Session, current


def outcome(model: nn.Module) -> Outcome | None:
    """Compare a step of a parallelised model with its prediction. Print the result.

    The figures are this rank's: the middle half of its last 256 steps. Each rank can ask for
    itself, at any time. At its end `shoal train` prints the slowest rank's outcome.

    Returns:
        The outcome. None if a process trains the model by itself, or has not made two steps yet.

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
    """Return the slowest rank's outcome on every rank, and the links' present rates (a collective).

    If ranks do not keep step, each rank returns its own outcome, and no rank waits for another.
    """
    session = current()
    attached = session.attached.get(without_compilation(model))
    if attached is None:
        return None
    if not has_terms(attached.plan):
        return outcome(model)
    ranks = session.comm.gather_objects(spending(attached), "what steps took", Spending)
    links = links_now(session, attached)
    return outcome_of(attached.plan, attached.profile, attached.cluster, ranks, links)


def spending(attached: Attached) -> Spending:
    """Return the seconds that this rank's main thread spends in a step of a model."""
    return attached.engine.spent.told(attached.engine.routes.waits())


def links_now(session: Session, attached: Attached) -> tuple[float, float] | None:
    """Return the slowest link's rates when it was measured, and now (a collective).

    Return None if no link was measured. Lanes finish their jobs first.
    """
    link = attached.cluster.link
    if not link.tried or session.others:
        return None
    session.threads[attached.running.number].drain()
    return link.tried, probe_now(session.comm, link)
