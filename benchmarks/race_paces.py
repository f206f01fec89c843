"""Paces of ways in a lab, and whole runs that prove them: for race.py, which has the commands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from accuracy import HERE, Task
from curves import Curve
from race_ways import EXACT, JUDGED, options_of, price_of, prices, task_of

import shoal
from shoal.core.plan import Plan
from shoal.front.recipe import load
from shoal.front.text import summary
from shoal.planner.learning import price_of as price_of_plan
from shoal.session.session import current
from shoal_tools.contenders.ddp_hooks import hook_by_name
from shoal_tools.contenders.peers import Peer, Workload, ddp, plain

PEERS = ("plain", "ddp", "ddp:fp16", "ddp:powersgd4")
WORDS = ("exact", "data parallel", "near", "fast")  # "exact" is the planner's choice
DATA_PARALLEL = "data parallel"
_NEAR = (*PEERS[:3], EXACT, DATA_PARALLEL, "near")  # ways that learn as exact steps do


def pace(asked: argparse.Namespace) -> None:
    """Measure what is missing, inside a lab: all ways take turns, in blocks of steps."""
    world, path = shoal.init(), HERE / f"results/race-pace-{asked.name}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known = current().comm.gather_objects(known, "paces that are known")[0]
    work = work_of(asked.recipe)
    peers: dict[str, tuple[Peer, int]] = {}
    for way in asked.ways:
        if known.get(way, {}).get("blocks"):
            continue
        known[way] = {"blocks": []}
        peers[way] = _ready(work, way, asked.steps, known[way])
        for _ in range(asked.warm):
            _block(*peers[way], work.batch)
    for _ in range(asked.rounds):
        for way, peer in peers.items():
            known[way]["blocks"].append(_block(*peer, work.batch))
            if world.is_main:
                path.write_text(json.dumps(known, indent=1) + "\n")
                print(f"{way}: {known[way]['blocks'][-1]:.4f} s", flush=True)
    if world.is_main:
        _show_shares(known)


def _show_shares(known: dict[str, Any]) -> None:
    """Print the part of each way's time that is compute: the pace with nothing sent, over its."""
    alone_s = median(known["plain"]["blocks"]) if "plain" in known else 0.0
    for way, found in known.items():
        if not found["blocks"]:
            continue
        step_s = median(found["blocks"])
        print(
            f"| {way} | {step_s:.3f} s | compute {alone_s / step_s:.2f} | {found.get('plan', '')} |"
        )


def work_of(recipe: str) -> Workload:
    """The training of every way: that of a recipe's file, or of a task on its first batch."""
    if not Path(recipe).exists():
        task, comm = task_of(recipe), current().comm
        x, y = (part.chunk(comm.size)[comm.rank] for part in next(task.batches(0)))
        return Workload(task.model, task.loss, lambda ps: torch.optim.AdamW(ps, task.rate), (x, y))
    found = load(Path(recipe))
    batch = found.batch(next(iter(shoal.shard(found.data()[0]))))
    return Workload(found.model, found.loss(), found.optimizer, batch)


def _ready(work: Workload, way: str, steps: int, known: dict[str, Any]) -> tuple[Peer, int]:
    """A peer that trains by a way, and the steps of its block: whole rounds of local steps."""
    torch.manual_seed(0)
    if way in PEERS:
        name, _, hook = way.partition(":")
        made = (
            plain(work) if name == "plain" else ddp(work, hook=hook_by_name(hook) if hook else None)
        )
        return made, steps
    peer = plain(work)
    given = peer.model, peer.loss, peer.optimizer
    _, peer.loss, _ = shoal.parallelize(*given, sample=work.batch, **_asked_by(way))
    plan = current().attached[peer.model].plan
    known |= {"plan": summary(plan), "price": price_of_plan(plan).times}
    if plan.outer is not None and (plan.outer.warmup_steps or plan.outer.grows):
        peer = _without_start(work, peer, plan)  # the pace behind the start
    return peer, plan.local_steps or steps


def _asked_by(way: str) -> dict[str, Any]:
    """What `parallelize` is asked for by a way or a word."""
    if way in ("near", "fast"):
        return {"accuracy": way}
    if way == EXACT:
        return {}
    return options_of(EXACT if way == DATA_PARALLEL else way, 0)


def _without_start(work: Workload, peer: Peer, plan: Plan) -> Peer:
    """A peer by the same plan, whose rounds begin at once."""
    assert plan.outer is not None
    shoal.unparallelize(peer.model)
    peer = plain(work)
    outer = replace(plan.outer, warmup_steps=0, grows=False)
    given = peer.model, peer.loss, peer.optimizer
    _, peer.loss, _ = shoal.parallelize(*given, sample=work.batch, plan=replace(plan, outer=outer))
    return peer


def _block(peer: Peer, steps: int, batch: tuple[Any, Any]) -> float:
    """Mean seconds of a step, of the slowest rank."""
    current().comm.gather_objects(None, "a turn begins")
    began = perf_counter()
    for _ in range(steps):
        peer.step(*batch)
    seconds = perf_counter() - began
    return max(current().comm.gather_objects(seconds, "a turn ends")) / steps


def table(asked: argparse.Namespace) -> None:
    """Print seconds to a loss by way, as a multiple of exact steps with nothing sent."""
    paces = json.loads((HERE / f"results/race-pace-{asked.name}.json").read_text())
    learnt = HERE / f"results/race-{asked.task}.json"
    of_ways = dict.fromkeys(_NEAR, 1.0)
    if learnt.exists():
        task = task_of(asked.task.partition("-")[0])
        curves = json.loads(learnt.read_text())["curves"]
        of_ways |= {way: price for way, (_, price, _) in prices(task, curves).items()}
    alone_s = median(paces["plain"]["blocks"])
    print("| way | s/step | times the samples | s for an exact step | ÷ nothing sent | plan |")
    print("|---|---|---|---|---|---|")
    for way, found in paces.items():
        if not found["blocks"]:
            continue
        step_s, times = median(found["blocks"]), of_ways.get(way, found.get("price"))
        if times is None:
            print(f"| {way} | {step_s:.3f} | not measured | | | |")
            continue
        product_s = step_s * times
        ends = f"{product_s:.3f} | {product_s / alone_s:.2f} | {found.get('plan', '')}"
        print(f"| {way} | {step_s:.3f} | {times:.2f} | {ends} |")


def whole(asked: argparse.Namespace) -> None:
    """Train from the start to the end in a lab, and compare with pace × price."""
    world, task = shoal.init(), task_of(asked.task)
    steps = asked.steps or task.steps
    seconds, curve = _trained(task, asked, steps)
    if world.is_main:
        _compare(task, asked, seconds, curve)


def _compare(task: Task, asked: argparse.Namespace, seconds: float, curve: Curve) -> None:
    """Print a whole run's seconds and price beside the pace and the price that are known."""
    steps = curve[-1][0]
    called = f"{asked.task}-{asked.called}" if asked.called else asked.task
    curves = json.loads((HERE / f"results/race-{called}.json").read_text())["curves"]
    paces = json.loads((HERE / f"results/race-pace-{asked.name}.json").read_text())
    pace_s = median(paces[asked.way]["blocks"])
    exact = curves[EXACT][str(asked.seed)]
    end = mean(value for _, value in curve[-JUDGED:])
    of_run, learnt = price_of(task, exact, end), prices(task, curves)[asked.way][1]
    products = seconds / steps * of_run, pace_s * learnt
    print(
        f"{asked.way}: {steps} steps took {seconds:.1f} s; pace × steps is {pace_s * steps:.1f} s"
    )
    print(f"its loss is {end:.4f}, {of_run:.2f} times the samples; learned: {learnt:.2f} times")
    print(
        f"seconds for an exact step: {products[0]:.4f} by this run, {products[1]:.4f} by the "
        f"product: {products[0] / products[1] - 1:+.1%}"
    )


def _trained(task: Task, asked: argparse.Namespace, steps: int) -> tuple[float, Curve]:
    """Seconds of a run without its judgements, and the judgements."""
    torch.manual_seed(asked.seed)
    model, comm, curve, seconds = task.model(), current().comm, [], 0.0
    batches = _own(task.batches(asked.seed), comm.rank, comm.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    how = options_of(EXACT if asked.way == DATA_PARALLEL else asked.way, steps)
    sample = next(batches)
    _, loss_fn, _ = shoal.parallelize(model, task.loss, optimizer, sample=sample, **how)
    x, y = sample
    for begin in range(0, steps, asked.every):
        comm.gather_objects(None, "a part begins")
        began = perf_counter()
        for _ in range(min(asked.every, steps - begin)):
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            x, y = next(batches)
        seconds += max(comm.gather_objects(perf_counter() - began, "a part ends"))
        with shoal.global_weights(model):
            curve.append((begin + asked.every, task.judge(model)))
    return seconds, curve


def _own(batches: Iterator[Any], rank: int, ranks: int) -> Iterator[Any]:
    return (tuple(part.chunk(ranks)[rank] for part in batch) for batch in batches)
