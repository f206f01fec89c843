"""Takes a simpler plan if the best one's lead is smaller than the error of predictions.

Times vary from one start to the next, and so does the plan with the shortest prediction. Results
agree to rounding, but one plan lets a rank act alone, and another does not. So a plan with owners
or factors must lead the best replicated one, and a plan with cut layers the best one without, by
`LEAD` of the step. On one host, and over fast links, it must lead by `LEAD_ON_FAST`, because times
of shared cores are less sure there, and little can be won.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster
from shoal.core.plan import Plan
from shoal.core.registry import of
from shoal.core.role import Role
from shoal.planner.options import known
from shoal.planner.search_options import Constraints

# kinds of plans, the simplest first; the highest kind among a plan's layers is its kind
KINDS = ("all-reduce", "owners or factors", "cut layers", "a pipeline")
_CUT = KINDS.index("cut layers")
LEAD = 0.05  # share of the step
LEAD_ON_FAST = 0.10
_FAST = 125e6  # bytes a second of a link: 1 Gbit/s


def take_simpler(
    best: Plan, cluster: Cluster, constraints: Constraints, search: Callable[[Constraints], Plan]
) -> Plan:
    """Return the simplest plan that is nearly as fast as the best one.

    Args:
        best: the best plan that was found.
        cluster: the ranks and their links.
        constraints: constraints of the search.
        search: a search under constraints; a PlanError says that there is no plan.
    """
    if cluster.servers or cluster.tail:  # these hosts are there to be used
        return best
    lead = lead_on(cluster)
    for simpler in _simpler(best, known(constraints.strategies)):
        try:
            plan = search(replace(constraints, strategies=simpler))
        except PlanError:  # pins, or a limit of memory, do not allow it
            continue
        if best.predicted_s >= (1 - lead) * plan.predicted_s:
            return plan
    return best


def lead_on(cluster: Cluster) -> float:
    """Return the share of the step by which a plan must be ahead of a simpler one."""
    is_fast = len(cluster.topology.ranks_on) == 1 or cluster.link.bytes_per_s >= _FAST
    return LEAD_ON_FAST if is_fast else LEAD


def kind_of(plan: Plan) -> str:
    """Return the kind of a plan, one of `KINDS`."""
    kinds = of(Strategy)
    return KINDS[max(_level(kinds[choice.strategy].role) for choice in plan.choices)]


def strategies_of(kinds: Sequence[str], allowed: Iterable[str]) -> tuple[str, ...]:
    """Return the allowed strategies that belong to these kinds."""
    roles = of(Strategy)
    return tuple(name for name in allowed if KINDS[_level(roles[name].role)] in kinds)


def _simpler(plan: Plan, allowed: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """Return sets of simpler strategies than a plan has, the simplest first."""
    kinds = of(Strategy)
    levels = {name: _level(kinds[name].role) for name in allowed}
    highest = KINDS.index(kind_of(plan))
    for level in range(min(highest, _CUT)):
        names = tuple(name for name in allowed if levels[name] <= level)
        if names and level in levels.values():
            yield names


def _level(role: Role) -> int:
    """Return the index in `KINDS` of a strategy's kind."""
    if role is Role.BUCKET:
        return 0
    if role.names_ranks:
        return _CUT + 1
    return 1 if role.is_updated_everywhere or role is Role.OWNED else _CUT
