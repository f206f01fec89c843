"""Predicted steps against sums done by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from made_up import cluster, layer, linear, measured, model

from shoal.contracts.exchange import Exchange
from shoal.core.cost import Cost, Pace, Price, Wait
from shoal.core.facts import Cluster, LayerProfile, ModelProfile, Setting, Topology, UpdatePace
from shoal.core.plan import Choice, Plan, Site
from shoal.core.registry import registered
from shoal.planner.step import Timeline
from shoal.planner.timeline import Predictor
from shoal.profiling.products import ProductFacts
from shoal.strategies.replicate import Replicate

MB = 250_000  # float32 elements in a megabyte
NEARLY = {"abs": 1e-3}  # flags and headers add some bytes


def timeline(
    profile: ModelProfile, strategy: str = "replicate", lanes: int = 1, **where: float
) -> Timeline:
    exchange = "allreduce" if strategy in ("replicate", "seldom") else ""
    choices = [Choice(each.name, strategy, exchange) for each in profile.layers]
    return Predictor(profile, cluster(2, 1e6, **where)).predict(
        choices, bucket_bytes=1, lanes=lanes
    )


def test_a_transfer_hides_under_what_is_left_of_backward() -> None:
    # a megabyte a second: from 0.5 to 1.5
    found = timeline(model(layer("b", 0.5, MB), layer("a", 2.0, 1)))
    assert found.end_s == pytest.approx(2.0, **NEARLY) and found.step_s == pytest.approx(
        3.5, **NEARLY
    )


@pytest.mark.parametrize(("lanes", "sent_s"), [(1, [3.0, 5.0]), (2, [4.0, 5.0])])
def test_lanes_share_the_link_evenly(lanes: int, sent_s: list[float]) -> None:
    # two seconds each
    found = timeline(model(layer("b", 1.0, 2 * MB), layer("a", 2.0, 2 * MB)), lanes=lanes)
    assert [span.sent_s for span in found.spans] == pytest.approx(sent_s, **NEARLY), (
        "b alone for a second, then both"
    )
    assert found.sent_bytes == pytest.approx(4e6, rel=1e-3)


@pytest.mark.parametrize(
    ("cpu", "sent_s"),
    # a megabyte takes a second of the link, or of a processor that link and two lanes could feed
    [(1e-6, [1.0, 2.0]), (2e-6, [2.0, 2.0]), (4e-6, [4.0, 4.0])],
)
def test_lanes_that_the_processor_limits_leave_the_link_to_others(
    cpu: float, sent_s: list[float]
) -> None:
    found = timeline(
        model(layer("b", 0.0, MB), layer("a", 0.0, MB), backward_s=0.0), lanes=2, cpu=cpu, cores=9.0
    )
    ends = sorted(span.sent_s for span in found.spans)
    assert ends[-1] == pytest.approx(sent_s[-1], **NEARLY)


@pytest.mark.parametrize(("burst_mb", "step_s"), [(0, 7.5), (2, 5.5), (100, 4.0)])
def test_what_was_not_used_of_a_shaped_link_passes_afterwards(
    burst_mb: float, step_s: float
) -> None:
    """Four seconds of bytes behind 3.5 of computing: a burst spares those at most, and never more
    than was paused.
    """
    where = cluster(2, 1e6)
    where = replace(where, link=replace(where.link, burst_bytes=burst_mb * 1e6))
    profile = model(layer("a", 2.0, 4 * MB))
    found = Predictor(profile, where).predict(
        [Choice("a", "replicate", "allreduce")], bucket_bytes=1, lanes=1
    )
    assert found.step_s == pytest.approx(step_s, **NEARLY)


def test_a_burst_passes_no_faster_than_the_processor_sends_it() -> None:
    # half of a core at the rate, so at most twice as fast
    where = cluster(2, 1e6, cores=1.0, cpu=0.5e-6)
    where = replace(where, link=replace(where.link, burst_bytes=2e6))
    found = Predictor(model(layer("a", 2.0, 4 * MB)), where).predict(
        [Choice("a", "replicate", "allreduce")], bucket_bytes=1, lanes=1
    )
    assert found.end_s == pytest.approx(2.0 + 2.0, **NEARLY), (
        "two megabytes a second for two, while the burst lasts"
    )


def test_latency_is_hidden_by_other_lanes_only() -> None:
    profile = model(*(layer(name, 0.0, 1) for name in "abcd"), backward_s=0.0)
    alone, shared = timeline(profile, latency_s=0.1), timeline(profile, latency_s=0.1, lanes=4)
    assert alone.end_s == pytest.approx(4 * shared.end_s, rel=1e-3)


def test_factor_takes_the_product_out_of_backward_and_multiplies_for_all_ranks() -> None:
    profile = model(linear("a", 2.0, 1000, 1000, rows=1, product_s=0.25))
    roomy, shared = timeline(profile, "factor", cores=2.0), timeline(profile, "factor", cores=1.0)
    sent_s = 8e3 / 1e6
    assert roomy.backward_s == pytest.approx(1.75, **NEARLY)
    assert roomy.end_s == pytest.approx(1.75 + sent_s + 2 * 0.25, **NEARLY)
    assert shared.end_s == pytest.approx(roomy.end_s, **NEARLY), (
        "nothing computes beside it after backward"
    )


def test_lanes_take_from_the_main_thread_where_cores_are_shared() -> None:
    profile = model(linear("b", 1.0, 1000, 1000, rows=1, product_s=0.25), layer("a", 2.0, 1))
    assert timeline_of(profile, cores=2.0).backward_s == pytest.approx(1.75, **NEARLY)
    assert timeline_of(profile, cores=1.0).backward_s == pytest.approx(1.75 + 0.5, **NEARLY)


def test_a_lane_and_the_main_thread_are_both_slower_on_one_core() -> None:
    profile = model(linear("b", 1.0, 1000, 1000, rows=1, product_s=0.75), layer("a", 2.0, 1))
    # factor takes the own product, 0.75 s, out of backward: 1 s is left
    found = timeline_of(profile, cores=1.0)
    sent_s = 0.25 + 8e3 / 1e6
    assert found.backward_s == pytest.approx(sent_s + 2 * (1.25 - sent_s), **NEARLY)
    assert found.end_s == pytest.approx(1.25 + 2 * 0.75, **NEARLY), (
        "what both have to do, one after the other"
    )
    roomy = timeline_of(profile, cores=2.0)
    assert roomy.end_s == pytest.approx(sent_s + 2 * 0.75, **NEARLY)
    some = timeline_of(profile, cores=1.5)
    assert some.backward_s == pytest.approx(sent_s + (1.25 - sent_s) / 0.75, **NEARLY), (
        "three quarters for each"
    )


def test_a_round_takes_its_processor_time_from_the_main_thread_and_waits_for_it() -> None:
    profile = model(layer("b", 0.5, 1), layer("a", 2.0, 1))
    choices = [Choice(each.name, "replicate", "allreduce") for each in profile.layers]
    slow = Pace(wall=Price(0.1, 0.0), cpu=Price(0.1, 0.0))
    where = replace(cluster(2, 1e6, cores=1.0), paces={"allreduce": slow})
    found = Predictor(profile, where).predict(choices, bucket_bytes=1, lanes=1)
    assert found.spans[0].end_s == pytest.approx(0.5 + 2 * 2 * 0.1, **NEARLY), (
        "two in a row, at half the speed"
    )
    assert found.backward_s == pytest.approx(2.0 + 2 * 0.1, **NEARLY)


def timeline_of(profile: ModelProfile, cores: float) -> Timeline:
    """b by factor, a by all-reduce."""
    choices = [Choice("b", "factor"), Choice("a", "replicate", "allreduce")]
    return Predictor(profile, cluster(2, 1e6, cores=cores)).predict(
        choices, bucket_bytes=1, lanes=2
    )


def test_processor_time_of_bytes_counts_where_cores_are_shared() -> None:
    profile = model(layer("b", 0.5, MB // 2), layer("a", 2.0, 1))
    assert timeline(profile, cores=2.0, cpu=2e-7).end_s == pytest.approx(2.0, **NEARLY)
    assert timeline(profile, cores=1.0, cpu=2e-7).end_s == pytest.approx(2.1, **NEARLY)
    assert timeline(profile, cores=0.5, cpu=2e-7).end_s == pytest.approx(2.2, **NEARLY)


def test_ranks_that_share_cores_take_turns_and_all_wait_for_the_last() -> None:
    profile = model(layer("b", 0.5, MB), layer("a", 2.0, 1))
    for cores, ready_s in ((2.0, 0.5), (1.0, 0.5), (0.5, 2.0 - 1.5 / 2), (0.25, 2.0 - 1.5 / 4)):
        found = timeline(profile, cores=cores)
        assert found.spans[0].ready_s == pytest.approx(ready_s, **NEARLY)
        assert found.backward_s == pytest.approx(2.0, **NEARLY), "as long as ever"


def test_a_rank_with_a_quota_takes_no_turns_but_has_its_part_of_a_core() -> None:
    where = replace(cluster(2, 1e6, cores=0.5, cpu=2e-7), steady=True)
    profile = model(layer("b", 0.5, MB // 2), layer("a", 2.0, 1))
    choices = [Choice(each.name, "replicate", "allreduce") for each in profile.layers]
    found = Predictor(profile, where).predict(choices, bucket_bytes=1, lanes=1)
    assert found.spans[0].ready_s == pytest.approx(0.5, **NEARLY)
    assert found.end_s == pytest.approx(2.2, **NEARLY), "its bytes take 0.1 s of a whole core"


def test_ranks_that_share_cores_meet_at_a_layer_that_is_cut_over_them() -> None:
    profile = model(
        layer("d", 0.5, 1),
        linear("cut", 1.0, 1000, 1000, rows=1),
        layer("b", 1.5, 1),
        layer("a", 2.0, 1),
    )
    choices = [
        Choice(
            n.name,
            "column" if n.name == "cut" else "replicate",
            "" if n.name == "cut" else "direct",
        )
        for n in profile.layers
    ]
    found = Predictor(profile, cluster(2, 1e9, cores=0.5)).predict(choices, bucket_bytes=1, lanes=2)
    ready = [span.ready_s for span in found.spans]
    assert ready == pytest.approx([1.0 - 0.5 / 2, 2.0 - 0.5 / 2, 2.0], rel=0.01)


@pytest.mark.parametrize(("chunks", "hidden_s"), [(1, 0.0), (4, 0.75 * 0.16), (9, 0.75 * 0.16)])
def test_chunks_hide_under_products_and_what_goes_back_under_the_weights_gradient(
    chunks: int, hidden_s: float
) -> None:
    cut = replace(linear("cut", 1.0, 10_000, 1000, rows=4, product_s=0.5), forward_s=0.5)
    profile = model(cut, layer("a", 2.0, 1)).under(Setting(chunks))
    choices = [Choice("cut", "column"), Choice("a", "replicate", "direct")]
    predictor = Predictor(profile, cluster(2, 1e6))
    found, cost = (
        predictor.predict(choices, bucket_bytes=1, lanes=1),
        predictor.cost(Site(("cut",), "column", "")),
    )
    x_s, y_s = 4 * 10_000 * 4 / 1e6, 4 * 500 * 4 / 1e6  # both ways, one rank's rows to the other
    assert cost.in_forward is not None and cost.in_backward is not None
    beside = cost.in_forward.beside_s, cost.in_backward.beside_s
    assert beside == pytest.approx((hidden_s, x_s), **NEARLY), (
        "all of it, where the weight's gradient takes longer"
    )
    assert found.waited_s == pytest.approx(x_s + y_s - hidden_s, **NEARLY)
    assert found.backward_s == pytest.approx(2.0 + y_s, **NEARLY)
    assert found.forward_s == pytest.approx(1.0, **NEARLY), "half of the layer, for twice the rows"


def test_chunks_pay_what_a_product_takes_however_few_rows_it_has() -> None:
    cut = linear("cut", 1.0, 10_000, 1000, rows=4, product_s=0.5)
    product = replace(cut.measured(ProductFacts), fixed_s=0.1)
    cut = measured(replace(cut, forward_s=0.5), product)
    kept = [
        Predictor(model(cut).under(Setting(c)), cluster(2, 1e6)).cost(Site(("cut",), "column", ""))
        for c in (1, 3)
    ]
    again = 0.5 * 0.1 / product.seconds(4)  # this rank's half of it, as a part of its own products
    assert kept[1].forward_s - kept[0].forward_s == pytest.approx(2 * again * cut.forward_s)
    assert kept[1].backward_s - kept[0].backward_s == pytest.approx(again * cut.backward_s), (
        "of one product of two"
    )


def test_a_measured_pace_counts_for_wall_and_processor_and_packing_for_backward() -> None:
    profile = model(layer("b", 0.5, MB), layer("a", 2.0, 1))
    choices = [Choice(each.name, "replicate", "allreduce") for each in profile.layers]
    slow = Pace(wall=Price(0.1, 2e-7), cpu=Price(0.01, 1e-7))  # two messages in a row
    crowded = replace(cluster(2, 1e6, cores=1.0), paces={"allreduce": slow}, pack_byte_s=1e-7)
    found = Predictor(profile, crowded).predict(choices, bucket_bytes=1, lanes=1)
    assert found.spans[0].sent_s == pytest.approx(0.5 + 0.1 + 0.2, **NEARLY), "packed, then sent"
    assert found.backward_s == pytest.approx(2.0 + 0.1 + 2 * 0.01 + 0.1, **NEARLY)
    assert found.end_s == pytest.approx(found.backward_s + 2 * 0.1, **NEARLY)


def sliced(
    profile: ModelProfile, lanes: int = 2, cores: float = 2.0, bucket_bytes: int = 1_500_000
) -> Timeline:
    choices = [Choice(each.name, "sliced", "direct") for each in profile.layers]
    return Predictor(profile, cluster(2, 1e6, cores=cores)).predict(
        choices, bucket_bytes=bucket_bytes, lanes=lanes
    )


def test_owners_send_half_in_backward_and_half_into_the_next_forward() -> None:
    found = sliced(
        model(layer("b", 0.5, 2 * MB, needed_s=0.9), layer("a", 2.0, 1), optimizer_s=0.0)
    )
    assert [span.sent_s for span in found.spans] == pytest.approx([1.5, 2.0], **NEARLY), (
        "2 MB, of which one is a half"
    )
    assert found.end_s == pytest.approx(2.0, **NEARLY), "nobody waits for it"
    assert found.waited_s == pytest.approx(0.1, **NEARLY), "back from 2.0 to 3.0, needed at 2.9"
    assert found.step_s == pytest.approx(3.1, **NEARLY)


def test_what_the_next_forward_needs_first_comes_back_first() -> None:
    late, early = (
        layer("late", 0.5, 2 * MB, needed_s=0.9),
        layer("early", 2.0, 2 * MB, needed_s=0.0),
    )
    found = sliced(model(late, early, optimizer_s=0.0), lanes=1)
    assert found.spans[1].end_s == pytest.approx(3.0, **NEARLY)
    assert found.waited_s == pytest.approx(2.0 + 0.1, **NEARLY), (
        "early at 4.0 instead of 2.0, then late at 5.0"
    )


def test_what_comes_back_shares_the_link_with_what_is_still_sent() -> None:
    late, early = (
        layer("late", 0.5, 2 * MB, needed_s=0.9),
        layer("early", 2.0, 2 * MB, needed_s=0.0),
    )
    found = sliced(model(late, early, optimizer_s=0.0))
    assert [span.end_s for span in found.spans] == pytest.approx([1.5, 4.0], **NEARLY)
    assert [span.back_s for span in found.spans] == pytest.approx([4.0, 5.0], **NEARLY), (
        "late's lane was free"
    )
    assert found.waited_s == pytest.approx(3.0, **NEARLY)


def test_a_layer_larger_than_a_bucket_comes_and_goes_in_parts() -> None:
    fat = model(layer("fat", 0.5, 6 * MB, needed_s=0.0), optimizer_s=0.3)
    found = sliced(fat, lanes=3, bucket_bytes=2_000_000, cores=3.0)
    assert [(span.site.part, span.site.parts) for span in found.spans] == [(0, 3), (1, 3), (2, 3)]
    assert [span.ready_s for span in found.spans] == pytest.approx([0.5] * 3, **NEARLY)
    assert [span.end_s for span in found.spans] == pytest.approx([3.5] * 3, **NEARLY), (
        "6 MB, of which 3 now"
    )
    assert [span.back_s for span in found.spans] == pytest.approx([6.55] * 3, **NEARLY), (
        "updated side by side, 0.15 s"
    )
    one = sliced(fat, lanes=3, bucket_bytes=6_000_000)
    assert found.sent_bytes == pytest.approx(one.sent_bytes, rel=1e-4)  # two shares and marks more


def test_a_gradient_costs_the_main_thread_something_whatever_its_size() -> None:
    profile = model(layer("b", 0.5, 1), layer("a", 2.0, 1))
    busy = replace(cluster(2, 1e9), pack_each_s=0.1)
    for strategy, exchange in (("replicate", "allreduce"), ("sliced", "direct")):
        choices = [Choice(each.name, strategy, exchange) for each in profile.layers]
        found = Predictor(profile, busy).predict(choices, bucket_bytes=1, lanes=1)
        assert found.backward_s == pytest.approx(2.0 + 2 * 0.1, **NEARLY)


def test_a_parameter_costs_an_update_something_whatever_its_size() -> None:
    """Of 0.8 s 0.1 go once and 0.1 for each of three parameters, and 0.4 s with 4 MB."""
    profile = replace(
        model(
            layer("c", 0.4, MB // 2, needed_s=0.9),
            layer("b", 0.5, MB // 2, needed_s=0.9),
            layer("a", 2.0, MB, needed_s=0.0),
            optimizer_s=0.8,
        ),
        update=UpdatePace(call_s=0.1, parameter_s=0.1),
    )
    a = Choice("a", "replicate", "allreduce")
    halves = [Choice(name, "sliced", "direct") for name in "cb"]
    found = Predictor(profile, cluster(2, 1e6)).predict([*halves, a], bucket_bytes=1, lanes=1)
    assert found.optimizer_s == pytest.approx(0.1 + 0.1 + 0.2, **NEARLY), "a's"
    returned_s = found.spans[0].back_s - found.spans[0].end_s
    lone = replace(profile, update=UpdatePace())
    less = Predictor(lone, cluster(2, 1e6)).predict([*halves, a], bucket_bytes=1, lanes=1)
    assert less.optimizer_s == pytest.approx(0.4, **NEARLY)
    assert returned_s - (less.spans[0].back_s - less.spans[0].end_s) == pytest.approx(
        2 * (0.1 + 0.1 - 0.05), **NEARLY
    ), "of b and of c, one after the other: 0.05 s less of bytes each"
    owned = [*halves, Choice("a", "sliced", "direct")]
    every = Predictor(profile, cluster(2, 1e6)).predict(owned, bucket_bytes=1, lanes=1)
    assert every.optimizer_s == 0.0, "nothing is left to call it for"


def test_owners_update_their_share_on_a_lane() -> None:
    half = model(
        layer("b", 0.5, MB, needed_s=0.9), layer("a", 2.0, MB, needed_s=0.0), optimizer_s=0.8
    )
    choices = [Choice("b", "sliced", "direct"), Choice("a", "replicate", "direct")]
    found = Predictor(half, cluster(2, 1e6)).predict(choices, bucket_bytes=1, lanes=2)
    assert found.optimizer_s == pytest.approx(0.4, **NEARLY), "of what is not owned"
    assert found.end_s == pytest.approx(3.0, **NEARLY), "a, whole; b's half went before it"
    assert found.waited_s == pytest.approx(0.0, **NEARLY), (
        "b: 0.2 s of update, half a second back, from 3.0 to 3.7"
    )
    late = model(
        layer("b", 0.5, MB, needed_s=0.9), layer("a", 2.0, MB, needed_s=0.9), optimizer_s=0.8
    )
    shared = sliced(late, cores=1.0, bucket_bytes=1)
    assert shared.forward_s == pytest.approx(1.0 + 2 * 0.2, **NEARLY), (
        "its processor is the main thread's"
    )
    waiting = sliced(half, cores=1.0, bucket_bytes=1)
    assert waiting.forward_s == pytest.approx(1.0, **NEARLY), (
        "which has nothing to lose while it waits for a"
    )


def test_the_floor_is_compute_or_bytes_at_the_links_rate() -> None:
    half = model(
        layer("b", 0.5, MB, needed_s=0.9), layer("a", 2.0, MB, needed_s=0.0), optimizer_s=0.8
    )
    owned = Plan(
        2,
        "made up",
        tuple(Choice(name, "sliced", "direct") for name in "ba"),
        bucket_bytes=1,
        lanes=2,
    )
    whole = Plan(
        2,
        "made up",
        tuple(Choice(name, "replicate", "direct") for name in "ba"),
        bucket_bytes=1,
        lanes=2,
    )
    floors = [
        Predictor(half, cluster(2, 1e6, cores=cores)).floor_s(plan)
        for plan in (owned, whole)
        for cores in (2, 1)
    ]
    assert floors == pytest.approx([1.0 + 2.0, 3.0 + 0.4, 3.8, 3.8], **NEARLY)
    assert Predictor(half, cluster(2, 1e5)).floor_s(owned) == pytest.approx(20.0, rel=1e-3), (
        "2 MB, both ways"
    )


@pytest.mark.parametrize(
    ("hosts", "exchange", "crossing_mb"),
    [
        ("aabb", "direct", 8.0),  # each half once from and once to each of two ranks
        ("aabb", "ring", 6.0),  # three quarters of it twice, past one border
        ("aabb", "hierarchical", 4.0),  # half of it there, half of it back
        ("abcd", "hierarchical", 6.0),
    ],
)
def test_the_floor_counts_what_leaves_a_host(hosts: str, exchange: str, crossing_mb: float) -> None:
    profile = model(layer("a", 2.0, MB * 4))
    where = replace(cluster(4, 1e5), topology=Topology(tuple(hosts)))
    plan = Plan(4, "made up", (Choice("a", "replicate", exchange),), bucket_bytes=1, lanes=1)
    link_bytes_per_s = 1e5 * where.topology.ranks_per_host
    expected = crossing_mb * 1e6 / link_bytes_per_s
    assert Predictor(profile, where).floor_s(plan) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("hosts", "differs"), [("abcd", False), ("aabb", True), ("aaab", True), ("aaaa", False)]
)
def test_hierarchical_is_planned_with_where_it_differs_from_direct(
    hosts: str, differs: bool
) -> None:
    where = replace(cluster(4, 1e5), topology=Topology(tuple(hosts)))
    carriers = Predictor(model(layer("a", 2.0, MB)), where).carriers("sliced")
    assert ("hierarchical" in carriers) is differs
    assert {"direct", "ring"} <= set(carriers)


def test_on_one_host_the_floor_is_what_the_busiest_rank_moves() -> None:
    profile, where = (
        model(layer("a", 2.0, MB * 4)),
        replace(cluster(2, 1e5), topology=Topology(("a", "a"))),
    )
    plan = Plan(2, "made up", (Choice("a", "replicate", "hierarchical"),), bucket_bytes=1, lanes=1)
    assert Predictor(profile, where).floor_s(plan) == pytest.approx(40.0, rel=1e-3)


def served(
    profile: ModelProfile, workers: int = 2, servers: int = 2, duplex: float = 1.0
) -> Timeline:
    """All layers at servers, over a link of a megabyte a second in each direction; two lanes each
    way.
    """
    where = replace(
        cluster(workers, 1e6), servers=tuple(f"s{i}" for i in range(servers)), duplex=duplex
    )
    choices = [Choice(each.name, "server", "direct") for each in profile.layers]
    return Predictor(profile, where).predict(choices, bucket_bytes=1, lanes=2)


def test_what_comes_from_servers_does_not_share_the_link_with_what_goes_to_them() -> None:
    profile = model(
        *(layer(name, 0.0, MB // 4) for name in "abcdefgh"),
        backward_s=0.0,
        forward_s=0.0,
        optimizer_s=0.0,
    )
    found = served(profile)
    there_s, back_s = (
        max(getattr(span, which) for span in found.spans) for which in ("end_s", "back_s")
    )
    assert there_s == pytest.approx(8 * 0.25, rel=1e-2), "eight quarters of a megabyte, one way"
    assert back_s == pytest.approx(there_s + 2 * 0.25, rel=1e-2), (
        "the last two that came, and no more, are behind"
    )
    assert found.late == 8, (
        "all were on their way when backward ended: they come back as they are summed"
    )
    assert [span.back_s for span in found.spans] == sorted(span.back_s for span in found.spans)


def test_where_all_is_at_the_servers_when_backward_ends_parameters_come_as_forward_needs_them() -> (
    None
):
    profile = model(
        *(layer(name, 0.0, MB // 4) for name in "abcd"),
        backward_s=2.0,
        forward_s=0.0,
        optimizer_s=0.0,
    )
    found = served(profile)
    assert found.late == 0
    assert [span.back_s for span in found.spans] == sorted(
        (span.back_s for span in found.spans), reverse=True
    )


def test_servers_links_are_as_full_as_workers_where_these_own_a_share() -> None:
    profile = model(
        *(layer(name, 0.0, MB // 4) for name in "abcdefgh"),
        backward_s=0.0,
        forward_s=0.0,
        optimizer_s=0.0,
    )
    found = served(profile, workers=4, servers=2)
    there_s = max(span.end_s for span in found.spans)
    assert there_s == pytest.approx(1.2 * 8 * 0.25, rel=1e-2), (
        "four workers bring a server three tenths of all each"
    )


def test_directions_that_hinder_one_another_are_slower_while_both_are_in_use() -> None:
    profile = model(
        *(layer(name, 0.0, MB // 4) for name in "abcdefgh"),
        backward_s=0.0,
        forward_s=0.0,
        optimizer_s=0.0,
    )
    found = served(profile, duplex=0.5)
    there_s, back_s = (
        max(getattr(span, which) for span in found.spans) for which in ("end_s", "back_s")
    )
    assert there_s == pytest.approx(2 * 0.25 + 6 * 0.5, rel=1e-2), "the first two go alone"
    assert back_s == pytest.approx(there_s + 2 * 0.25, rel=1e-2), "the last two come alone"


class Seldom(Replicate):
    """Exchanges after every third step, which nobody waits for, in a code that takes a second."""

    name = "seldom"

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        cost = super().estimate(layers, exchange, cluster)
        assert cost.in_backward is not None
        phase = replace(cost.in_backward, wait=Wait.NEVER, before_s=1.0, every=3)
        return replace(cost, in_backward=None, after_step=phase)


def test_a_phase_after_every_third_step_takes_a_third_of_its_seconds_and_delays_nothing() -> None:
    with registered(Seldom):
        found = timeline(model(layer("a", 2.0, 3 * MB), optimizer_s=0.5), "seldom")
    (span,) = found.spans
    assert span.end_s == pytest.approx(2.0), "nothing goes in backward"
    assert span.back_s == pytest.approx(2.0 + (1.0 + 3.0) / 3, **NEARLY)
    assert found.step_s == pytest.approx(1.0 + 2.0 + 0.5), "it hides under forward"
    assert found.sent_bytes == pytest.approx(1e6, rel=1e-3)
