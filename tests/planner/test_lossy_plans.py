"""When the planner takes a codec: only allowed, only if a loss is reached a tenth sooner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_up import cluster, layer, linear, measured, model

from shoal.codecs.coded_exchange import read_exchange
from shoal.contracts.exchange import Bucket
from shoal.core.cost import CodingPace
from shoal.core.errors import PlanError
from shoal.core.facts import LayerProfile, ModelProfile
from shoal.core.plan import Plan, Site
from shoal.front.text import explained, plain
from shoal.planner.explain import explain
from shoal.planner.plan_details import plan_for
from shoal.planner.search_options import SearchOptions
from shoal.planner.timeline import Predictor
from shoal.profiling.products import ProductFacts
from shoal.profiling.tails import Tail, TailFacts

FAST, SLOW = CodingPace(1e-10, 1e-10), CodingPace(1e-5, 1e-5)


def matrix(name: str, ready_s: float, rows: int, kind: str = "Conv2d") -> LayerProfile:
    """A layer of one weight of so many rows, of 1,000 columns."""
    made = layer(name, ready_s, rows * 1000, kind)
    weight = replace(made.parameters[0], shape=(rows, 1000))
    return replace(made, parameters=(weight,))


NET = model(matrix("late", 0.5, 10_000), matrix("early", 2.0, 10_000))
SLOW_LINK = replace(cluster(4, 10e6), codings={"int8": FAST, "bfloat16": FAST})
FEW = SearchOptions(bucket_bytes=(1 << 20,))
BUCKETS: dict[str, Any] = {"strategies": ["replicate", "sliced"], "options": FEW}


def codecs_in(plan: Plan) -> set[str]:
    return {choice.codec for choice in plan.choices}


def test_none_is_taken_unless_allowed() -> None:
    assert codecs_in(plan_for(NET, SLOW_LINK, **BUCKETS)) == {""}


def test_what_is_allowed_is_taken_where_the_link_is_slow() -> None:
    exact = plan_for(NET, SLOW_LINK, **BUCKETS)
    halved = plan_for(NET, SLOW_LINK, codecs=["bfloat16"], **BUCKETS)
    quartered = plan_for(NET, SLOW_LINK, codecs=["bfloat16", "int8"], **BUCKETS)
    assert codecs_in(halved) == {"bfloat16"} and codecs_in(quartered) == {"int8"}
    assert quartered.predicted_s < 0.7 * halved.predicted_s < 0.5 * exact.predicted_s


def test_none_is_taken_where_all_hides() -> None:
    fast = replace(SLOW_LINK, link=replace(SLOW_LINK.link, bytes_per_s=1e9))
    exact = plan_for(NET, fast, **BUCKETS)
    assert plan_for(NET, fast, codecs=["int8"], **BUCKETS) == exact


def test_one_that_codes_slowly_is_not_taken() -> None:
    """A hundred values a millisecond: the link is faster."""
    slow = replace(SLOW_LINK, codings={"int8": SLOW})
    assert codecs_in(plan_for(NET, slow, codecs=["int8"], **BUCKETS)) == {""}


def test_what_gains_less_than_a_tenth_is_not_taken() -> None:
    small = model(matrix("late", 0.5, 10), matrix("early", 2.0, 300))
    exact = plan_for(small, SLOW_LINK, **BUCKETS)
    pinned = plan_for(small, SLOW_LINK, pins={"*": "sliced:direct+int8"}, options=FEW)
    assert 0.9 * exact.predicted_s < pinned.predicted_s < 0.99 * exact.predicted_s
    assert plan_for(small, SLOW_LINK, codecs=["int8"], **BUCKETS) == exact


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_embeddings_stay_exact(kind: str) -> None:
    net = model(matrix("late", 0.5, 10_000), matrix("table", 2.0, 10_000, kind))
    plan = plan_for(net, SLOW_LINK, codecs=["int8"], **BUCKETS)
    assert "+" not in plan.choice("table").exchange and "+int8" in plan.choice("late").exchange


def test_rows_of_a_layer_that_is_cut_cross_as_codes() -> None:
    net = model(linear("cut", 1.0, 8192, 8192, rows=256), layer("conv", 2.0, 1))
    cut: dict[str, Any] = {"strategies": ["column", "replicate"], "options": FEW}
    exact = plan_for(net, SLOW_LINK, **cut)
    assert exact.choice("cut").way == "column"
    coded = plan_for(net, SLOW_LINK, codecs=["bfloat16"], **cut)
    assert coded.choice("cut").way == "column+bfloat16"
    assert coded.predicted_s < 0.7 * exact.predicted_s
    slow = replace(SLOW_LINK, codings={"bfloat16": SLOW})
    assert plan_for(net, slow, codecs=["bfloat16"], **cut) == exact


def test_servers_are_sent_codes_where_workers_keep_step() -> None:
    served = replace(SLOW_LINK, servers=("x", "y"))
    options: dict[str, Any] = {"strategies": ["server"], "options": FEW}
    exact = plan_for(NET, served, **options)
    coded = plan_for(NET, served, codecs=["int8"], **options)
    assert {choice.exchange for choice in coded.choices} == {"direct+int8"}
    assert coded.predicted_s < 0.5 * exact.predicted_s
    ahead = plan_for(NET, replace(served, ahead=True), codecs=["int8"], **options)
    assert codecs_in(ahead) == {""}


def test_what_coding_takes_at_workers_and_at_servers() -> None:
    """By hand: two workers own nothing, two servers 600 and 400 of 1,000 values."""
    exchange = read_exchange("direct+int8")
    pace = replace(SLOW_LINK, codings={"int8": CodingPace(encode_s=3.0, decode_s=5.0)})
    bucket = Bucket(1000, 4, (0, 0, 600, 400))
    there, back = exchange.coding_s(bucket, pace, 4, servers=2)
    assert there == 1000 * 3.0 + 2 * 600 * 5.0, "a worker codes all, a server reads two codes"
    assert back == 600 * 3.0 + 1000 * 5.0
    there, _ = exchange.coding_s(Bucket(1000, 4, (500, 500)), pace, 2)
    assert there == 500 * 3.0 + 500 * 5.0


def test_what_terms_take_that_are_added_on_their_way() -> None:
    """By hand: every rank makes terms of all values that have such, and reads all sums."""
    exchange = read_exchange("allreduce+low_rank")
    pace = CodingPace(encode_s=100.0, decode_s=100.0, terms_s=3.0, sums_s=5.0)
    bucket = Bucket(1000 * 20 + 15 + 7, 4, control=(7,), shapes=((1000, 20), (5, 3)))
    net = replace(SLOW_LINK, codings={"low_rank": pace})
    assert exchange.coding_s(bucket, net, 4) == (20_000 * 3.0, 20_000 * 5.0)
    assert exchange.memory_bytes(bucket, 4) == 20_000 * 4
    message = Bucket(4 * 1000 + 15 + 7, 4)
    assert exchange.traffic(bucket, net.topology) == read_exchange("allreduce").traffic(
        message, net.topology
    )


def test_terms_are_taken_where_codes_take_long() -> None:
    slow = CodingPace(encode_s=1e-5, decode_s=1e-5, terms_s=1e-10, sums_s=1e-10)
    net = replace(SLOW_LINK, codings={"low_rank": slow})
    plan = plan_for(NET, net, codecs=["low_rank"], **BUCKETS)
    assert {choice.way for choice in plan.choices} <= {
        "replicate:allreduce+low_rank",
        "replicate:tree+low_rank",
    }


def with_end(activation_bytes: float) -> ModelProfile:
    """Two layers; the one whose gradient comes first may run on a tail host."""
    tail = Tail(
        ("late",),
        ("late",),
        micro_batches=4,
        sent_bytes=activation_bytes,
        received_bytes=activation_bytes,
        forward_s=0.1,
        backward_s=0.2,
        body_forward_s=0.5,
        body_backward_s=1.0,
        activation_bytes=activation_bytes,
        gradient_bytes=activation_bytes,
    )
    late = measured(matrix("late", 0.5, 100_000), TailFacts(tail), ProductFacts())
    return model(late, matrix("early", 2.0, 10))


@pytest.mark.parametrize(
    ("nbytes", "codecs", "way"),
    [
        (40e6, ["bfloat16"], "stage+bfloat16"),
        (1e3, ["bfloat16"], "stage"),  # hardly anything crosses
    ],
)
def test_what_goes_to_tail_hosts_and_back(nbytes: float, codecs: list[str], way: str) -> None:
    net = replace(SLOW_LINK, tail=("far",))
    chosen = plan_for(
        with_end(nbytes), net, codecs=codecs, strategies=["stage", "replicate"], options=FEW
    )
    assert chosen.choice("late").way == way


def test_what_codes_take_at_a_worker_and_its_tail_host() -> None:
    """By hand: of 1,000 activations a worker codes as many, and reads as many gradients."""
    pace = CodingPace(encode_s=0.003, decode_s=0.005)
    net = replace(SLOW_LINK, codings={"bfloat16": pace}, tail=("far",))
    profile, way = with_end(4000.0), ("late",)
    predictor = Predictor(profile, net)
    exact, coded = (predictor.cost(Site(way, "stage", c)) for c in ("", "+bfloat16"))
    assert coded.traffic.sent[0] == exact.traffic.sent[0] / 2
    assert coded.traffic.received[0] == exact.traffic.received[0] / 2
    # what the body takes more is waited for in any case: all micro-batches go through it
    assert coded.forward_s - exact.forward_s > 3.0
    assert coded.backward_s - exact.backward_s > 5.0


@pytest.mark.parametrize(("top_k_s", "chosen"), [(3e-8, "top_k"), (3e-7, "low_rank")])
def test_of_codecs_that_may_be_off_alike_the_sooner_loss_decides(
    top_k_s: float, chosen: str
) -> None:
    """Low rank is the faster one in both cases, and learns later: 1.59 times, top_k 1.4."""
    slow, fast = CodingPace(top_k_s, top_k_s), CodingPace(terms_s=1e-8, sums_s=1e-8)
    net = replace(SLOW_LINK, codings={"top_k": slow, "low_rank": fast})
    steps = {
        codecs: plan_for(NET, net, codecs=list(codecs), **BUCKETS)
        for codecs in (("top_k",), ("low_rank",), ("top_k", "low_rank"))
    }
    top_k, low_rank, both = steps.values()
    assert low_rank.predicted_s < top_k.predicted_s
    assert (low_rank.predicted_s * 1.59 < top_k.predicted_s * 1.4) is (chosen == "low_rank")
    assert codecs_in(both) == {chosen}


@pytest.mark.parametrize(("bytes_per_s", "chosen"), [(66e6, ""), (10e6, "one_bit")])
def test_a_codec_must_gain_more_than_it_learns_later(bytes_per_s: float, chosen: str) -> None:
    """One bit learns 1.27 times later. On the faster link it would gain 1.15 to 1.27."""
    net = replace(cluster(4, bytes_per_s), codings={"one_bit": FAST})
    exact = plan_for(NET, net, **BUCKETS)
    pinned = plan_for(NET, net, pins={"*": "sliced:direct+one_bit"}, options=FEW)
    gain = exact.predicted_s / pinned.predicted_s
    assert 1.15 < gain < 1.27 if not chosen else gain > 1.5
    assert codecs_in(plan_for(NET, net, codecs=["one_bit"], **BUCKETS)) == {chosen}


@pytest.mark.parametrize(
    ("way", "line"),
    [
        ("sliced:direct+int8", "as many samples for a loss as exact steps"),
        ("sliced:direct+low_rank", "1.79 times the samples for a loss (docs/lab/codecs.md"),
        ("replicate:allreduce+low_rank", "1.59 times the samples for a loss (docs/lab/codecs.md"),
    ],
)
def test_explain_shows_how_much_later_a_plan_learns(way: str, line: str) -> None:
    plan = plan_for(NET, SLOW_LINK, pins={"*": way}, options=FEW)
    explanation = explain(plan, NET, SLOW_LINK)
    page = plain(explained(explanation))
    assert f"learning: {line}" in page
    if "times" in line:
        times = float(line.split()[0])
        assert f"an exact one of {1e3 * times * plan.predicted_s:.1f} ms" in page
    exact = plan_for(NET, SLOW_LINK, **BUCKETS)
    assert "learning" not in plain(explained(explain(exact, NET, SLOW_LINK)))


def test_layers_of_vectors_stay_exact() -> None:
    net = model(matrix("late", 0.5, 10_000), layer("norm", 2.0, 10_000_000, "LayerNorm"))
    plan = plan_for(net, SLOW_LINK, codecs=["int8"], **BUCKETS)
    assert "+" not in plan.choice("norm").exchange and "+int8" in plan.choice("late").exchange


def test_what_hides_anyway_stays_exact() -> None:
    """A small layer whose gradient comes first; the large one behind it is what takes long."""
    net = model(matrix("early", 0.1, 1000), matrix("last", 2.0, 30_000), backward_s=2.0)
    plan = plan_for(net, SLOW_LINK, codecs=["int8"], **BUCKETS)
    assert "+int8" in plan.choice("last").exchange and "+" not in plan.choice("early").exchange


def test_pins_stay() -> None:
    pins = {"late": "replicate:ring"}
    plan = plan_for(NET, SLOW_LINK, codecs=["int8"], pins=pins, options=FEW)
    assert plan.choice("late").way == "replicate:ring"
    assert "+int8" in plan.choice("early").exchange


def test_a_limit_of_memory_is_kept() -> None:
    """What a codec loses is kept: a number for each value."""
    for times, codec in ((2.5, ""), (3.5, "int8")):
        limit = times * NET.nbytes
        plan = plan_for(NET, SLOW_LINK, codecs=["int8"], memory_limit=limit, **BUCKETS)
        assert codecs_in(plan) == {codec}


def test_low_memory_keeps_buckets_small() -> None:
    """Of a model of 40 MB those that have memory at one time may be 8 MB, with six of them."""
    many = model(*(matrix(f"layer {n}", 2.0, 100) for n in range(100)))
    sizes: dict[str, int] = {}
    for memory in ("fast", "low"):
        plan = plan_for(many, SLOW_LINK, codecs=["int8"], memory=memory, strategies=["replicate"])
        assert "int8" in codecs_in(plan)
        sizes[memory] = plan.bucket_bytes
    assert sizes["low"] <= 8e6 / 6 < sizes["fast"]


def test_explain_shows_exact_and_lossy_side_by_side() -> None:
    plan = plan_for(NET, SLOW_LINK, codecs=["int8"], **BUCKETS)
    explanation = explain(plan, NET, SLOW_LINK)
    (without_s, without_bytes) = explanation.without_codecs or (0.0, 0.0)
    step = explanation.step
    assert without_s > 2 * step.total_s and without_bytes > 3.9 * step.sent_bytes
    page = plain(explained(explanation, reasons=True))
    for way in ("direct+int8", "ring+int8", "direct+bfloat16", "replicate:ring ", "exact, without"):
        assert way in page, way


def test_an_exact_plan_says_nothing_of_codecs() -> None:
    bare = replace(SLOW_LINK, codings={})
    explanation = explain(plan_for(NET, bare, **BUCKETS), NET, bare)
    assert explanation.without_codecs is None
    assert "+" not in "".join(o.choice.exchange for row in explanation.layers for o in row.others)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(PlanError, match="did you mean 'int8'"):
        plan_for(NET, SLOW_LINK, codecs=["int9"])
