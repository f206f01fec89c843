"""The search against exhaustive search, the crossing points against the formulas, and pins."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from made_up import cluster, layer, linear, measured, model

from shoal.core.cost import Pace, Price
from shoal.core.errors import PlanError
from shoal.core.plan import Choice
from shoal.planner.explain import explain
from shoal.planner.options import least_cut_bytes
from shoal.planner.plan_details import plan_for
from shoal.planner.search import CUT_WORTH, LANES, OTHER_WORTH, search
from shoal.planner.search_options import DEFAULT, Constraints, SearchOptions
from shoal.planner.timeline import Predictor
from shoal.profiling.products import ProductFacts
from shoal.strategies.pair import PairFacts

NET = model(
    linear("head.fc2", 0.1, 4096, 1000, rows=8, product_s=0.001),
    linear("head.fc1", 0.5, 9216, 4096, rows=8, product_s=0.01),
    layer("body.conv", 2.0, 600_000),
)


SEEDS = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]
)
WHOLE = ["replicate", "sliced", "factor", "server"]  # those that leave every rank whole layers


def strategies_of(profile_layer_choices: tuple[Choice, ...]) -> dict[str, str]:
    return {choice.layer: choice.strategy for choice in profile_layer_choices}


def test_fat_layers_send_factors_and_convolutions_gradients() -> None:
    plan = search(NET, cluster(4, 25e6), Constraints(strategies=WHOLE))
    assert strategies_of(plan.choices) == {
        "head.fc2": "factor",
        "head.fc1": "factor",
        "body.conv": "sliced",
    }
    assert plan.ranks == 4 and plan.model == "made up" and plan.predicted_s > 3.4


def test_where_traffic_hides_anyway_nothing_is_changed() -> None:
    net = model(linear("fc", 0.1, 4096, 4096, rows=8), layer("conv", 2.0, 1000), optimizer_s=0.0)
    plan = search(net, cluster(4, 1e10))
    assert set(strategies_of(plan.choices).values()) == {"replicate"}


def test_a_wide_layer_is_cut_as_a_pair_with_the_small_one_behind_it() -> None:
    small = measured(linear("small", 0.1, 4096, 10, rows=32), PairFacts(fed_by="wide"))
    wide = measured(linear("wide", 0.2, 1024, 4096, rows=32), PairFacts(feeds="small"))
    net, where = (
        model(small, wide, forward_s=0.01, backward_s=0.2, optimizer_s=0.0),
        cluster(4, 1e8),
    )
    plan = search(net, where)
    assert strategies_of(plan.choices) == {"small": "row_pair", "wide": "column_pair"}
    for row in explain(plan, net, where).layers:  # without half of a pair the other is no pair's
        least_s = min(other.step_s for other in row.others if not other.refusal)
        assert least_s > row.chosen.step_s, row


def test_a_layer_that_ranks_may_call_unlike_often_is_cut_by_a_pin_only() -> None:
    """As the wide layer above, but that the model looks at values before it calls it."""
    small = measured(linear("small", 0.1, 4096, 10, rows=32), PairFacts(fed_by="wide"))
    wide = measured(linear("wide", 0.2, 1024, 4096, rows=32), PairFacts(feeds="small"))
    cautious = replace(wide, may_vary="a gate looks at a tensor's values (item)")
    net, where = (
        model(small, cautious, forward_s=0.01, backward_s=0.2, optimizer_s=0.0),
        cluster(4, 1e8),
    )
    plan = search(net, where)
    cut = {"column", "row", "column_pair", "row_pair"}
    assert strategies_of(plan.choices)["wide"] not in cut
    told = {
        other.choice.strategy: other.refusal
        for row in explain(plan, net, where).layers
        for other in row.others
        if row.layer == "wide"
    }
    assert "looks at a tensor's values" in (told["column"] or "")
    pinned = search(net, where, Constraints(pins={"wide": "column"}))
    assert strategies_of(pinned.choices)["wide"] == "column"


@pytest.mark.parametrize(("fixed_s", "chunks"), [(0.0, 8), (1.0, 1)])
def test_rows_come_in_chunks_where_each_has_a_product_to_hide_under(
    fixed_s: float, chunks: int
) -> None:
    """A product takes a second: all of it as long however few rows there are, or none of it."""
    cut = linear("cut", 1.0, 8192, 8192, rows=256, product_s=1.0)
    product = ProductFacts(fixed_s, s_per_row=(1.0 - fixed_s) / 256, own_s=1.0)
    cut = measured(replace(cut, forward_s=1.0), product)
    net = model(cut, layer("conv", 2.0, 1))
    plan = plan_for(net, cluster(4, 1e7), pins={"cut": "column"})
    assert plan.chunks == chunks
    assert (
        plan.predicted_s
        <= search(net, cluster(4, 1e7), Constraints(pins={"cut": "column"})).predicted_s
    )


def test_owners_share_an_update_that_takes_long() -> None:
    net = model(linear("fc", 0.1, 4096, 4096, rows=1000), layer("conv", 2.0, 1000), optimizer_s=0.5)
    plan = search(net, cluster(4, 1e10))
    assert strategies_of(plan.choices)["fc"] == "sliced"
    assert (
        plan.predicted_s < 3.4
        and search(net, cluster(4, 1e10), Constraints(strategies=["replicate"])).predicted_s >= 3.5
    )


def test_where_memory_is_to_be_low_buckets_on_their_way_are_a_fifth_of_the_model() -> None:
    # 160 MB
    net = model(*(layer(f"conv{i}", 0.5 * i, 10_000_000) for i in range(1, 5)), optimizer_s=0.0)
    slow_to_start = cluster(4, 1e8, latency_s=0.05)
    assert search(net, slow_to_start, Constraints(strategies=["sliced"])).bucket_bytes > 5_400_000
    assert (
        search(net, slow_to_start, Constraints(strategies=["sliced"], memory="low")).bucket_bytes
        == 4 << 20
    )
    tiny = model(layer("conv", 0.5, 1000))
    assert search(tiny, slow_to_start, Constraints(memory="low")).bucket_bytes == 1 << 20, (
        "the smallest"
    )


def test_of_many_layers_small_neighbours_change_together_at_hardly_any_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(0)
    layers = [
        layer(f"l{i}", 2.0 * (i + 1) / 60, draw.choice([100, 200_000]), needed_s=1 - i / 60)
        for i in range(60)
    ]
    tried: list[int] = []
    step_s = Predictor.step_s
    monkeypatch.setattr(
        Predictor, "step_s", lambda *given, **how: tried.append(1) or step_s(*given, **how)
    )
    one_by_one, trials = search(model(*layers), cluster(4, 5e6, cores=0.5)), len(tried)
    together = search(
        model(*layers), cluster(4, 5e6, cores=0.5), options=SearchOptions(most_layers=20)
    )
    assert len(tried) - trials < trials - 100, "twenty groups are fewer than sixty layers"
    assert together.predicted_s == pytest.approx(one_by_one.predicted_s, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_choice_flips_where_the_formula_says(ranks: int) -> None:
    inputs, outputs = 1024, 512
    crossing = 2 * inputs * outputs / (ranks * (inputs + outputs))
    for rows, expected in ((int(crossing * 0.9), "factor"), (int(crossing * 1.1) + 1, "replicate")):
        net = model(linear("fc", 0.0, inputs, outputs, rows=rows), backward_s=0.0, forward_s=0.0)
        plan = search(net, cluster(ranks, 1e5), Constraints(strategies=["replicate", "factor"]))
        assert strategies_of(plan.choices) == {"fc": expected}
        (row,) = explain(plan, net, cluster(ranks, 1e5)).layers
        assert f"K < {crossing:.0f}" in row.flips


def worth(picks: Sequence[str], plain: str = "allreduce") -> float:
    """What a step counts, as cuts must gain something, and so what is not carried by the library's
    all-reduce.
    """
    others = ["sliced", "server", *(["replicate"] if plain != "allreduce" else [])]
    cut = any(pick in ("column", "row", "column_pair", "row_pair") for pick in picks)
    return (1 + OTHER_WORTH * sum(pick in others for pick in picks) / len(picks)) * (
        1 + CUT_WORTH * cut
    )


def found_worth(choices: Sequence[Choice]) -> float:
    """The same of a plan."""
    plain = next(
        (choice.exchange for choice in choices if choice.strategy == "replicate"), "allreduce"
    )
    return worth([choice.strategy for choice in choices], plain)


@SEEDS
def test_the_search_is_within_one_percent_of_trying_everything(seed: int) -> None:
    draw = random.Random(seed)
    times = sorted(draw.uniform(0, 2) for _ in range(4))
    layers = [
        linear(
            f"fc{i}",
            t,
            2 ** draw.randint(6, 12),
            2 ** draw.randint(6, 12),
            draw.choice([4, 64, 1024]),
            0.01,
        )
        if draw.random() < 0.7
        else layer(f"conv{i}", t, draw.randint(1000, 3_000_000))
        for i, t in enumerate(times)
    ]
    net = model(*layers)
    where = cluster(
        draw.choice([2, 4, 8]),
        10 ** draw.uniform(6.5, 9),
        draw.choice([0, 1e-4, 1e-2]),
        draw.choice([0.5, 2]),
    )
    predictor = Predictor(net, where)
    bucketed = ["replicate", "sliced"]
    ways = [[*bucketed, "factor"] if each.kind == "Linear" else bucketed for each in layers]
    best = min(
        predictor.predict(
            [
                Choice(
                    each.name,
                    strategy,
                    dict(zip(bucketed, carriers, strict=True)).get(strategy, ""),
                )
                for each, strategy in zip(layers, picks, strict=True)
            ],
            bucket_bytes,
            LANES,
        ).step_s
        * worth(picks, carriers[0])
        for picks in itertools.product(*ways)
        for carriers in itertools.product(*map(predictor.carriers, bucketed))
        for bucket_bytes in DEFAULT.bucket_bytes
    )
    found = search(net, where, Constraints(strategies=WHOLE))
    assert found.predicted_s * found_worth(found.choices) <= 1.01 * best


@SEEDS
def test_the_search_is_within_one_percent_of_trying_everything_that_cuts(seed: int) -> None:
    """Of plans without cut layers, and of plans with some at what these must be worth."""
    sizes = (1 << 20, 25 << 20)
    draw, whole, cuts = (
        random.Random(seed),
        ["replicate", "factor"],
        ["column", "row", "column_pair", "row_pair"],
    )
    times = sorted(draw.uniform(0, 0.5) for _ in range(4))
    widths, rows = [2 ** draw.randint(9, 13) for _ in range(5)], draw.choice([4, 64, 1024])
    layers = [
        measured(
            linear(f"fc{i}", t, widths[i + 1], widths[i], rows, 0.01),
            PairFacts(f"fc{i - 1}" if i else "", f"fc{i + 1}" if i < 3 else ""),
        )
        for i, t in enumerate(times)
    ]
    net = model(*layers)
    where = cluster(draw.choice([2, 4, 8]), 10 ** draw.uniform(6.5, 9), 1e-4, draw.choice([0.5, 2]))
    predictor = Predictor(net, where)

    def weighed(picks: tuple[str, ...], carrier: str, nbytes: int) -> float:
        choices = [
            Choice(each.name, pick, carrier if pick == "replicate" else "")
            for each, pick in zip(layers, picks, strict=True)
        ]
        return predictor.predict(choices, nbytes, LANES).step_s * worth(picks, carrier)

    def allowed(picks: tuple[str, ...]) -> bool:
        of = dict(zip(names, picks, strict=True))
        served = all(predictor.refusal(each, of[each.name]) is None for each in layers)
        return served and all(
            of[other] == needed
            for name in names
            for other, needed in predictor.needs(name, of[name]).items()
        )

    names = [each.name for each in layers]
    large = least_cut_bytes(where.link)
    ways = [[*whole, *(cuts if each.nbytes >= large else [])] for each in layers]
    best = min(
        weighed(picks, carrier, nbytes)
        for picks in filter(allowed, itertools.product(*ways))
        for carrier in predictor.carriers("replicate")
        for nbytes in sizes
    )
    options = SearchOptions(bucket_bytes=sizes)
    found = search(net, where, Constraints(strategies=[*whole, *cuts]), options=options)
    assert found.predicted_s * found_worth(found.choices) <= 1.01 * best


def test_a_pinned_exchange_with_options_is_priced_by_its_own_pace() -> None:
    net, slow = cluster(4, 25e6), Pace(Price(0.0, 1.0), Price(0.0, 0.0))
    pin = {"*": "replicate:ring( chunk_bytes = 4096 )"}
    plan = search(NET, net, Constraints(pins=pin))
    assert {choice.exchange for choice in plan.choices} == {"ring(chunk_bytes=4096)"}
    slower = search(
        NET, replace(net, paces={"ring(chunk_bytes=4096)": slow}), Constraints(pins=pin)
    )
    assert slower.predicted_s > 1e6 > plan.predicted_s
    assert search(NET, replace(net, paces={"ring": slow}), Constraints(pins=pin)) == plan


def test_a_pin_is_kept_and_the_explanation_says_what_it_costs() -> None:
    plan = search(
        NET, cluster(4, 25e6), Constraints(pins={"head.*": "replicate:tree", "head.fc2": "factor"})
    )
    assert plan.choice("head.fc1") == Choice("head.fc1", "replicate", "tree")
    assert plan.choice("head.fc2") == Choice("head.fc2", "factor")
    explanation = explain(plan, NET, cluster(4, 25e6))
    assert explanation.step.total_s == pytest.approx(plan.predicted_s)
    rows = {row.layer: row for row in explanation.layers}
    assert rows["head.fc1"].reason.startswith(
        "pinned, edited, or not tried by the search: row would send"
    )
    assert "and save" in rows["head.fc1"].reason
    conv = {other.choice.strategy: other.refusal for other in rows["body.conv"].others}
    assert "this is a Conv2d" in conv["factor"]


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"head.fc9": "factor"}, r"matches no layer(.|\n)*head\.fc"),
        ({"head.fc1": "factr"}, "no strategy called 'factr'(.|\n)*did you mean 'factor'"),
        ({"head.fc1": "replicate:rong"}, "no exchange called 'rong'(.|\n)*did you mean 'ring'"),
        ({"body.conv": "factor"}, r"factor cannot serve layer body\.conv: .*Conv2d"),
        ({"head.fc1": "factor:ring"}, "factor takes no exchange"),
        (
            {"head.fc1": "sliced:tree"},
            "tree cannot carry sliced(.|\n)*one of collective, direct, hierarchical, ring",
        ),
        ({"head.fc1": "replicate:ring(chunk_byts=1)"}, "did you mean 'chunk_bytes'"),
        ({"head.fc1": 3}, "not a strategy's name"),
    ],
)
def test_a_wrong_pin_is_refused_with_a_way_out(pins: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        search(NET, cluster(4, 25e6), Constraints(pins=pins))


def test_servers_that_a_plan_has_no_use_for_are_named() -> None:
    where = replace(cluster(4, 25e6), servers=("s0", "s1"))
    by_workers, by_servers = (
        search(NET, where, Constraints(pins={"*": strategy}))
        for strategy in ("replicate", "server")
    )
    assert explain(by_workers, NET, where).idle == ("rank 4 (s0)", "rank 5 (s1)")
    assert explain(by_servers, NET, where).idle == ()


def test_where_workers_run_ahead_servers_own_all_and_nothing_else_is_compared() -> None:
    where = replace(cluster(2, 1e6), servers=("s0",))  # in step, each worker owns a quarter
    in_step, ahead = (
        plan_for(NET, replace(where, ahead=ahead), strategies=["server"]) for ahead in (False, True)
    )
    assert 1.8 < ahead.predicted_s / in_step.predicted_s < 2.2
    for shown in explain(ahead, NET, replace(where, ahead=True)).layers:
        assert {other.choice.strategy for other in shown.others if not other.refusal} <= {
            "server",
            "server_rows",
        }


def test_a_layer_that_is_given_to_a_rank_is_served_by_owners() -> None:
    where = cluster(4, 25e6)
    plan = search(NET, where, Constraints(placement={"head.fc2": 1}, strategies=WHOLE))
    assert strategies_of(plan.choices) == {
        "head.fc2": "sliced",
        "head.fc1": "factor",
        "body.conv": "replicate",
    }
    assert plan.placement == {"head.fc2": 1}
    rows = {row.layer: row for row in explain(plan, NET, where).layers}
    refused = {
        other.choice.strategy: other.refusal for other in rows["head.fc2"].others if other.refusal
    }
    assert not {"factor", "replicate", "server", "column"} - set(refused)
    assert "the placement gives head.fc2.weight to rank 1" in refused["replicate"]
    assert not any(
        other.refusal for other in rows["head.fc1"].others if other.choice.strategy == "replicate"
    )


@pytest.mark.parametrize("carrier", ["direct", "ring"])
def test_whole_parameters_cost_the_busiest_owners_link(carrier: str) -> None:
    a_layer_each = SearchOptions(bucket_bytes=(1,))
    net, where = (
        model(*(layer(name, 0.1 * i, 1_000_000) for i, name in enumerate("abcd"))),
        cluster(4, 25e6),
    )
    pins = {"*": f"sliced:{carrier}"}
    plans = {
        each: search(net, where, Constraints(pins=pins, placement=each), options=a_layer_each)
        for each in ("balanced", "round-robin")
    }
    plans["one rank"] = search(
        net, where, Constraints(pins=pins, placement={"*": 3}), options=a_layer_each
    )
    sent = {name: explain(plan, net, where).step.sent_bytes for name, plan in plans.items()}
    assert sent["balanced"] == pytest.approx(2 * 16e6 * 3 / 4, rel=1e-3)
    assert sent["round-robin"] == pytest.approx(sent["balanced"], rel=1e-3), (
        "each of four ranks owns one of four"
    )
    assert sent["one rank"] == pytest.approx(16e6 * {"direct": 3, "ring": 2}[carrier], rel=1e-3)
    assert plans["one rank"].predicted_s > plans["balanced"].predicted_s


def test_a_layer_that_no_allowed_strategy_serves_is_replicated() -> None:
    plan = search(NET, cluster(4, 1e12), Constraints(strategies=["factor"]))
    assert strategies_of(plan.choices) == {
        "head.fc2": "factor",
        "head.fc1": "factor",
        "body.conv": "replicate",
    }


def test_a_pair_that_is_all_that_serves_two_layers_is_taken() -> None:
    small = measured(linear("small", 0.1, 40, 10, rows=32), PairFacts(fed_by="wide"))
    wide = measured(linear("wide", 0.2, 10, 40, rows=32), PairFacts(feeds="small"))
    net = model(small, wide, layer("norm", 0.1, 40))
    plan = search(net, cluster(2, 1e12), Constraints(strategies=["column_pair", "row_pair"]))
    assert strategies_of(plan.choices) == {
        "small": "row_pair",
        "wide": "column_pair",
        "norm": "replicate",
    }


def test_of_many_layers_the_largest_are_compared_with_what_else_there_is() -> None:
    net = model(*(layer(f"l{number}", 0.01 * number, 100 + number) for number in range(100)))
    where = cluster(2, 25e6)
    plan = plan_for(net, where, strategies=["replicate"])
    compared = {row.layer for row in explain(plan, net, where).layers if row.others}
    assert compared == {f"l{number}" for number in range(4, 100)}
    assert not any(row.others for row in explain(plan, net, where, alternatives=False).layers)
