"""How many steps ranks make by themselves: the fewest that hide the exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up import cluster, layer, model

from shoal.core.cost import Pace, Price
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.outer_step import Outer
from shoal.core.plan import Choice, Plan
from shoal.planner.explain import explain
from shoal.planner.local import with_local_steps
from shoal.planner.plan_details import plan_for
from shoal.planner.search_options import SearchOptions

# 8 MB in all; computing takes 3.5 s
NET = model(layer("late", 0.5, 1_000_000), layer("early", 2.0, 1_000_000))
ONE_BUCKET = SearchOptions(bucket_bytes=(1 << 30,))
TWO_BUCKETS = SearchOptions(bucket_bytes=(1,))


def planned(
    bytes_per_s: float,
    steps: int | str = "auto",
    outer: Outer | None = None,
    options: SearchOptions = ONE_BUCKET,
) -> Plan:
    where = cluster(2, bytes_per_s)
    exact = plan_for(NET, where, strategies=["replicate"], options=options)
    return with_local_steps(exact, NET, where, steps, outer)


@pytest.mark.parametrize(("bytes_per_s", "steps"), [(1e9, 1), (2e6, 2), (1e6, 3), (1e5, 23)])
def test_auto_is_the_fewest_steps_that_hide(bytes_per_s: float, steps: int) -> None:
    """Of 2 ranks each sends half of 8 MB there and half back: 8 s at 1 MB/s, 3 steps of 3.5 s."""
    plan = planned(bytes_per_s)
    assert plan.local_steps == steps
    assert plan.predicted_s == pytest.approx(3.5)


def test_auto_leaves_processors_that_compute_little_else_to_do() -> None:
    """8 MB take a core 1 s, 5 % of six steps of 3.5 s. A core with nothing else has time for it."""

    def auto(cores: float) -> Plan:
        where = cluster(2, 1e9, cores=cores, cpu=0.125e-6)
        exact = plan_for(NET, where, strategies=["replicate"], options=ONE_BUCKET)
        return with_local_steps(exact, NET, where, "auto", None)

    busy, free = auto(1.0), auto(2.0)
    assert free.local_steps == 1
    assert busy.local_steps == 6
    assert busy.predicted_s == pytest.approx(3.5 + 1 / 6, rel=1e-3)


def test_without_a_lag_the_work_of_exchanges_is_counted_once() -> None:
    """Of 8 MB at 1 MB/s the main thread waits 8 s; a core works 1 s for the bytes meanwhile."""
    where = cluster(2, 1e6, cores=1.0, cpu=0.125e-6)
    exact = plan_for(NET, where, strategies=["replicate"], options=ONE_BUCKET)
    for lag, predicted_s in ((0, 3.5 + 8 / 16), (16, 3.5 + 1 / 16)):
        plan = with_local_steps(exact, NET, where, 16, Outer(lag=lag))
        assert plan.predicted_s == pytest.approx(predicted_s, rel=1e-3)


@pytest.mark.parametrize(("ranks", "exchange_s"), [(2, 16.0), (4, 48.0)])
def test_with_a_quorum_all_weights_cross_the_link_of_rank_0(ranks: int, exchange_s: float) -> None:
    """8 MB at 1 MB/s from each other rank, and as many back; a round waits for that."""
    where = cluster(ranks, 1e6)
    exact = plan_for(NET, where, strategies=["replicate"], options=ONE_BUCKET)
    plan = with_local_steps(exact, NET, where, 16, Outer(quorum=0.75))
    assert plan.outer is not None and plan.outer.lag == 0
    assert plan.predicted_s == pytest.approx(3.5 + exchange_s / 16, rel=1e-3)


@pytest.mark.parametrize(
    ("warmup", "lag", "times"), [(0, 0, "1.37"), (100, 0, ""), (0, 16, "1.78"), (100, 16, "1.3")]
)
def test_explain_shows_how_much_later_local_steps_learn(warmup: int, lag: int, times: str) -> None:
    where = cluster(2, 1e6)
    exact = plan_for(NET, where, strategies=["replicate"], options=ONE_BUCKET)
    plan = with_local_steps(exact, NET, where, 16, Outer(warmup_steps=warmup, lag=lag))
    (line,) = [f for f in explain(plan, NET, where).features if f.startswith("learning")]
    assert (f"{times} times the samples" if times else "as many samples") in line


def test_a_bucket_alone_has_the_whole_round_and_two_have_half_and_a_step() -> None:
    alone, two = planned(1e5), planned(1e5, options=TWO_BUCKETS)
    assert (alone.outer or Outer()).lag == 23
    assert (two.outer or Outer()).lag == 12 + 1


def test_what_is_given_is_kept_and_waits() -> None:
    plan = planned(1e6, 16, Outer(lag=0))
    assert plan.local_steps == 16 and plan.outer == Outer(0.7, 0.9, "nesterov", lag=0)
    assert plan.predicted_s == pytest.approx(3.5 + 8 / 16, rel=1e-3)


@pytest.mark.parametrize(
    ("bytes_per_s", "options", "lag"),
    [
        (1e7, ONE_BUCKET, 0),  # 0.8 s are less than a step of 3.5 s
        (1e6, ONE_BUCKET, 16),  # one bucket has the whole round
        (1e6, TWO_BUCKETS, 16 // 2 + 1),
        (1e5, TWO_BUCKETS, 12 + 1),  # 80 s are 23 steps, so the round waits at its end
    ],
)
def test_a_given_number_has_a_lag_if_the_exchange_is_longer_than_a_step(
    bytes_per_s: float, options: SearchOptions, lag: int
) -> None:
    plan = planned(bytes_per_s, 16, options=options)
    assert plan.outer is not None and plan.outer.lag == lag
    waits_s = max(0.0, 8e6 / bytes_per_s - 3.5 * lag * (1 if options is ONE_BUCKET else 2)) / 16
    assert plan.predicted_s == pytest.approx(3.5 + waits_s, rel=1e-3)


def test_a_lag_that_is_given_is_kept() -> None:
    assert (planned(1e5, "auto", Outer(lag=0)).outer or Outer()).lag == 0


def test_momentum_of_block_momentum_goes_by_ranks() -> None:
    outer = planned(1e6, 16, Outer(rule="bmuf")).outer
    assert outer is not None and outer.momentum == 0.5


def test_exchanges_are_of_two_halves() -> None:
    assert {choice.exchange for choice in planned(1e6).choices} <= {"direct", "ring"}


def test_servers_have_all_weights_up_and_down() -> None:
    """Of 8 MB each of two servers has half, so a worker sends 8 MB, and gets them back: 16 s."""
    where = replace(cluster(2, 1e6), servers=("s0", "s1"), ahead=True, apart=True)
    made = plan_for(NET, where, strategies=["server"], options=ONE_BUCKET)
    plan = with_local_steps(made, NET, where, "auto", Outer(rule="average"))
    assert plan.local_steps == 5
    assert plan.predicted_s == pytest.approx(3.5)


# two hosts of two ranks: a link carries 2 MB/s, and a byte inside a host takes a processor 1 µs
ON_HOSTS = Cluster(
    Topology(("a", "a", "b", "b")),
    Link(0.0, 1e6),
    paces={
        "hierarchical": Pace(Price(0.0, 0.0), Price(0.0, 0.0)),
        "direct": Pace(Price(0.0, 1e-6), Price(0.0, 1e-6)),
    },
)


def on_hosts(steps: int | str, islands: bool | None) -> Plan:
    choices = tuple(Choice(layer.name, "replicate", "hierarchical") for layer in NET.layers)
    exact = Plan(4, "made up", choices, bucket_bytes=1 << 30, lanes=1)
    outer = Outer(islands=islands, lag=None if steps == "auto" else 0)
    return with_local_steps(exact, NET, ON_HOSTS, steps, outer)


def test_steps_of_islands_have_their_exchange_in_them() -> None:
    """Of 8 MB two ranks of a host send half and half, which takes 8 s, all behind backward."""
    apart, together = on_hosts(16, False), on_hosts(16, True)
    # 8 MB leave a host whose link carries 2 MB/s, every 16 steps
    assert apart.predicted_s == pytest.approx(3.5 + 4 / 16, rel=1e-3)
    assert together.predicted_s == pytest.approx(3.5 + 8 + 4 / 16, rel=1e-3)


def test_steps_that_hide_are_those_of_what_crosses() -> None:
    """The exchange inside a host makes steps longer, so that fewer hide the 4 s between hosts."""
    assert on_hosts("auto", False).local_steps == 2
    assert on_hosts("auto", True).local_steps == 1
    assert on_hosts("auto", None).local_steps == 1  # several hosts of several ranks


def test_block_momentum_goes_by_islands() -> None:
    def momentum(islands: bool) -> float | None:
        outer = Outer(rule="bmuf", islands=islands)
        exact = on_hosts(16, False)
        plan = with_local_steps(exact, NET, ON_HOSTS, 16, outer)
        return plan.outer.momentum if plan.outer else None

    assert (momentum(True), momentum(False)) == (0.5, 0.75)


def test_hosts_of_several_ranks_come_together_by_way_of_collectors() -> None:
    choices = tuple(Choice(layer.name, "replicate", "tree") for layer in NET.layers)
    exact = Plan(4, "made up", choices, bucket_bytes=1 << 30, lanes=1)
    plan = with_local_steps(exact, NET, ON_HOSTS, 16, None)
    assert {choice.exchange for choice in plan.choices} == {"hierarchical"}
