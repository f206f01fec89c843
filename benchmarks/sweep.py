"""Which plan wins where: the auto plan against every single-strategy plan that applies, at three link rates.

    sudo .venv/bin/python benchmarks/sweep.py [RECIPE ...] [RATE ...]      results/sweep-RECIPE-RATE.json, and a table

A single-strategy plan pins every layer that the strategy serves, and replicates the rest. "whole" is the planner's best
without cut layers, "pair and factor" pairs where there are any and `factor` elsewhere, "near 1" to "near 5" the best by
prediction of all plans that serve up to two of the five largest layers otherwise, in any bucket size. Each plan takes
turns with the auto plan in one job of four hosts (A B A B); a round's figure is the median step of the slowest rank; a
ratio is the median over rounds of that plan ÷ auto: 1 or more where auto is best.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path

import torch

import shoal
from shoal import strategies
from shoal.core.contracts import Strategy
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.job import Job
from shoal.core.plan import Choice, Plan
from shoal.core.registry import found
from shoal.launch.lab import Lab
from shoal.peers import Peer, Workload, slowest_rank, step_times
from shoal.planner.search import BUCKET_BYTES, repredicted
from shoal.planner.timeline import Predictor
from shoal.runtime.recipe import load
from shoal.runtime.session import Attached, current
from shoal.worker import pair

HERE = Path(__file__).parent
RESULTS = HERE / "results"
RECIPES = ("digits", "gpt", "resnet18", "resnet50", "alexnet")
RATES = ("100mbit", "1gbit", "none")
RANKS, ROUNDS, ROUND_S = 4, 4, 4.0  # seconds of a turn, of one step at least
WHOLE = ("replicate", "sliced", "factor")
LARGEST, NEAR = 5, 5


def measure(recipe: str, rate: str) -> None:
    """What each rank runs; rank 0 writes the figures."""
    world = shoal.init()
    loaded = load(HERE.parent / "examples" / f"{recipe}.py")
    torch.manual_seed(0)
    batch = pair(next(iter(shoal.shard(loaded.data()[0]))))
    work = Workload(loaded.model, loaded.loss(), loaded.optimizer, batch)
    auto, attached = contender(work, {})
    steps = max(1, int(ROUND_S / slowest_rank(list(step_times(auto, batch, 3, num_warm_up=2)))))
    figures = {}
    listed = plans(attached.profile, attached.cluster)
    listed |= {f"near {n + 1}": {"plan": plan} for n, plan in enumerate(near(attached))}
    for name, options in listed.items():
        other, its = contender(work, options)
        rounds: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            mine, theirs = (slowest_rank(list(step_times(peer, batch, steps, 1))) for peer in (auto, other))
            rounds.append((mine, theirs))
        other.close()
        figures[name] = {
            "auto_s": statistics.median(mine for mine, _ in rounds),
            "step_s": statistics.median(theirs for _, theirs in rounds),
            "ratio": statistics.median(theirs / mine for mine, theirs in rounds),
            "predicted_s": its.plan.predicted_s,
        }
    if world.rank == 0:
        served = [choice.strategy for choice in attached.plan.choices]
        auto_plan = {name: served.count(name) for name in sorted(set(served))}
        report = {"auto": auto_plan, "auto_predicted_s": attached.plan.predicted_s, "plans": figures}
        (RESULTS / f"sweep-{recipe}-{rate}.json").write_text(json.dumps(report, indent=1) + "\n")


def contender(work: Workload, options: dict[str, object]) -> tuple[Peer, Attached]:
    """A model of its own under a plan of its own."""
    torch.manual_seed(0)
    peer = Peer("shoal", work.model(), work)
    peer.model, peer.loss, peer.optimizer = shoal.parallelize(
        peer.model, peer.loss, peer.optimizer, sample=work.batch, **options
    )
    return peer, current().attached[peer.model]


def plans(profile: ModelProfile, cluster: Cluster) -> dict[str, dict[str, object]]:
    """What auto is compared with, as arguments of `parallelize`."""
    listed: dict[str, dict[str, object]] = {"whole": {"strategies": WHOLE}}
    for name, kind in found(strategies, Strategy).items():
        pins: dict[str, str] = {}
        for layer in profile.layers:
            together = {layer.name: name, **kind().needs(layer)}
            if kind().refusal(layer, cluster) is None and not together.keys() & pins.keys():
                pins |= together
        if pins and name != "row_pair":  # which comes with column_pair
            listed[name] = {"pins": {"*": "replicate"} | pins}
    if "column_pair" in listed and "factor" in listed:
        pairs = {layer: way for layer, way in listed["column_pair"]["pins"].items() if layer != "*"}
        listed["pair and factor"] = {"pins": listed["factor"]["pins"] | pairs}
    return listed


def near(attached: Attached) -> list[Plan]:
    """The best by prediction, but for the auto plan itself, among those that differ from it in up to two layers."""
    plan, predictor = attached.plan, Predictor(attached.profile, attached.cluster)
    largest = sorted(attached.profile.layers, key=lambda layer: -layer.nbytes)[:LARGEST]
    ways = {
        layer.name: [
            Choice(layer.name, name, carrier)
            for name in found(strategies, Strategy)
            if predictor.refusal(layer, name) is None and not predictor.needs(layer.name, name)
            for carrier in predictor.carriers(name)
        ]
        for layer in largest
        if not predictor.needs(layer.name, plan.choice(layer.name).strategy)
    }
    changed = dict.fromkeys(  # in the same order on every rank
        plan.with_choice(its).with_choice(others)
        for one, other in combinations_with_replacement(ways, 2)
        for its, others in product(ways[one], ways[other])
    )
    every = [replace(each, bucket_bytes=nbytes) for each in changed for nbytes in BUCKET_BYTES]
    every = [repredicted(each, attached.profile, attached.cluster) for each in every if each != plan]
    return sorted(every, key=lambda each: each.predicted_s)[:NEAR]


def row(recipe: str, rate: str, report: dict) -> str:
    """One line of the table in docs/benchmarks.md."""
    others = sorted(report["plans"].items(), key=lambda item: item[1]["ratio"])
    auto = ", ".join(f"{count} {name}" for name, count in report["auto"].items())
    said = ", ".join(f"{name} {figures['ratio']:.2f}" for name, figures in others)
    return f"| {recipe}, {rate} | {auto} | {said} |"


def main() -> None:
    """Run the recipes and rates that the command line names, or all."""
    recipes = [name for name in RECIPES if name in sys.argv] or list(RECIPES)
    rates = [rate for rate in RATES if rate in sys.argv] or list(RATES)
    for recipe in recipes:
        for rate in rates:
            command = (sys.executable, __file__, "rank", recipe, rate)
            code = Lab(hosts=RANKS, rate=rate).launch(Job(command, RANKS)).exit_code
            if code:
                sys.exit(code)
    print("| recipe, link | auto plan's layers | step of other plans ÷ auto's |\n|---|---|---|")
    for recipe in RECIPES:
        for rate in RATES:
            path = RESULTS / f"sweep-{recipe}-{rate}.json"
            if path.exists():
                print(row(recipe, rate, json.loads(path.read_text())))


if __name__ == "__main__":
    if "rank" in sys.argv:
        measure(*sys.argv[2:4])
    else:
        main()
