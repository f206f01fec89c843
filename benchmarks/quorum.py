"""What a slow host, and a stopped one, cost rounds of local steps, with a quorum and without.

    .venv/bin/python benchmarks/quorum.py [--cases none slow stop10 stop40] [--rounds 30]

Four processes of this machine train a small network on digits, 8 local steps a round. A step is
filled up with sleep to 0.2 s, so that the load of the machine counts little. Rank 3 is struck:

    none      nothing happens
    slow      its steps take 0.6 s
    stop10    it is stopped (SIGSTOP) for 10 s in round 6
    stop40    the same for 40 s

Each case runs twice: all ranks are waited for, or three of four with a grace time of 5 s
(`shoal.Outer(quorum=0.75)`). A line says what rounds cost rank 0, in how many of them rank 3's
steps were, and the loss on held-out digits. Results go to results/quorum.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.contracts.launcher import Job
from shoal_tools.launch.local import Local

HERE = Path(__file__).resolve().parent
RANKS, STRUCK, LOCAL_STEPS, ROWS = 4, 3, 8, 16
STEP_S, SLOW_S, STOP_ROUND = 0.2, 0.6, 6
CASES = {"none": 0.0, "slow": 0.0, "stop10": 10.0, "stop40": 40.0}
RULES = {
    "all": shoal.Outer(lag=0),
    "quorum": shoal.Outer(quorum=0.75, grace_s=5.0),
}


def digits() -> tuple[Tensor, Tensor]:
    """All images, one a row, in an order of their own, and the digits that they show."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16
    return images[order], torch.tensor(found.target)[order]


def stop_for(seconds: float) -> None:
    """Stop this process. A child lets it go on."""
    subprocess.Popen(("sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"))
    os.kill(os.getpid(), signal.SIGSTOP)


def train(case: str, rule: str, rounds: int, out: Path) -> None:
    """One rank; all train until so many rounds have closed."""
    world = shoal.init(lost_after_s=120, start_timeout_s=300)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, numbers = digits()
    test, own = slice(0, 360), slice(360 + world.rank, None, world.size)
    x, y = images[own], numbers[own]
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sample = x[:ROWS], y[:ROWS]
    shoal.parallelize(
        model,
        F.cross_entropy,
        optimizer,
        sample=sample,
        local_steps=LOCAL_STEPS,
        outer=RULES[rule],
    )
    draws = torch.Generator().manual_seed(world.rank)
    is_struck = world.rank == STRUCK
    ends_s, steps, to_strike = [time.monotonic()], 0, is_struck
    step_s = SLOW_S if is_struck and case == "slow" else STEP_S
    while (number := shoal.round_number(model)) < rounds:
        if to_strike and number == STOP_ROUND and CASES[case]:
            to_strike = False
            stop_for(CASES[case])
        began_s = time.monotonic()
        rows = torch.randint(len(x), (ROWS,), generator=draws)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        time.sleep(max(0.0, step_s - (time.monotonic() - began_s)))
        optimizer.step()
        steps += 1
        ends_s += [time.monotonic()] * (shoal.round_number(model) - number)
    ended_s = time.monotonic()
    everywhere = shoal.gather(torch.tensor([steps])).tolist()
    shoal.unparallelize(model)
    if world.is_main:
        took_s = [after - before for before, after in pairwise(ends_s)]
        with torch.no_grad():
            output = model(images[test])
        loss = F.cross_entropy(output, numbers[test]).item()
        right = (output.argmax(1) == numbers[test]).float().mean().item()
        record = {"took_s": took_s, "seconds": ended_s - ends_s[0], "steps": everywhere}
        out.write_text(json.dumps(record | {"loss": loss, "right": right}))


def told(case: str, rule: str, record: dict) -> str:
    """One line of the table."""
    took_s, steps = record["took_s"], record["steps"]
    return (
        f"| {case} | {rule} | {statistics.median(took_s):.2f} | {max(took_s):.2f} | "
        f"{record['seconds']:.1f} | {', '.join(map(str, steps))} | {record['loss']:.4f} | "
        f"{100 * record['right']:.1f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--rules", nargs="*", choices=tuple(RULES), default=list(RULES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=HERE / "results/quorum.json")
    parser.add_argument("--rank", action="store_true", help="be a rank of the one case")
    asked = parser.parse_args(arguments)
    if asked.rank:
        train(asked.cases[0], asked.rules[0], asked.rounds, asked.out)
        return
    records = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    for case in asked.cases:
        for rule in asked.rules:
            part = asked.out.with_suffix(f".{case}-{rule}")
            me = (sys.executable, str(Path(__file__).resolve()), "--rank", "--out", str(part))
            how = ("--cases", case, "--rules", rule, "--rounds", str(asked.rounds))
            result = Local().launch(Job((*me, *how), RANKS))
            if result.exit_code:
                sys.exit(result.exit_code)
            records[f"{case} {rule}"] = json.loads(part.read_text())
            part.unlink()
            print(told(case, rule, records[f"{case} {rule}"]), flush=True)
            asked.out.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
