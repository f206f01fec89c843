"""A plan must lead a simpler one by more than predictions are sure of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up import cluster

from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.plan import Choice, Plan
from shoal.planner.search_options import UNCONSTRAINED, Constraints
from shoal.planner.simpler_plans import take_simpler

SLOW, FAST = cluster(2, 12.5e6), cluster(2, 1.25e9)
ONE_HOST = Cluster(Topology(("one", "one")), Link(1e-5, 12.5e6))


def plan(strategy: str, seconds: float) -> Plan:
    exchange = "" if strategy == "column" else "allreduce"
    return Plan(2, "", (Choice("one", strategy, exchange),), 1, 1, predicted_s=seconds)


def taken(
    cut_s: float, owned_s: float, replicated_s: float, where: Cluster, allowed: Constraints
) -> str:
    """The strategy that is taken, where the best plan cuts."""

    def search(under: Constraints) -> Plan:
        assert under.strategies is not None
        names = {*under.strategies}
        if names == {"replicate"}:
            return plan("replicate", replicated_s)
        assert "column" not in names and "sliced" in names
        return plan("sliced", owned_s)

    return take_simpler(plan("column", cut_s), where, allowed, search).choices[0].strategy


@pytest.mark.quick
@pytest.mark.parametrize(
    ("cut_s", "owned_s", "replicated_s", "where", "expected"),
    [
        (1.0, 1.02, 1.04, SLOW, "replicate"),
        (1.0, 1.02, 1.10, SLOW, "sliced"),
        (1.0, 1.10, 1.20, SLOW, "column"),
        (1.0, 1.10, 1.10, FAST, "replicate"),
        (1.0, 1.10, 1.10, ONE_HOST, "replicate"),
        (1.0, 1.10, 1.15, FAST, "sliced"),
        (1.0, 1.15, 1.15, FAST, "column"),
    ],
)
def test_the_simplest_plan_that_is_nearly_as_fast_is_taken(
    cut_s: float, owned_s: float, replicated_s: float, where: Cluster, expected: str
) -> None:
    found = taken(cut_s, owned_s, replicated_s, where, replace(UNCONSTRAINED, strategies=None))
    assert found == expected


def test_hosts_that_do_not_train_are_used() -> None:
    where = replace(SLOW, servers=("s",))
    assert taken(1.0, 1.0, 1.0, where, UNCONSTRAINED) == "column"


def test_only_what_is_allowed_is_simpler() -> None:
    def search(under: Constraints) -> Plan:
        pytest.fail(f"searched under {under}")

    only = replace(UNCONSTRAINED, strategies=["column", "head"])
    best = plan("column", 1.0)
    assert take_simpler(best, SLOW, only, search) is best


def test_pins_that_no_simpler_plan_keeps_are_kept() -> None:
    def search(under: Constraints) -> Plan:
        raise PlanError("a pin names a strategy that is not allowed")

    best = plan("column", 1.0)
    assert take_simpler(best, SLOW, UNCONSTRAINED, search) is best
