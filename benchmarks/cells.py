"""Sixty cells: how far is a predicted step from the measured one, and is the best plan named?

    sudo .venv/bin/python benchmarks/cells.py                     all that are not measured yet
    sudo .venv/bin/python benchmarks/cells.py --cells 1-12 --minutes 5
    .venv/bin/python benchmarks/cells.py --summary                what there is, as tables

A cell is a model (cell_models.py), a link, a number of hosts and a plan, drawn by seed. Six cells
are one lab. Plans: "own" is the planner's, "codecs" is its with codecs, "all-reduce", "tree" and
"ring" replicate all layers by that exchange. "sliced", "factor" and "cut" pin what they can serve
("cut" the two largest layers) and replicate the rest.

A rank profiles and plans as `parallelize` does. The step is the median of all ranks'. Then a
few more steps are recorded: forward, backward, the wait for gradients and the update, means over
ranks. The term that was off is the one that differs most from the timeline's.

The machine itself drifts: the same compute takes a tenth more or less some seconds later. So ranks
take turns with the bare model, which sends nothing. "error_now" is of the step as it is predicted
from a profile that is stretched to what compute takes at that time.

In twelve cells the planner's plan takes turns with the three others that are predicted to come
nearest, three rounds each; of each plan the shortest round counts.

By default hosts have equal parts of the processors by a quota (`shoal lab --cores`), 0.9 cores at
most: each is then as a host of its own. Other programs need the rest; where they need more, give
ranks less (`--processors 0.5`). With `--in-turns` ranks share processors as the kernel has it.
Figures in results/cells.json or cells-in-turns.json, cell by cell: what is there is not measured
again. With `--minutes` no cell begins that may end later.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from cell_models import MODELS

import shoal
from shoal.comm.agreement import from_first
from shoal.contracts.launcher import Job
from shoal.core.plan import Plan
from shoal.core.trace import Recorder
from shoal.front.cluster import with_codings
from shoal.planner.imagined_hosts import stretch
from shoal.planner.plan_details import plan_for
from shoal.planner.timeline import Predictor, with_settings_of
from shoal.session.attach import attach
from shoal.session.job import TrainingJob
from shoal.session.opening import Prepared
from shoal.session.session import Attached, current
from shoal_tools.contenders.peers import Peer, Workload, step_times
from shoal_tools.launch.lab import Lab

HERE = Path(__file__).parent
SEED = 38
RATES = ("50mbit", "100mbit", "300mbit", "1gbit", "none")
HOSTS = (2, 2, 3, 4, 4, 5, 6, 6, 7, 8)  # of the labs, two a rate
A_LAB = 6  # cells
OWN, CODED, CUT = "own", "codecs", "cut"
EXCHANGES = {"all-reduce": "allreduce", "tree": "tree", "ring": "ring"}
STRATEGIES = {"sliced": ("sliced",), "factor": ("factor",), CUT: ("column", "embedding")}
# twenty cells' plans
WAYS = (
    *(OWN,) * 8,
    *(CODED, "all-reduce", "sliced", "factor", CUT) * 2,
    "tree",
    "ring",
)
CODECS = ("bfloat16", "int8", "top_k", "low_rank")
MOST_CUT = 2  # layers
PROCESSORS = 0.9  # of the machine's, that ranks have together, unless said otherwise
# seconds of measuring at once, and numbers of steps; how often; seconds of compute alone beside
TURN_S, MOST, TURNS, ALONE_S = 2.0, 60, 2, 1.0
FEWEST = 3  # steps measured at once
# of a turn in a race; plans, and how much longer than the planner's they are
RACE_S, ROUNDS, RIVALS, HOPELESS = 1.4, 3, 3, 1.6
RECORDED = 3
ONE_S = 40.0  # a cell, at most mostly


@dataclass(frozen=True)
class Cell:
    """What is predicted and measured."""

    number: int
    model: str
    rate: str
    hosts: int
    way: str
    race: bool  # whether all plans are measured


def cells() -> list[Cell]:
    """All of them, lab by lab."""
    draw = random.Random(SEED)
    count = A_LAB * len(HOSTS)
    models = islice(dealt(draw, list(MODELS)), count)
    ways = islice(dealt(draw, WAYS), count)
    hosts = draw.sample(HOSTS, len(HOSTS))
    labs = [(rate, each) for rate, each in zip(RATES * 2, hosts, strict=True) for _ in range(A_LAB)]
    races = cycle((True, False))
    return [
        Cell(number, model, rate, each, way, way == OWN and next(races))
        for number, (model, way, (rate, each)) in enumerate(
            zip(models, ways, labs, strict=True), start=1
        )
    ]


def dealt(draw: random.Random, deck: Sequence[str]) -> Iterator[str]:
    """The deck, shuffled, again and again."""
    while True:
        yield from draw.sample(deck, len(deck))


# ------------------------------------------------------------------------------------------------
# on each rank


def rank(path: Path, numbers: Sequence[int], until: float) -> None:
    """Measure cells in a lab; rank 0 writes each down."""
    torch.set_num_threads(1)
    world, comm = shoal.init(), current().comm
    for cell in cells():
        if cell.number not in numbers:
            continue
        if not comm.gather_objects(time.time() + ONE_S < until, "cells: time")[0]:
            return
        began = time.perf_counter()
        found = measured(cell)
        gc.collect()  # models and what runs them are in cycles
        found["took_s"] = time.perf_counter() - began
        if world.rank == 0:
            add(path, {**asdict(cell), **found})
            print(line(found | asdict(cell)), flush=True)


def measured(cell: Cell) -> dict[str, Any]:
    """Predict the cell's step, and measure it."""
    comm = current().comm
    kind = MODELS[cell.model]
    batch = kind.batch(torch.Generator().manual_seed(1000 * cell.number + comm.rank))
    work = Workload(kind.model, kind.loss, kind.optimizer, batch)
    own = seeded(cell, work)
    began = time.perf_counter()
    own.model, own.loss, own.optimizer = shoal.parallelize(
        own.model, own.loss, own.optimizer, sample=batch
    )
    set_up_s = time.perf_counter() - began
    its = current().attached[own.model]
    if cell.way == CODED:
        its = replace(its, cluster=with_codings(its.cluster, comm, CODECS))
    plan = from_first(comm, Plan, lambda: planned(cell.way, its) or its.plan)
    peer = own if plan == its.plan else contender(cell, work, plan, its)
    bare = seeded(cell, work)
    steps_s, bare_s = [], []
    for _ in range(TURNS):
        steps_s.append(turn(peer, batch, plan.predicted_s, TURN_S))
        bare_s.append(alone(bare, batch, its.profile.step_s))
    step_s, times = fmean(steps_s), fmean(bare_s) / its.profile.step_s
    terms = recorded(peer, batch)
    expected = timeline(plan, its)
    now_s = timeline(plan, replace(its, profile=stretch(its.profile, times)))
    found: dict[str, Any] = {
        "served": counted(plan),
        "predicted_s": plan.predicted_s,
        "step_s": step_s,
        "error": plan.predicted_s / step_s - 1,
        "bare_s": [its.profile.step_s, fmean(bare_s)],
        "error_now": sum(now_s.values()) / step_s - 1,
        "off": max(terms, key=lambda name: abs(terms[name] - expected[name])),
        "terms": {name: [expected[name], terms[name]] for name in terms},
        "cores": its.cluster.cores_per_rank,
        "set_up_s": set_up_s,
    }
    if cell.race:
        found["race"] = raced(cell, work, own, its)
    return found


def seeded(cell: Cell, work: Workload) -> Peer:
    """A model with the same start on every rank."""
    torch.manual_seed(cell.number)
    return Peer(cell.way, work.model(), work)


def contender(cell: Cell, work: Workload, plan: Plan, its: Attached) -> Peer:
    """A model of its own under a plan, as `parallelize` has it, but that nothing is measured."""
    session, peer = current(), seeded(cell, work)
    job = TrainingJob(peer.model, peer.loss, [peer.optimizer])
    peer.loss, attached = attach(session, job, Prepared(plan, its.profile, its.cluster))
    session.attached[peer.model] = attached
    return peer


def planned(way: str, its: Attached) -> Plan | None:
    """The plan that a cell asks for; None where there is nothing that it could pin."""
    profile, cluster = its.profile, its.cluster
    if way == OWN:
        return its.plan
    if way == CODED:
        return plan_for(profile, cluster, codecs=CODECS)
    predictor = Predictor(profile, cluster)
    plain = [  # a sparse gradient is not
        layer.name for layer in profile.layers if predictor.refusal(layer, "replicate") is None
    ]
    if way in EXCHANGES:
        every = f"replicate:{EXCHANGES[way]}"
        return plan_for(profile, cluster, pins=dict.fromkeys(plain, every))
    able = {
        layer.name: strategy
        for layer in sorted(profile.layers, key=lambda layer: -layer.nbytes)
        for strategy in STRATEGIES[way]
        if predictor.refusal(layer, strategy) is None
    }
    if way == CUT:
        able = dict(list(able.items())[:MOST_CUT])
    pins = dict.fromkeys(plain, "replicate") | able
    return plan_for(profile, cluster, pins=pins) if able else None


def turn(peer: Peer, batch: tuple[Any, Any], expected_s: float, enough_s: float) -> float:
    """The median step of all ranks: from the last rank's end of one to the last rank's of the next.

    They have one clock, as all are on this machine. A rank's own steps would not do: ranks go
    through a step at different times, and what one of them loses in one it has back in another.
    """
    steps = max(FEWEST, min(int(enough_s / expected_s), MOST))
    ends = [time.perf_counter() for _ in step_times(peer, batch, steps + 1, num_warm_up=1)]
    ranks = current().comm.gather_objects(ends, "cells: ends of steps")
    last = [max(of_ranks) for of_ranks in zip(*ranks, strict=True)]
    return statistics.median(end - begin for begin, end in pairwise(last))


def alone(peer: Peer, batch: tuple[Any, Any], expected_s: float) -> float:
    """The median step of all ranks that begin it together, and send nothing."""
    comm, seconds = current().comm, []
    peer.step(*batch)
    for _ in range(max(FEWEST, min(int(ALONE_S / expected_s), MOST))):
        comm.gather_objects(None, "cells: begin together")
        begin_s = time.perf_counter()
        peer.step(*batch)
        moments = comm.gather_objects((begin_s, time.perf_counter()), "cells: a step alone")
        seconds.append(max(end for _, end in moments) - max(begin for begin, _ in moments))
    return statistics.median(seconds)


def raced(cell: Cell, work: Workload, own: Peer, its: Attached) -> dict[str, list[float]]:
    """Seconds of a step, predicted and measured, of the planner's plan and of every other one."""
    comm = current().comm
    plans = {OWN: its.plan}
    for way in (*EXCHANGES, *STRATEGIES):
        plan = from_first(comm, Plan, lambda way=way: planned(way, its) or its.plan)
        if plan not in plans.values() and plan.predicted_s < HOPELESS * its.plan.predicted_s:
            plans[way] = plan
    nearest = sorted(plans, key=lambda way: plans[way].predicted_s)
    rivals = [way for way in nearest if way != OWN][:RIVALS]
    peers = {OWN: own} | {way: contender(cell, work, plans[way], its) for way in rivals}
    rounds: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(ROUNDS):
        for name, peer in peers.items():
            expected_s = plans[name].predicted_s
            rounds[name].append(turn(peer, work.batch, expected_s, RACE_S))
    return {name: [plans[name].predicted_s, min(times)] for name, times in rounds.items()}


def recorded(peer: Peer, batch: tuple[Any, Any]) -> dict[str, float]:
    """Seconds of each part of a step: medians of steps, means over ranks."""
    comm = current().comm
    with current().attached[peer.model].engine.recording() as recorder:
        for _ in range(RECORDED):
            noted(peer, batch, recorder)
    names = "forward", "backward", "wait for gradients", "update"
    medians = [
        statistics.median(e.end_s - e.begin_s for e in recorder.events if e.what == name)
        for name in names
    ]
    ranks = comm.gather_objects(medians, "cells: parts of a step")
    means = (fmean(times) for times in zip(*ranks, strict=True))
    return dict(zip(names, means, strict=True))


def noted(peer: Peer, batch: tuple[Any, Any], recorder: Recorder) -> None:
    """One step, of which the engine notes the backward."""
    begin_s = time.perf_counter()
    loss = peer.forward(*batch)
    recorder.note("forward", "cell", begin_s)
    peer.optimizer.zero_grad()
    loss.backward()
    begin_s = time.perf_counter()
    peer.optimizer.step()
    recorder.note("update", "cell", begin_s)


def timeline(plan: Plan, its: Attached) -> dict[str, float]:
    """The same parts, as predicted."""
    step = Predictor(with_settings_of(its.profile, plan), its.cluster).as_is(plan)
    return {
        "forward": step.forward_s + step.waited_s,
        "backward": step.backward_s,
        "wait for gradients": step.end_s - step.backward_s,
        "update": step.optimizer_s,
    }


def counted(plan: Plan) -> dict[str, int]:
    """How many layers are served each way."""
    ways = [choice.way for choice in plan.choices]
    return {way: ways.count(way) for way in sorted(set(ways))}


# ------------------------------------------------------------------------------------------------
# figures


def read(path: Path) -> list[dict[str, Any]]:
    """The cells that are measured."""
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def add(path: Path, found: dict[str, Any]) -> None:
    """Write one more down."""
    rows = [row for row in read(path) if row["number"] != found["number"]]
    rows = sorted([*rows, found], key=lambda row: row["number"])
    path.write_text(json.dumps(rows, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    """A row of the table of all cells."""
    served = ", ".join(f"{count} {way}" for way, count in row["served"].items())
    expected, got = row["terms"][row["off"]]
    off = f"{row['off']}: {1e3 * expected:.0f} for {1e3 * got:.0f}"
    times = f"{1e3 * row['predicted_s']:.0f} | {1e3 * row['step_s']:.0f} | {row['error']:+.0%}"
    what = f"{row['number']} | {row['model']} | {row['rate']} | {row['hosts']} | {row['way']}"
    return f"| {what} | {served} | {times} | {off} |".replace("%", " %")


def summary(rows: Sequence[dict[str, Any]]) -> None:
    """Print the tables."""
    head = (
        "| cell | model | link | hosts | plan | served | predicted, ms | measured | off | mostly |"
    )
    print(head)
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(line(row))
    groups = {"all": lambda row: ""}
    groups |= {key: lambda row, key=key: str(row[key]) for key in ("rate", "hosts", "way", "off")}
    groups["family"] = lambda row: MODELS[row["model"]].family
    print("\n| cells | how many | median | p95 | worst | mean, with its sign | drift taken out |")
    print("|---|---|---|---|---|---|---|")
    for title, key in groups.items():
        for name in sorted({key(row) for row in rows}):
            of_it = [row for row in rows if key(row) == name]
            off = sorted(abs(row["error"]) for row in of_it)
            figures = statistics.median(off), high(off), off[-1]
            told = " | ".join(f"{figure:.1%}" for figure in figures)
            mean = f"{fmean(row['error'] for row in of_it):+.1%}"
            then = drift_taken_out([row for row in of_it if "error_now" in row])
            print(f"| {title} {name} | {len(off)} | {told} | {mean} | {then} |".replace("%", " %"))
    if drift := [abs(now / then - 1) for then, now in (r["bare_s"] for r in rows if "bare_s" in r)]:
        print(
            f"\ncompute alone differs from its profile by {statistics.median(drift):.1%} (median)"
        )
    races = [row for row in rows if row.get("race")]
    print("\n| race | planner's, ms | best | over the best |\n|---|---|---|---|")
    over = []
    for row in races:
        times = {name: step_s for name, (_, step_s) in row["race"].items()}
        best = min(times, key=lambda name: times[name])
        over.append(times[OWN] / times[best] - 1)
        others = ", ".join(f"{name} {1e3 * step_s:.0f}" for name, step_s in times.items())
        what = f"{row['number']} {row['model']} {row['rate']} {row['hosts']}"
        print(f"| {what} | {1e3 * times[OWN]:.0f} | {others} | {100 * over[-1]:.0f} % |")
    good = sum(more <= 0.05 for more in over)
    print(f"\nwithin 5 % of the best: {good} of {len(races)}")


def drift_taken_out(rows: Sequence[dict[str, Any]]) -> str:
    """Median, p95 and mean of errors without the machine's drift; of old files there are none."""
    if not rows:
        return ""
    now = sorted(abs(row["error_now"]) for row in rows)
    mean = fmean(row["error_now"] for row in rows)
    return f"{statistics.median(now):.1%}, {high(now):.1%}, {mean:+.1%}"


def high(errors: Sequence[float]) -> float:
    """What 95 of 100 errors are below, of errors in order."""
    return errors[min(len(errors) - 1, int(0.95 * len(errors)))]


def main() -> None:
    """Run the cells that the command line names, in labs of their own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="1-60", help="as 1-12 or 3,7")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--in-turns", action="store_true")
    parser.add_argument("--processors", type=float, default=PROCESSORS)
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    name = "cells-in-turns.json" if asked.in_turns else "cells.json"
    path = asked.results or HERE / "results" / name
    if asked.summary:
        summary(read(path))
        return
    until, wanted = time.time() + 60 * asked.minutes, set(numbers(asked.cells))
    done = {row["number"] for row in read(path)}
    todo = [cell for cell in cells() if cell.number in wanted - done]
    for rate, hosts in dict.fromkeys((cell.rate, cell.hosts) for cell in todo):
        if time.time() + ONE_S > until:
            break
        here = [str(cell.number) for cell in todo if (cell.rate, cell.hosts) == (rate, hosts)]
        share = round(min(0.9, asked.processors * (os.cpu_count() or 1) / hosts), 2)
        lab = Lab(hosts=hosts, rate=rate, cores=None if asked.in_turns else share)
        command = (sys.executable, __file__, "rank", str(path), ",".join(here), str(until))
        code = lab.launch(Job(command, hosts)).exit_code
        if code:
            print(f"a lab of {hosts} hosts at {rate} ended with {code}", file=sys.stderr)


def numbers(text: str) -> Iterator[int]:
    """Those of a list such as 1-12,15."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        with suppress(KeyboardInterrupt):
            rank(Path(sys.argv[2]), list(numbers(sys.argv[3])), float(sys.argv[4]))
    else:
        main()
