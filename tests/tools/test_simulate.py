"""What is foreseen: FireCaffe's laws, draws of the slowest, and what limits, flips and helps."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from math import inf
from statistics import median, quantiles

import pytest
from made_up import cluster, layer, linear, model

from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Link, ModelProfile, Topology
from shoal.core.foresight import COMPUTE, LINK, STRAGGLERS, Network, Question
from shoal.core.plan import Choice
from shoal.planner.imagined_hosts import imagined
from shoal.planner.plan_details import plan_for
from shoal.planner.timeline import Predictor
from shoal_tools.simulate import explained, simulate, slowest

RATE, LATENCY_S = 125e6, 1e-4
NUMEL = 1 << 22
ALONE = Cluster(Topology(("here",)), Link(0.0, inf), 16.0)
SIZES = [2**power for power in range(1, 11)]  # 2 to 1,024 hosts
GIGABIT = Network(bytes_per_s=RATE)
EVEN = Question(GIGABIT, straggler=0.0)


def small() -> ModelProfile:
    """Two layers whose bytes take a tenth of the step at 1 Gbit/s."""
    first = layer("first", 2.0, 7_000_000)
    weight = replace(first.parameters[0], shape=(7000, 1000))
    last = linear("last", 0.5, 1000, 1000, rows=64, product_s=0.1)
    return model(last, replace(first, parameters=(weight,)))


def seconds(strategy: str, exchange: str, hosts: int, latency_s: float, **there: object) -> float:
    """Of link and lane, for one bucket of 16 MB."""
    network = Network(RATE, latency_s)
    where = replace(imagined(ALONE, hosts, network), **there)  # type: ignore[arg-type]
    profile = model(layer("one", 1.0, NUMEL))
    return Predictor(profile, where).alone_s(Choice("one", strategy, exchange))[1]


@pytest.mark.parametrize(
    ("strategy", "exchange"),
    [("replicate", "ring"), ("replicate", "allreduce"), ("sliced", "direct")],
)
def test_rings_and_slices_are_flat(strategy: str, exchange: str) -> None:
    """Of bytes: a host sends and receives what it has twice, less the parts that stay."""
    once = 4 * NUMEL / RATE
    for hosts in SIZES:
        took = seconds(strategy, exchange, hosts, latency_s=0.0)
        # slices have some bytes of control behind them
        assert took == pytest.approx(2 * once * (hosts - 1) / hosts, rel=5e-3)


def test_a_tree_is_logarithmic() -> None:
    """Each doubling adds a level, there and back; its bytes flow in chunks and are flat."""
    took = [seconds("replicate", "tree", hosts, LATENCY_S) for hosts in SIZES]
    added = [after - before for before, after in pairwise(took[2:])]
    assert added == pytest.approx([2 * LATENCY_S] * len(added), rel=1e-6)


def test_a_server_is_linear() -> None:
    """All of the workers' bytes pass one link, there and back."""
    once = 4 * NUMEL / RATE
    for hosts in SIZES:
        took = seconds("server", "direct", hosts, 0.0, servers=("server",), ahead=True)
        assert took == pytest.approx(2 * hosts * once, rel=1e-3)


def test_as_many_hosts_as_measured_take_what_the_planner_predicts() -> None:
    measured = cluster(4, RATE, LATENCY_S)
    answer = simulate(small(), measured, [4], Question(straggler=0.0))
    assert answer.scales[0].step_s == pytest.approx(plan_for(small(), measured).predicted_s)


@pytest.mark.parametrize("hosts", [1, 4, 64])
def test_the_slowest_of_hosts_is_the_largest_of_as_many_draws(hosts: int) -> None:
    draw = random.Random(hosts)
    largest = [max(draw.gauss(1, 0.1) for _ in range(hosts)) for _ in range(4000)]
    assert slowest(hosts, 0.5, 0.1) == pytest.approx(median(largest), abs=0.01)
    assert slowest(hosts, 0.95, 0.1) == pytest.approx(quantiles(largest, n=20)[-1], abs=0.01)


def test_the_parts_of_a_step_are_the_step() -> None:
    answer = simulate(small(), ALONE, [1, 2, 16], Question(GIGABIT, straggler=0.05))
    for scale in answer.scales:
        assert sum(scale.limits.values()) == pytest.approx(scale.step_s)
        assert scale.p95_s > scale.step_s
    assert answer.scales[-1].limits[STRAGGLERS] > answer.scales[1].limits[STRAGGLERS] > 0
    assert answer.scales[0].times == answer.scales[0].efficiency == 1


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("codecs", [(), ("int8",)])
@pytest.mark.parametrize("rate", [RATE / 20, RATE * 100])
def test_the_plan_of_the_most_hosts_takes_what_their_row_says(
    rate: float, codecs: tuple[str, ...], strong: bool
) -> None:
    """A page's card and the row for the same hosts are one figure, stragglers and all."""
    asked = Question(Network(rate), straggler=0.05, strong=strong, codecs=codecs)
    answer = simulate(small(), ALONE, [2, 8], asked)
    found = explained(small(), ALONE, answer)
    assert found is not None
    explanation, timeline, _ = found
    last = answer.scales[-1]
    assert explanation.step.total_s == pytest.approx(last.step_s, rel=1e-12)
    assert timeline.step_s == last.step_s
    for scale in answer.scales:
        assert sum(scale.limits.values()) == pytest.approx(scale.step_s, rel=1e-12)
        assert min(scale.limits.values()) >= 0


def test_more_than_a_host_comes_of_computing_less() -> None:
    """The reason that is given holds: of plans beyond 100 %, a rank computes less than one host."""
    heavy = model(linear("head", 1.9, 4096, 4096, rows=64), optimizer_s=3.0)
    for strong in (False, True):
        answer = simulate(heavy, ALONE, [2, 4], replace(EVEN, strong=strong))
        beyond = [scale for scale in answer.scales if scale.is_beyond]
        assert beyond or strong, "owners share the optimizer's step"
        for scale in beyond:
            assert scale.limits[COMPUTE] < answer.alone_s / (scale.hosts if strong else 1)


def test_hosts_that_are_alike_have_no_unlucky_steps() -> None:
    (scale,) = simulate(small(), ALONE, [8], EVEN).scales
    assert scale.p95_s == scale.step_s
    assert scale.limits[STRAGGLERS] == 0


def test_a_slow_link_limits_and_a_quick_one_does_not() -> None:
    def asked(rate: float) -> Question:
        return replace(EVEN, network=Network(bytes_per_s=rate))

    (slow,) = simulate(small(), ALONE, [8], asked(RATE / 20)).scales
    (quick,) = simulate(small(), ALONE, [8], asked(RATE * 100)).scales
    assert slow.limit == LINK
    assert slow.limits[LINK] > slow.limits[COMPUTE]
    assert quick.limit == COMPUTE
    assert quick.times > slow.times
    assert quick.efficiency > 0.95


def test_ddp_is_foreseen_beside_the_plan() -> None:
    (slow,) = simulate(small(), ALONE, [8], replace(EVEN, network=Network(RATE / 20))).scales
    assert slow.ddp_s is not None and slow.ddp_s >= slow.step_s
    pinned = replace(EVEN, how={"pins": {"*": "replicate:allreduce"}})
    (same,) = simulate(small(), ALONE, [8], pinned).scales
    assert same.ddp_s == pytest.approx(same.step_s)
    assert simulate(small(), ALONE, [1], EVEN).scales[0].ddp_s is None


def test_what_is_shared_out_is_done_sooner_and_sends_as_much() -> None:
    (weak,) = simulate(small(), ALONE, [4], EVEN).scales
    (strong,) = simulate(small(), ALONE, [4], replace(EVEN, strong=True)).scales
    assert strong.step_s < weak.step_s
    assert strong.times < weak.times  # the same bytes for a fourth of the rows
    assert strong.limits[COMPUTE] < weak.limits[COMPUTE]


def test_the_best_help_comes_first_and_none_is_for_one_host() -> None:
    slow = replace(EVEN, network=Network(bytes_per_s=RATE / 20))
    answer = simulate(small(), ALONE, [2, 8], slow)
    gains = {help.change: help.gain for help in answer.helps}
    assert list(gains.values()) == sorted(gains.values(), reverse=True)
    assert gains["links 2 times as fast"] > 1.3
    assert gains["codec int8"] > 1.3
    assert gains["codec int8"] > gains["codec bfloat16"]
    assert gains["hosts that are all alike"] == pytest.approx(1.0)
    assert simulate(small(), ALONE, [1], slow).helps == ()


def test_flips_are_where_layers_come_to_be_served_otherwise() -> None:
    """A head of few rows goes as factors on two hosts, and no longer on many."""
    head = linear("head", 1.9, 4096, 4096, rows=64, product_s=1e-3)
    answer = simulate(
        model(head, layer("first", 2.0, 1000)),
        ALONE,
        [2, 256],
        replace(EVEN, how={"strategies": ["replicate", "factor"]}),
    )
    first, last = (scale.plan.choice("head").strategy for scale in answer.scales)
    assert (first, last) == ("factor", "replicate")
    flips = {flip.layer: flip for flip in answer.flips()}
    assert flips["head"].hosts == 256
    assert flips["head"].before == "factor"


def test_the_answer_is_json() -> None:
    answer = simulate(small(), ALONE, [1, 2], replace(EVEN, codecs=("int8",)))
    told = json.loads(json.dumps(answer.to_json()))
    assert [row["hosts"] for row in told["hosts"]] == [1, 2]
    assert told["hosts"][1]["step_s"] == answer.scales[1].step_s
    assert told["codecs"] == ["int8"]


@pytest.mark.parametrize("hosts", [[], [0], [2, -1]])
def test_no_hosts_are_refused(hosts: list[int]) -> None:
    with pytest.raises(UsageError, match="one host or more"):
        simulate(small(), ALONE, hosts, EVEN)


_LARGE = """
import re, time
from test_simulate import ALONE, EVEN, layer, model, simulate

layers = [layer(f"layer {i}", i / 100, 100_000) for i in range(1, 501)]
simulate(model(*layers, backward_s=5.01), ALONE, [1024], EVEN)
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())  # since this program began
print(time.process_time(), peak[1])
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_500_layers_on_1024_hosts_take_a_minute_and_a_gigabyte(pytestconfig: pytest.Config) -> None:
    tests = pytestconfig.rootpath / "tests"
    paths = os.pathsep.join(str(tests / folder) for folder in ("tools", "planner"))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", _LARGE], capture_output=True, text=True, env=environment, check=True
    )
    processor_s, kilobytes = map(float, done.stdout.split())
    assert processor_s < 60
    assert kilobytes < 1e6
