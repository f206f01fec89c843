"""`shoal bench`: Shoal and its peers on one recipe, in turn, in one run.

Machines drift, so contenders alternate (A B, B A, …) and are compared round by round. A round's
figure is the median step of the slowest rank. A ratio is the median over rounds of peer ÷ Shoal,
and its interval comes from a bootstrap over rounds.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch

from shoal.core.errors import UsageError
from shoal.core.explanation import Explanation
from shoal.core.numbers import MOST_COUNTED
from shoal.core.outcome import Outcome
from shoal.core.record import Track
from shoal.core.trace import MAIN, STEPS, Recorder
from shoal.front import text
from shoal.front.codec_report import codec_report
from shoal.front.options import Options
from shoal.front.outcomes import outcome_of_ranks
from shoal.front.parallel import by_options
from shoal.front.recipe import Recipe
from shoal.front.session_start import init
from shoal.front.shard import shard
from shoal.planner.explain import explain
from shoal.planner.timeline import Predictor
from shoal.profiling.interfaces import watching
from shoal.profiling.processor import ProcessorTime
from shoal.session.memory import Memory, memory, of_one_process
from shoal.session.session import Attached, current
from shoal_tools.commands.job_interfaces import sent_to_other_hosts
from shoal_tools.commands.options import (
    COUNT,
    NEW_FILE,
    PLAN,
    RANKS,
    REPORT,
    in_a_folder,
    model_command,
)
from shoal_tools.commands.run_record import (
    contenders_of,
    gathered,
    machine,
    predicted,
    report_benchmark,
)
from shoal_tools.commands.worker import at_own_device
from shoal_tools.contenders.peers import (
    EXACT,
    Peer,
    Workload,
    peer_by_name,
    ready,
    slowest_rank,
    step_times,
)
from shoal_tools.report.layers import strategies_of
from shoal_tools.report.peer_words import in_words
from shoal_tools.report.trace import chrome

_BOOTSTRAPS = 10_000
_SEED = 0
_EXPECTED = "predicted, one step"


def _peers(context: click.Context, option: click.Parameter, against: str) -> list[str]:
    """Read the peers' names, and check each before any rank starts."""
    names = against.split(",")
    for name in names:
        if name != EXACT:
            peer_by_name(name)
        if names.count(name) > 1:
            raise UsageError(
                f"{name} is named twice", got=f"--against {against}", do="name it once"
            )
    return names


@click.command()
@model_command(compares=True)
@RANKS
@click.option(
    "--against",
    default="ddp",
    show_default=True,
    metavar="PEERS",
    callback=_peers,
    help="With commas: ddp; DDP with a hook of fewer bytes (ddp:fp16, ddp:bf16, ddp:powersgd4, any "
    "rank); fsdp2; plain, which sends nothing; exact, Shoal without codecs.",
)
@PLAN
@click.option(
    "--rounds",
    default=5,
    show_default=True,
    type=click.IntRange(2, MOST_COUNTED),
    help="Turns that each contender takes.",
)
@click.option("--steps", default=5, show_default=True, type=COUNT, help="Steps in a turn.")
@click.option(
    "--json", "json_path", type=NEW_FILE, callback=in_a_folder, help="Write all figures there."
)
@click.option(
    "--trace",
    "trace_path",
    type=NEW_FILE,
    callback=in_a_folder,
    help="Write a Chrome trace of steps there.",
)
@REPORT
def bench(recipe: Recipe, options: Options, **wanted: Any) -> None:
    """Time RECIPE's step under Shoal and its peers, in turn, in one run."""
    run(recipe, options, BenchRun(**wanted))


@dataclass(frozen=True)
class BenchRun:
    """A benchmark as the command line asks for it. Rank 0 writes the files.

    Args:
        against: names of peers: plain, ddp, ddp:fp16, ddp:bf16, ddp:powersgd4 (or another rank),
            fsdp2, and exact, which is Shoal by itself if the options allow codecs.
        rounds: turns that each contender takes.
        steps: timed steps in a turn, after one that is not timed.
        json_path: file for all figures.
        trace_path: file for a Chrome trace of some more of Shoal's steps, and of the predicted one.
        report: file for a page, with some more of Shoal's steps.
    """

    against: Sequence[str]
    rounds: int = 5
    steps: int = 5
    json_path: Path | None = None
    trace_path: Path | None = None
    report: Path | None = None


def run(recipe: Recipe, options: Options, wanted: BenchRun) -> dict[str, Any]:
    """Time the recipe's step under Shoal and the named peers; print medians, ratios and memory.

    Args:
        recipe: the model and its data, each rank on its own rows.
        options: the options of Shoal's plan.
        wanted: the peers, the number of steps, and the files to write.

    Returns:
        The record that is written as JSON: medians, ratios with 95 % intervals, every round's
        figure, plan and machine.

    Raises:
        UsageError: a peer is unknown, or there is no other rank.
    """
    _require_ranks()
    recipe = at_own_device(recipe)
    batch = recipe.batch(next(iter(shard(recipe.data()[0]))))
    _tell("measuring and planning")
    computes = recipe.compute_loss
    batch = batch if computes is None else (batch, None)
    work = Workload(recipe.model, recipe.loss(), recipe.optimizer, batch, computes)
    shoal = _shoal(work, options, recipe.count)
    attached = current().attached[shoal.model]
    contenders = {"shoal": shoal}
    for name in wanted.against:
        _tell(f"making {name} ready")
        if name == EXACT:
            contenders[name] = _shoal(work, options.without_codecs(), recipe.count, "shoal, exact")
        else:
            contenders[name] = ready(name, _seed(work))
    turns = _turns(contenders, batch, wanted.rounds, wanted.steps)
    outcome = outcome_of_ranks(shoal.model)
    report = _report(shoal, attached, contenders, turns, outcome)
    if current().comm.rank == 0:
        _print(
            recipe,
            report,
            explain(attached.plan, attached.profile, attached.cluster, alternatives=False),
        )
        if report["codecs"]:
            text.console().print(codec_report(shoal.model).summary)
        if wanted.json_path:
            wanted.json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if wanted.trace_path or wanted.report:
        tracks = _recorded_steps(shoal, attached, batch, wanted.steps)
        if current().comm.rank == 0 and wanted.trace_path:
            _write_trace(wanted.trace_path, attached, tracks)
        if current().comm.rank == 0 and wanted.report:
            report_benchmark(wanted.report, recipe.path, report, shoal.model, tracks, outcome)
    return report


def _require_ranks() -> None:
    """Join the other ranks, and raise UsageError if there is nothing to compare."""
    if init().size == 1:
        raise UsageError(
            "a benchmark needs several ranks", do="add --ranks 2, or run it under `shoal lab`"
        )
    if current().others:
        do = "leave out --servers and --tail: shoal lab --hosts 4 -- shoal bench …"
        raise UsageError("peers know no servers, and no tail hosts", do=do)


def _report(
    shoal: Peer,
    attached: Attached,
    contenders: Mapping[str, Peer],
    turns: Mapping[str, Sequence[_TurnResult]],
    outcome: Outcome | None,
) -> dict[str, Any]:
    """Make the record that is written as JSON."""
    figures = {name: [turn.step_s for turn in taken] for name, taken in turns.items()}
    return {
        "command": ["shoal", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine()),
        "ranks": current().comm.size,
        "link_mbit_per_s": attached.cluster.link.bytes_per_s * 8e-6,
        "contenders": {name: peer.name for name, peer in contenders.items()},
        "median_s": {name: statistics.median(times) for name, times in figures.items()},
        "rounds_s": figures,
        "ratio_to_shoal": {
            name: _ratio(figures[name], figures["shoal"]) for name in contenders if name != "shoal"
        },
        "processors_busy": {
            name: statistics.median(turn.busy for turn in taken) for name, taken in turns.items()
        },
        "sent_bytes": _most_sent(turns),
        "predicted_s": attached.plan.predicted_s,
        "outcome": outcome and outcome.to_json(),
        "floor_s": Predictor(attached.profile, attached.cluster).floor_s(attached.plan),
        "memory_bytes": _memory(shoal.model),
        "memory_of_one_process_bytes": _told(of_one_process(attached.profile)),
        "plan": json.loads(attached.plan.to_json()),
        "exact_plan": _plan_of(contenders[EXACT]) if EXACT in contenders else None,
        "codecs": [asdict(row) for row in codec_report(shoal.model).rows],
    }


def _plan_of(peer: Peer) -> Any:
    return json.loads(current().attached[peer.model].plan.to_json())


@dataclass(frozen=True)
class _TurnResult:
    """Figures of one turn, which is some steps of a contender."""

    step_s: float  # the slowest rank's median step
    busy: float  # busy part of this machine's processors, 1 at most
    sent_bytes: float  # bytes a step through this host's interfaces, with headers


def _turns(
    contenders: Mapping[str, Peer], batch: tuple[Any, Any], rounds: int, steps: int
) -> dict[str, list[_TurnResult]]:
    """Time each contender in each round; every other round goes backwards."""
    turns: dict[str, list[_TurnResult]] = {name: [] for name in contenders}
    for number in range(1, rounds + 1):
        order = list(contenders.items())
        for name, peer in order if number % 2 else reversed(order):
            turns[name].append(_turn(peer, batch, steps))
        told = (f"{name} {taken[-1].step_s * 1e3:.1f} ms" for name, taken in turns.items())
        _tell(f"round {number} of {rounds}: {', '.join(told)}")
    return turns


def _turn(peer: Peer, batch: tuple[Any, Any], steps: int) -> _TurnResult:
    comm = current().comm
    start, begin_s, sent = ProcessorTime.now(), time.perf_counter(), sent_to_other_hosts(comm)
    step_s = slowest_rank(list(step_times(peer, batch, steps, num_warm_up=1)))
    cores_s = (os.cpu_count() or 1) * (time.perf_counter() - begin_s)
    busy = min(1.0, (ProcessorTime.now().busy_s - start.busy_s) / cores_s)
    return _TurnResult(step_s, busy, (sent_to_other_hosts(comm) - sent) / (steps + 1))


def _most_sent(turns: Mapping[str, Sequence[_TurnResult]]) -> dict[str, float]:
    """Return, for each contender, the bytes a step of the host that sends most."""
    own = {
        name: statistics.median(turn.sent_bytes for turn in taken) for name, taken in turns.items()
    }
    hosts = current().comm.gather_objects(own, "bench: bytes")
    return {name: max(host[name] for host in hosts) for name in own}


def _tell(progress: str) -> None:
    """Print progress to stderr, because a round over slow links takes minutes."""
    if current().comm.rank == 0:
        print(f"bench: {progress}", file=sys.stderr, flush=True)


def _memory(model: torch.nn.Module) -> dict[str, int]:
    """Gather the memory of Shoal's model by kind, each of the rank that holds most of it."""
    ranks = current().comm.gather_objects(
        _told(replace(memory(model), process_peak=None)), "bench: memory"
    )
    return {kind: max(held[kind] for held in ranks) for kind in ranks[0]}


def _told(held: Memory) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in asdict(held).items() if nbytes is not None}


def _recorded_steps(
    shoal: Peer, attached: Attached, batch: tuple[Any, Any], steps: int
) -> tuple[Track, ...]:
    """Record ranks and interfaces in some more steps (a collective)."""
    comm = current().comm
    comm.gather_objects(None, "bench: start together")  # all ranks begin at once
    with attached.engine.recording() as recorder, watching(recorder):
        for _ in range(steps):
            _run_recording(shoal, batch, recorder)
    return gathered(comm, recorder)


def _write_trace(path: Path, attached: Attached, measured: Sequence[Track]) -> None:
    """Write the tracks of the ranks, and the predicted track of one step with them."""
    begins = (event.begin_s for event in measured[0].events if event.what == "backward")
    begin_s = next(begins, 0.0)
    events = {f"rank {rank}": track.events for rank, track in enumerate(measured)}
    rates = {
        f"rank {rank}": tuple(rate for rate in track.rates if track.is_of_job(rate.link))
        for rank, track in enumerate(measured)
    }
    for track in predicted(attached):
        events[_EXPECTED] = tuple(
            replace(event, begin_s=begin_s + event.begin_s, end_s=begin_s + event.end_s)
            for event in track.events
        )
        rates[_EXPECTED] = tuple(replace(rate, at_s=begin_s + rate.at_s) for rate in track.rates)
    path.write_text(chrome(events, rates), encoding="utf-8")


def _run_recording(shoal: Peer, batch: tuple[Any, Any], recorder: Recorder) -> None:
    """Run one step. The engine itself records the backward."""
    begin_s = time.perf_counter()
    loss = shoal.forward(*batch)
    recorder.note("forward", MAIN, begin_s)
    shoal.optimizer.zero_grad()
    loss.backward()
    update_s = time.perf_counter()
    shoal.optimizer.step()
    recorder.note("optimizer", MAIN, update_s)
    recorder.note("step", STEPS, begin_s)


def _shoal(
    work: Workload,
    options: Options,
    count: Callable[[Any], Any] | None,
    name: str = "shoal",
) -> Peer:
    peer = Peer(name, _seed(work).model(), work)
    sample = work.batch if work.compute_loss is None else work.batch[0]
    asked = replace(options, compute_loss=work.compute_loss, count=count)
    peer.model, loss, peer.optimizer = by_options(
        lambda: asked, peer.model, peer.loss, peer.optimizer, sample
    )
    peer.loss, peer.compute_loss = (loss, None) if work.compute_loss is None else (None, loss)
    return peer


def _seed(work: Workload) -> Workload:
    """Seed a workload, so that it builds its model from the same random numbers as the others."""
    torch.manual_seed(_SEED)
    return work


def _ratio(peer: Sequence[float], shoal: Sequence[float]) -> dict[str, float]:
    """Return the median over rounds of peer ÷ shoal, with a bootstrap's 95 % interval."""
    pairs = [a / b for a, b in zip(peer, shoal, strict=True)]
    draw = random.Random(_SEED)
    medians = sorted(
        statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(_BOOTSTRAPS)
    )
    low, high = medians[int(0.025 * _BOOTSTRAPS)], medians[int(0.975 * _BOOTSTRAPS)]
    return {"median": statistics.median(pairs), "low": low, "high": high}


def _print(recipe: Recipe, report: dict[str, Any], explanation: Explanation) -> None:
    console = text.console()
    console.print(text.explained(explanation))
    rows = [("shoal", report["median_s"]["shoal"], "1")]
    for name, ratio in report["ratio_to_shoal"].items():
        interval = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        rows.append((report["contenders"][name], report["median_s"][name], interval))
    console.print(text.ratios(f"{recipe.path.name}, {report['ranks']} ranks", rows))
    predicted, measured = report["predicted_s"], report["median_s"]["shoal"]
    console.print(
        f"predicted step {predicted * 1e3:.1f} ms, {predicted / measured:.2f} of Shoal's median"
    )
    _print_most_off(report["outcome"])
    for line in in_words(contenders_of(report), strategies_of(explanation)):
        console.print(line, soft_wrap=True)  # users copy a pin from it
    held = Memory(**report["memory_bytes"], process_peak=None)
    console.print(f"Shoal's memory, each kind on the rank with the most: {held}")
    alone = Memory(**report["memory_of_one_process_bytes"], process_peak=None)
    console.print(f"one process would hold: {alone}")
    floor = report["floor_s"]
    faster = "; compute was slower while the model was profiled" if measured < floor else ""
    console.print(
        f"floor of this plan {floor * 1e3:.1f} ms (compute, or bytes ÷ link): measured "
        f"{measured / floor:.2f} of it{faster}"
    )
    if any(report["sent_bytes"].values()):
        sent = ", ".join(
            f"{text.megabytes(nbytes)} under {name}"
            for name, nbytes in report["sent_bytes"].items()
        )
        console.print(f"the host that sends most sent a step: {sent}")
    if any(report["processors_busy"].values()):
        shares = ", ".join(
            f"{share:.0%} under {name}" for name, share in report["processors_busy"].items()
        )
        console.print(f"processors of rank 0's machine were busy {shares}")


def _print_most_off(outcome: dict[str, Any] | None) -> None:
    """Print the part of the step with the largest error of prediction, if any was measured."""
    if not outcome or not outcome["off"]:
        return
    off = next(term for term in outcome["terms"] if term["name"] == outcome["off"])
    text.console().print(
        f"off most: {off['name']}, {off['predicted_s'] * 1e3:.1f} ms predicted, "
        f"{off['measured_s'] * 1e3:.1f} ms measured (mean, {outcome['steps']} steps)"
    )
