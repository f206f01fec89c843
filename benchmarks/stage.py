"""AlexNet's fully connected layers on a host of their own: how much of its way there and back an
activation shows.

    sudo .venv/bin/python benchmarks/stage.py [RATE]      about ten minutes; results/stage.json

Three workers and one tail host, at 100 Mbit/s if nothing else is said, with one micro-batch a step
and with four, in turn. Every rank notes what it does, by one clock. What is shown of the
activations' transfer in a step: the time from the last that a worker sends until the tail begins
with it, and, for each gradient, the time from when the tail has sent it, or the worker has come to
need it, whichever is later, until it is there. The convolutions' gradients are exchanged beside
that as ever; with `alone` they are not, so that nothing else is on the link.
"""

from __future__ import annotations

import json
import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.core.trace import Recorder
from shoal.session.session import current
from shoal.tensors.cut import cut_of

WORKERS, STEPS, TURNS = 3, 8, 2
MICRO_BATCHES = (1, 4)
BODIES = {"alone": "replicate:nothing", "with the convolutions' gradients": "sliced:direct"}
EXAMPLE = Path(__file__).parents[1] / "examples" / "alexnet.py"
RESULTS = Path(__file__).parent / "results" / "stage.json"
Events = list[tuple[str, float, float]]  # what, from when, to when


def rank(body: str, micro_batches: str, folder: str) -> None:
    """On a rank: train, and leave the events of all steps but the first."""
    shoal.init()
    recipe = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    loader = shoal.shard(recipe["data"]())
    model, loss_fn = recipe["model"](), recipe["loss"]()
    optimizer = recipe["optimizer"](model.parameters())
    batches = [batch for batch, _ in zip(loader, range(STEPS + 2), strict=False)]
    pins = {"features.*": body, "classifier.*": "stage"}
    model, loss_fn, optimizer = shoal.parallelize(
        model, loss_fn, optimizer, sample=batches[0], pins=pins, micro_batches=int(micro_batches)
    )
    stage = cut_of(next(model.classifier.parameters())).stage  # type: ignore[attr-defined]
    engine = current().attached[model].engine
    steps = []
    for x, y in batches:
        tail = stage.call("record")
        if steps:
            steps[-1]["tail"] = absolute(tail)
        with engine.recording() as recorder:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        steps.append({"worker": absolute(recorder)})
    Path(folder, f"{shoal.world().rank}.json").write_text(json.dumps(steps[1:-1]))


def absolute(recorder: Recorder) -> Events:
    """Events by the machine's clock."""
    return [
        (e.what, recorder.start_s + e.begin_s, recorder.start_s + e.end_s) for e in recorder.events
    ]


def shown(workers: list[Events], tail: Events, micro_batches: int) -> tuple[float, float]:
    """Seconds of a step that the activations' transfer shows, forward and back (the mean over
    workers).
    """
    sent = max(
        end for events in workers for what, _, end in events if what.startswith("forward of micro")
    )
    begun = next(
        begin for what, begin, _ in tail if what.startswith(f"micro-batch {micro_batches - 1} ")
    )
    given = {what: begin for what, begin, _ in tail if what.startswith("gradient of")}
    back = 0.0
    for number, events in enumerate(workers):
        for index in range(micro_batches):
            what = f"wait for the gradient of micro-batch {index}"
            needed, there = next((begin, end) for name, begin, end in events if name == what)
            back += there - max(needed, given[f"gradient of micro-batch {index} to rank {number}"])
    return begun - sent, back / len(workers)


def measured(rate: str, body: str, micro_batches: int) -> dict[str, Any]:
    """One run in a lab: what its steps show, and the events of one."""
    with tempfile.TemporaryDirectory() as folder:
        lab = [
            "lab",
            "--hosts",
            str(WORKERS),
            "--tail",
            "1",
            "--rate",
            rate,
            "--",
            sys.executable,
            __file__,
        ]
        command = [sys.executable, "-m", "shoal", *lab, "--rank", body, str(micro_batches), folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        ranks = [
            json.loads(Path(folder, f"{number}.json").read_text()) for number in range(WORKERS)
        ]
    steps = [
        ([each["worker"] for each in same], same[0]["tail"]) for same in zip(*ranks, strict=True)
    ]
    return {
        "shown_s": [shown(*step, micro_batches) for step in steps],
        "step": steps[len(steps) // 2],
    }


def timeline(workers: list[Events], tail: Events) -> str:
    """A step of the first worker and of the tail, in milliseconds."""
    chosen = [
        ("worker 0", *event)
        for event in workers[0]
        if "micro-batch" in event[0] or "loss" in event[0]
    ]
    chosen += [("tail", *event) for event in tail if not event[0].startswith("CALL")]
    start = min(begin for _, _, begin, _ in chosen)
    rows = [
        f"  {(begin - start) * 1e3:7.1f} to {(end - start) * 1e3:7.1f}  {who:8}  {what}"
        for who, what, begin, end in sorted(chosen, key=lambda row: row[2])
    ]
    return "\n".join(rows)


def main() -> None:
    """Run all of it in turn, and write the figures."""
    rate = (sys.argv[1:] or ["100mbit"])[0]
    figures: dict[str, Any] = {}
    for name, body in BODIES.items():
        runs = [
            (count, measured(rate, body, count)) for _ in range(TURNS) for count in MICRO_BATCHES
        ]
        its: dict[int, float] = {}
        for count in MICRO_BATCHES:
            same = [each for number, each in runs if number == count]
            both = [
                statistics.median(way)
                for way in zip(*(s for each in same for s in each["shown_s"]), strict=True)
            ]
            its[count] = sum(both)
            print(
                f"{name}, {count} in flight: shown {both[0] * 1e3:.1f} ms forward, "
                f"{both[1] * 1e3:.1f} ms back",
                flush=True,
            )
            print(timeline(*same[-1]["step"]))
            figures[f"{name}, {count} in flight"] = {"forward_s": both[0], "back_s": both[1]}
        figures[f"{name}, hidden"] = 1 - its[MICRO_BATCHES[-1]] / its[MICRO_BATCHES[0]]
        print(
            f"{name}: {figures[f'{name}, hidden']:.0%} hidden of what one in flight shows",
            flush=True,
        )
    RESULTS.write_text(json.dumps({"rate": rate, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(*sys.argv[2:])
    else:
        main()
