"""When `accuracy="fast"` takes local steps, and which: each decision by made-up costs.

A step computes for 3.5 s. All weights are 8 MB, and each of two ranks sends and receives as many
for an exchange of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from made_up import cluster, layer, model

from shoal.core.cost import CodingPace
from shoal.core.facts import Cluster, LayerProfile, Topology
from shoal.core.plan import Plan
from shoal.planner import local_prices, local_ways
from shoal.planner.explain import explain
from shoal.planner.learning import price_of
from shoal.planner.local_prices import EXACT_FIRST, GROWS, NO_START, LocalRun, local_price
from shoal.planner.local_ways import has_nothing_to_gain, soonest
from shoal.planner.plan_details import plan_for
from shoal.planner.search_options import SearchOptions

STEP_S = 3.5
ONE_BUCKET = SearchOptions(bucket_bytes=(1 << 30,))
LENGTHS = (
    LocalRun(4, "", NO_START, 1.3, "made up"),
    LocalRun(16, "", NO_START, 1.4, "made up"),
    LocalRun(64, "", NO_START, 1.5, "made up"),
)


def matrix(name: str, ready_s: float) -> LayerProfile:
    made = layer(name, ready_s, 1_000_000)
    return replace(made, parameters=(replace(made.parameters[0], shape=(1000, 1000)),))


NET = model(matrix("late", 0.5), matrix("early", 2.0))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LocalRun]]:
    """Runs that take the place of the measured ones."""
    found: list[LocalRun] = []
    monkeypatch.setattr(local_prices, "RUNS", found)
    monkeypatch.setattr(local_prices, "LAG_TIMES", 1.0)
    monkeypatch.setattr(local_ways, "RUNS", found)
    return found


def planned(where: Cluster, total_steps: int | None = None) -> Plan:
    exact = plan_for(NET, where, strategies=["replicate"], options=ONE_BUCKET)
    return soonest(exact, exact, NET, where, total_steps)


@pytest.mark.parametrize(
    ("exchange_s", "steps"),
    [
        (0.1, 0),  # exact steps hide it
        (1.5, 0),  # an exact step is 5 s, and 1.3 · 3.5 s are not a tenth less
        (4.0, 4),
        (10.0, 4),  # four steps of 3.5 s hide it
        (50.0, 16),
        (200.0, 64),
        (2000.0, 64),  # nothing hides it, and 64 steps share it
    ],
)
def test_the_length_of_a_round_is_that_with_the_soonest_loss(
    exchange_s: float, steps: int, runs: list[LocalRun]
) -> None:
    """By hand: with 16 steps for 50 s a loss takes 1.4 · 3.5 s, and with 4 steps 1.3 · 12.5 s."""
    runs += LENGTHS
    assert planned(cluster(2, 8e6 / exchange_s)).local_steps == steps


def test_ranks_of_a_host_are_an_island_of_its_plan(runs: list[LocalRun]) -> None:
    runs += LENGTHS
    where = replace(cluster(4, 8e6 / 200), topology=Topology(("a", "a", "b", "b")))
    plan = planned(where)
    assert plan.outer == plan.outer.on(where.topology) and plan.outer.islands


@pytest.mark.parametrize(("total_steps", "steps"), [(28, 4), (112, 16), (None, 64), (27, 0)])
def test_a_run_has_7_rounds_at_least(
    total_steps: int | None, steps: int, runs: list[LocalRun]
) -> None:
    runs += LENGTHS
    assert planned(cluster(2, 8e6 / 200), total_steps).local_steps == steps


def test_slow_links_have_a_lag_of_one_round(runs: list[LocalRun]) -> None:
    runs += LENGTHS[1:2]
    plan = planned(cluster(2, 8e6 / 50))
    assert plan.outer is not None and plan.outer.lag == 16
    assert plan.predicted_s == pytest.approx(STEP_S)


@pytest.mark.parametrize(("exchange_s", "lag"), [(5.0, 0), (50.0, 16)])
def test_a_lag_must_hide_more_than_it_costs(
    exchange_s: float, lag: int, runs: list[LocalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: 5 s are 0.3 s of each of 16 steps, and a lag of 1.2 times the samples 0.7 s."""
    runs += LENGTHS[1:2]
    monkeypatch.setattr(local_prices, "LAG_TIMES", 1.2)
    plan = planned(cluster(2, 8e6 / exchange_s))
    assert plan.outer is not None and plan.outer.lag == lag
    assert price_of(plan).times == pytest.approx(1.4 * (1.2 if lag else 1.0))


@pytest.mark.parametrize(("exchange_s", "codec"), [(10.0, ""), (50.0, "int8"), (200.0, "int8")])
def test_rounds_are_coded_where_that_pays(
    exchange_s: float, codec: str, runs: list[LocalRun]
) -> None:
    """Four steps of 3.5 s hide 10 s, and a quarter of 50 s. The codec is 1.1 times as dear."""
    runs += [LocalRun(4, "", NO_START, 1.0, "made up"), LocalRun(4, "int8", NO_START, 1.1, "so")]
    fast = CodingPace(1e-10, 1e-10)
    where = replace(cluster(2, 8e6 / exchange_s), codings={"int8": fast})
    plan = planned(where)
    assert plan.local_steps == 4 and {choice.codec for choice in plan.choices} == {codec}
    slow = replace(where, codings={"int8": CodingPace(1e-4, 1e-4)})
    assert {choice.codec for choice in planned(slow).choices} == {""}
    unknown = replace(where, codings={})
    assert {choice.codec for choice in planned(unknown).choices} == {""}


@pytest.mark.parametrize(
    ("exchange_s", "first"),
    [
        (10.0, 250),  # by hand: a quarter at 9.5 to 13.5 s, and 0.75 · 3.5 s, beside 1.8 · 3.5 s
        (50.0, 0),  # a quarter at about 50 s is more than 1.8 · 3.5 s
    ],
)
def test_exact_steps_come_first_where_they_pay(
    exchange_s: float, first: int, runs: list[LocalRun]
) -> None:
    runs += [
        LocalRun(16, "", NO_START, 1.8, "made up"),
        LocalRun(16, "", EXACT_FIRST, 1.0, "made up"),
    ]
    plan = planned(cluster(2, 8e6 / exchange_s), 1000)
    assert plan.outer is not None and plan.outer.warmup_steps == first


@pytest.mark.parametrize(("total_steps", "grows"), [(400, False), (4000, True)])
def test_growing_rounds_pay_in_long_runs(
    total_steps: int, grows: bool, runs: list[LocalRun]
) -> None:
    """Four short rounds wait for 200 s each: 2 s for each of 400 steps, and 0.2 s of 4,000."""
    runs += [LocalRun(16, "", NO_START, 1.2, "made up"), LocalRun(16, "", GROWS, 1.1, "made up")]
    plan = planned(cluster(2, 8e6 / 200), total_steps)
    assert plan.outer is not None and plan.outer.grows == grows


def test_local_steps_must_gain_a_tenth(runs: list[LocalRun]) -> None:
    """An exact step takes 8.5 to 11.5 s by 8 s of bytes: about 2.4 to 3.3 steps of compute."""
    where = cluster(2, 1e6)
    exact_s = plan_for(NET, where, strategies=["replicate"], options=ONE_BUCKET).predicted_s
    for part, steps in ((0.89, 4), (0.91, 0)):
        runs[:] = [LocalRun(4, "", NO_START, part * exact_s / STEP_S, "made up")]
        assert planned(where).local_steps == steps


def test_what_computes_alone_has_nothing_to_gain() -> None:
    for exchange_s, nothing in ((0.01, True), (4.0, False)):
        where = cluster(2, 8e6 / exchange_s)
        plan = plan_for(NET, where, strategies=["replicate"], options=ONE_BUCKET)
        assert has_nothing_to_gain(plan, NET) is nothing


def test_a_price_is_that_of_the_run_most_like_it(runs: list[LocalRun]) -> None:
    runs += [
        *LENGTHS,
        LocalRun(16, "", GROWS, 1.2, "made up"),
        replace(LENGTHS[1], lags=True, times=1.6),
    ]
    plan = planned(cluster(2, 8e6 / 2000))

    def price(steps: int, codec: str = "", **outer: bool | int) -> tuple[float, str] | None:
        assert plan.outer is not None
        found = replace(plan, local_steps=steps, outer=replace(plan.outer, **{"lag": 0, **outer}))
        known = local_price(found, codec)
        return None if known is None else (known.times, known.source)

    assert price(16) == (1.4, "made up, H = 16")
    assert price(5) == price(16), "the next longer rounds"
    assert price(1000) == (1.5, "made up, H = 64")
    assert price(16, grows=True) == (1.2, "made up, H = 16")
    assert price(16, warmup_steps=9) == price(16), "a start that was not measured is none"
    assert price(16, lag=16) == (1.6, "made up, H = 16")
    assert price(16, "int8") is None


def test_explain_has_step_price_and_product(runs: list[LocalRun]) -> None:
    runs += LENGTHS[1:2]
    where = cluster(2, 8e6 / 50)
    plan = planned(where)
    exact_s = plan_for(
        NET, where, pins={"*": "replicate:allreduce"}, options=ONE_BUCKET
    ).predicted_s
    product_s = 1.4 * plan.predicted_s
    learning, product = (line for line in explain(plan, NET, where).features if "loss" in line)
    assert learning.startswith("learning: 1.4 times the samples for a loss (made up, H = 16)")
    assert product == (
        f"time to a loss: 3500.0 ms for a step, {1e3 * product_s:.1f} ms for each exact step; that "
        f"is {product_s / exact_s:.2g} of data parallel steps of {1e3 * exact_s:.1f} ms, and 1.40 "
        "times 3500.0 ms with nothing sent"
    )
