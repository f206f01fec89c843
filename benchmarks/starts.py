"""How long `shoal.init` takes, of this version and another: A B A B.

    .venv/bin/python benchmarks/starts.py [--ranks 2] [--times 20] [--against ../other/src]

Each turn forks ranks from a process that has PyTorch and Shoal in memory, with a store that the
parent holds, as launchers do. A turn's time is the slowest rank's `init`. The ratio is that of the
medians, with the interval that holds 95 of 100 ratios of resampled turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

# One version's turns: for each line of its input it starts the ranks once, and says the seconds.
TURNS = """
import os, sys, time
import torch
import shoal
from torch.distributed import TCPStore

ranks = int(sys.argv[1])
for _ in sys.stdin:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, (reading, writing) = store.port, os.pipe()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RUN_ID": "", "SHOAL_TOKEN": "secret"}
        began = time.perf_counter()
        shoal.init()
        os.write(writing, f"{time.perf_counter() - began}\\n".encode())
        time.sleep(0.5)
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        print(max(map(float, lines)), flush=True)
    del store
"""


def started(source: Path, ranks: int) -> subprocess.Popen[str]:
    """The turns of one version."""
    return subprocess.Popen(
        (sys.executable, "-c", TURNS, str(ranks)),
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def seconds(version: subprocess.Popen[str]) -> float:
    """Of one more turn."""
    assert version.stdin is not None and version.stdout is not None
    version.stdin.write("\n")
    version.stdin.flush()
    return float(version.stdout.readline())


def interval(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Of the ratio of the medians, by resampling."""
    draw = random.Random(0)
    ratios = sorted(
        statistics.median(draw.choices(ours, k=len(ours)))
        / statistics.median(draw.choices(theirs, k=len(theirs)))
        for _ in range(2000)
    )
    return ratios[50], ratios[-50]


def main() -> None:
    own = Path(__file__).parents[1] / "src"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--against", type=Path, default=own)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    versions = [started(source, asked.ranks) for source in (own, asked.against)]
    for version in versions:
        seconds(version)  # the first finds nothing in caches
    turns = [[seconds(version) for version in versions] for _ in range(asked.times)]
    ours, theirs = ([turn[place] for turn in turns] for place in (0, 1))
    low, high = interval(ours, theirs)
    found = {
        "ranks": asked.ranks,
        "seconds": statistics.median(ours),
        "against_s": statistics.median(theirs),
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "interval": [low, high],
    }
    print(json.dumps(found))
    if asked.json:
        asked.json.write_text(json.dumps({**found, "turns": turns}, indent=1) + "\n")


if __name__ == "__main__":
    main()
