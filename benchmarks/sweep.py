"""Which plan wins where: the auto plan against every single-strategy plan that applies, at three
link rates.

    sudo .venv/bin/python benchmarks/sweep.py [RECIPE ...] [RATE ...]

Figures in results/sweep-RECIPE-RATE.json, and printed as a table.

A single-strategy plan pins every layer that the strategy serves, and replicates the rest. "whole"
is the planner's best without cut layers, "pair and factor" pairs where there are any and `factor`
elsewhere, "near 1" to "near 5" the best by prediction of all plans that serve up to two of the five
largest layers otherwise, each in the bucket size that suits it best. All come from one profile.
Each plan takes turns with the auto plan in one job of four hosts (A B A B); a round's figure is the
median step of the slowest rank; a ratio is the median over rounds of that plan ÷ auto: 1 or more
where auto is best. A plan that is worse by a seventh in its first round has no other, and one that
is not ahead by a twentieth in either of two has no third; of one that is predicted to take four
times as long only that is said.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from heapq import nsmallest
from itertools import combinations_with_replacement, product
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.comm.agreement import from_first
from shoal.contracts.launcher import Job
from shoal.contracts.strategy import Strategy
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.plan import Choice, Plan
from shoal.core.registry import of
from shoal.front.recipe import load
from shoal.planner.plan_details import plan_for
from shoal.planner.search import predict_again
from shoal.planner.search_options import DEFAULT
from shoal.planner.timeline import Predictor
from shoal.session.attach import attach
from shoal.session.job import TrainingJob
from shoal.session.opening import Prepared
from shoal.session.session import Attached, current
from shoal_tools.contenders.peers import Peer, Workload, slowest_rank, step_times
from shoal_tools.launch.lab import Lab

HERE = Path(__file__).parent
RESULTS = HERE / "results"
RECIPES = ("digits", "arcface", "gpt", "resnet18", "resnet50", "alexnet")
RATES = ("100mbit", "1gbit", "none")
RANKS, ROUNDS = 4, 4
# seconds of a turn, of one step at least; of all turns of a plan, of two at least
TURN_S, PLAN_S = 3.0, 60.0
# times the auto plan's step: of a plan that is out of the race, and of one that may win it
LOST, AHEAD = 1.15, 0.95
WHOLE = ("replicate", "sliced", "factor")
HOPELESS = 4.0  # times the auto plan's predicted step: of a plan that is not run
LARGEST, NEAR = 5, 5


def measure(recipe: str, rate: str) -> None:
    """What each rank runs; rank 0 writes the figures."""
    session = shoal.init()
    loaded = load(HERE.parent / "examples" / f"{recipe}.py")
    torch.manual_seed(0)
    work = Workload(
        loaded.model,
        loaded.loss(),
        loaded.optimizer,
        loaded.batch(next(iter(shoal.shard(loaded.data()[0])))),
    )
    auto = Peer("auto", seeded(work), work)
    auto.model, auto.loss, auto.optimizer = shoal.parallelize(
        auto.model, auto.loss, auto.optimizer, sample=work.batch
    )
    its = current().attached[auto.model]
    steps = max(1, int(TURN_S / slowest_rank(list(step_times(auto, work.batch, 3, num_warm_up=2)))))
    figures = {}
    for name, plan in from_first(current().comm, Plan, lambda: fixed_list(its)).items():
        if plan.predicted_s > HOPELESS * its.plan.predicted_s:
            ratio = plan.predicted_s / its.plan.predicted_s
            figures[name] = {
                "predicted_ratio": ratio,
                "predicted_s": plan.predicted_s,
                "plan": said(plan),
            }
            continue
        other = contender(work, plan, its)
        rounds = list(raced(auto, other, work.batch, steps))
        other.close()
        figures[name] = {
            "auto_s": statistics.median(mine for mine, _ in rounds),
            "step_s": statistics.median(theirs for _, theirs in rounds),
            "ratio": statistics.median(theirs / mine for mine, theirs in rounds),
            "ratios": [theirs / mine for mine, theirs in rounds],
            "predicted_s": plan.predicted_s,
            "plan": said(plan),
        }
        if session.rank == 0:
            print(f"{recipe}, {rate}: {name} {figures[name]['ratio']:.2f}", flush=True)
    if session.rank == 0:
        report = {
            "auto": said(its.plan),
            "auto_predicted_s": its.plan.predicted_s,
            "plans": figures,
        }
        (RESULTS / f"sweep-{recipe}-{rate}.json").write_text(json.dumps(report, indent=1) + "\n")


def raced(
    auto: Peer, other: Peer, batch: tuple[Any, Any], steps: int
) -> Iterator[tuple[float, float]]:
    """Seconds of a step of both, round by round."""
    best, spent_s = math.inf, 0.0
    for number in range(ROUNDS):
        warm_up = 1 if number else 2  # a new one takes its memory in the first steps
        mine, theirs = (
            slowest_rank(list(step_times(peer, batch, steps, warm_up))) for peer in (auto, other)
        )
        yield mine, theirs
        best, spent_s = min(best, theirs / mine), spent_s + (mine + theirs) * (steps + 1)
        if best > LOST or (number and (best > AHEAD or spent_s > PLAN_S)):
            return


def seeded(work: Workload) -> nn.Module:
    """The model, with the same start in every contender."""
    torch.manual_seed(0)
    return work.model()


def contender(work: Workload, plan: Plan, auto: Attached) -> Peer:
    """A model of its own under a plan of its own; as `parallelize` has it, but that nothing is
    measured again.
    """
    session, peer = current(), Peer("shoal", seeded(work), work)
    job = TrainingJob(peer.model, peer.loss, [peer.optimizer])
    peer.loss, attached = attach(session, job, Prepared(plan, auto.profile, auto.cluster))
    session.attached[peer.model] = attached
    return peer


def fixed_list(auto: Attached) -> dict[str, Plan]:
    """What auto is compared with."""
    asked = plans(auto.profile, auto.cluster)
    listed = {name: plan_for(auto.profile, auto.cluster, **how) for name, how in asked.items()}
    return listed | {f"near {n + 1}": plan for n, plan in enumerate(near(auto))}


def said(plan: Plan) -> dict[str, int]:
    """How many layers each strategy of a plan serves."""
    served = [choice.strategy for choice in plan.choices]
    return {name: served.count(name) for name in sorted(set(served))}


def plans(profile: ModelProfile, cluster: Cluster) -> dict[str, dict[str, object]]:
    """Of these plans, what `plan_for` is asked."""
    listed: dict[str, dict[str, object]] = {"whole": {"strategies": WHOLE}}
    for name, kind in of(Strategy).items():
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
    """The best by prediction, but for the auto plan itself, among those that differ from it in up
    to two layers.
    """
    plan, predictor = attached.plan, Predictor(attached.profile, attached.cluster)
    step_s = attrgetter("predicted_s")

    def predicted(each: Plan) -> Plan:
        return predict_again(each, attached.profile, attached.cluster)

    largest = sorted(attached.profile.layers, key=lambda layer: -layer.nbytes)[:LARGEST]
    ways = {
        layer.name: [
            Choice(layer.name, name, carrier)
            for name in of(Strategy)
            if predictor.refusal(layer, name) is None and not predictor.needs(layer.name, name)
            for carrier in predictor.carriers(name)
        ]
        for layer in largest
        if not predictor.needs(layer.name, plan.choice(layer.name).strategy)
    }
    changed = dict.fromkeys(
        plan.with_choice(its).with_choice(others)
        for one, other in combinations_with_replacement(ways, 2)
        for its, others in product(ways[one], ways[other])
    )
    first = nsmallest(
        8 * NEAR, (predicted(each) for each in changed if each.choices != plan.choices), key=step_s
    )
    best = [
        min((predicted(replace(each, bucket_bytes=n)) for n in DEFAULT.bucket_bytes), key=step_s)
        for each in first
    ]
    return nsmallest(NEAR, best, key=step_s)


def row(recipe: str, rate: str, report: dict) -> str:
    """One line of the table in docs/lab/cut-layers.md."""
    ran = {name: figures for name, figures in report["plans"].items() if "ratio" in figures}
    others = [
        f"{name} {ran[name]['ratio']:.2f}"
        for name in sorted(ran, key=lambda name: ran[name]["ratio"])
    ]
    auto = ", ".join(f"{count} {name}" for name, count in report["auto"].items())
    not_run = {name: figures for name, figures in report["plans"].items() if name not in ran}
    others += [
        f"{name} (predicted {figures['predicted_ratio']:.0f})" for name, figures in not_run.items()
    ]
    said = ", ".join(others)
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
