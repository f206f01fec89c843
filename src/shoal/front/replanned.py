"""`replan=True`: what is asked is checked, and refused where it does not go with the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.errors import PlanError, UsageError
from shoal.core.plan import Plan
from shoal.planner.measured import has_terms
from shoal.remote.tail_hosts import TailHosts
from shoal.servers.servers import Servers
from shoal.session.session import Session


def check_replan(replan: Any, session: Session, apart: Mapping[str, Any]) -> None:
    """Refuse to make plans anew where what others hold could not be given back.

    Args:
        replan: whether that is asked.
        session: the ranks, and who serves them.
        apart: what else is asked by which not all ranks update all in each step, by its name.

    Raises:
        PlanError: there are servers or tail hosts, or some of that is asked.
    """
    if not isinstance(replan, bool):
        raise UsageError(
            "replan is True or False",
            got=repr(replan)[:80],
            do="give replan=True to make the plan anew at the end of epochs",
        )
    if not replan:
        return
    for kind, name in ((Servers, "servers"), (TailHosts, "tail hosts")):
        if session.other(kind) is not None:
            raise PlanError(
                f"a plan is made anew among workers only, and there are {name}",
                got="replan=True",
                do=f"start without {name}, or leave out replan",
            )
    for name, value in apart.items():
        if value != (0 if name == "staleness" else None) and value != {}:
            raise _apart(f"replan=True and {name}={value!r}"[:80], name)


def check_replanned(plan: Plan) -> None:
    """Refuse it for a given plan that nothing could be compared with (PlanError)."""
    if not has_terms(plan):
        raise _apart("replan=True and a plan of steps that are not alike", "the plan")


def _apart(got: str, other: str) -> PlanError:
    return PlanError(
        "a plan is made anew only where ranks update all in each step, together",
        got=got,
        do=f"leave out replan, or {other}",
    )
