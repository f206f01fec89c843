"""Where one way to serve a layer becomes dearer than all-reduce: in rows a rank, as measured and as
the bytes say.

    sudo .venv/bin/python benchmarks/crossings.py [RATE ...]      at 100 Mbit/s seven minutes;
                                                                  results/crossings.json

Four hosts train one layer of 1024 inputs and outputs (of the pair, two of them), by that way and by
`direct`, in turn, with numbers of rows around the one at which both send the same; between the two
nearest the crossing of the measured steps is found by a line. A narrow layer before it, always by
`direct`, makes it give a gradient back.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.contracts.launcher import Job
from shoal.core.plan import Choice, Plan
from shoal.profiling.identity import model_digest
from shoal.session.attach import attach
from shoal.session.job import TrainingJob
from shoal.session.opening import Prepared
from shoal.session.session import current
from shoal_tools.contenders.peers import Peer, Workload, slowest_rank, step_times
from shoal_tools.launch.lab import Lab

RESULTS = Path(__file__).parent / "results" / "crossings.json"
RANKS, WIDTH, HIDDEN = 4, 1024, 1024
RATES = ("100mbit", "1gbit")
AROUND, TURNS, STEPS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0), 3, 2
ROWS = {  # at which a way sends what all-reduce does: how-it-chooses.md, with M = N = WIDTH
    "factor": 2 * WIDTH * WIDTH / (RANKS * 2 * WIDTH),
    "column": WIDTH * WIDTH / (RANKS * WIDTH + WIDTH),
    "row": WIDTH * WIDTH / (WIDTH + RANKS * WIDTH),
    "column_pair": HIDDEN / RANKS,
}


def net(way: str) -> nn.Module:
    """The layer, or the pair, behind a narrow one."""
    torch.manual_seed(0)
    served = [nn.Linear(WIDTH, WIDTH)]
    if way == "column_pair":
        served = [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)]
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), *served)


def peer(way: str, plain: bool, rows: int) -> tuple[Peer, tuple[torch.Tensor, torch.Tensor]]:
    """What trains the net so, or by `direct`, and its batch."""
    own = torch.Generator().manual_seed(current().comm.rank)
    batch = torch.rand(rows, 8, generator=own), torch.rand(rows, WIDTH, generator=own)
    work = Workload(
        lambda: net(way), F.mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=1e-3), batch
    )
    made = Peer(way, net(way), work)
    ways = {"0": "", "2": way} | ({"4": "row_pair"} if way == "column_pair" else {})
    direct = {name: Choice(name, "replicate", "direct") for name in ways}
    chosen = {name: Choice(name, its) for name, its in ways.items() if its and not plain}
    choices = tuple((direct | chosen)[name] for name in reversed(list(ways)))
    plan = Plan(RANKS, model_digest(made.model), choices, bucket_bytes=4 << 20, lanes=3)
    session = current()
    job = TrainingJob(made.model, made.loss, [made.optimizer])
    made.loss, session.attached[made.model] = attach(session, job, Prepared(plan))
    return made, batch


def measure(rate: str) -> None:
    """What each rank runs; rank 0 writes the figures."""
    session, found = shoal.init(), {}
    for way, rows in ROWS.items():
        ratios = {}
        for part in AROUND:
            (its, batch), (direct, _) = (
                peer(way, plain, round(part * rows)) for plain in (False, True)
            )
            turns = [
                [
                    slowest_rank(list(step_times(each, batch, STEPS, num_warm_up=1)))
                    for each in (its, direct)
                ]
                for _ in range(TURNS)
            ]
            ratios[round(part * rows)] = statistics.median(mine / theirs for mine, theirs in turns)
            its.close()
            direct.close()
        found[way] = {"rows": rows, "measured": crossing(ratios), "ratios": ratios}
        if session.rank == 0:
            print(rate, way, found[way], flush=True)
            every = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            RESULTS.write_text(json.dumps(every | {rate: found}, indent=1) + "\n")


def crossing(ratios: dict[int, float]) -> float | None:
    """The rows at which the ratio becomes 1, or None where it does not."""
    for (fewer, below), (more, above) in pairwise(sorted(ratios.items())):
        if below <= 1 < above:
            return fewer + (more - fewer) * (1 - below) / (above - below)
    return None


def main(run: Callable[[str], None]) -> None:
    """Each rate that the command line names, or all; and the table."""
    for rate in [rate for rate in RATES if rate in sys.argv] or RATES:
        run(rate)
    print("| way | formula | " + " | ".join(RATES) + " |\n|---" * (1 + len(RATES)) + "|---|")
    every = json.loads(RESULTS.read_text())
    for way, rows in ROWS.items():
        cells = [
            every[rate][way]["measured"] if way in every.get(rate, {}) else None for rate in RATES
        ]
        print(
            f"| {way} | {rows:.0f} | "
            + " | ".join("none" if c is None else f"{c:.0f}" for c in cells)
            + " |"
        )


def in_lab(rate: str) -> None:
    """Run the ranks on hosts of a lab."""
    code = (
        Lab(hosts=RANKS, rate=rate)
        .launch(Job((sys.executable, __file__, "rank", rate), RANKS))
        .exit_code
    )
    if code:
        sys.exit(code)


if __name__ == "__main__":
    if "rank" in sys.argv:
        measure(sys.argv[2])
    else:
        main(in_lab)
