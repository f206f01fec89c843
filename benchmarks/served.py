"""Two checkouts of Shoal, their servers in turn: is a table's pull or a server's step slower?

    .venv/bin/python benchmarks/served.py --before DIR --after DIR      some minutes

Each checkout has a process of its own with two workers and a server, which are threads of it, so
no network hides the work on messages. Both processes stand ready and take turns (A B B A …). A
turn is some pulls of 256 rows, or some steps of eight small linear layers that the server owns. Its
figures are the median seconds by the clock, and the mean processor seconds of the whole process,
which other programs on the machine change less. The ratio is the median over turns of after ÷
before; its 95 % interval is a bootstrap over turns. A ratio above 1 says that the second checkout
is slower.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

PULLS, STEPS = 200, 40  # in a turn
BOOTSTRAPS = 10_000


def be_one() -> None:
    """Be one version: read the name of a turn from stdin, take it, and print its figures."""
    import torch  # noqa: PLC0415  (the checkout that PYTHONPATH names is imported here)
    from torch import Tensor, nn  # noqa: PLC0415

    import shoal  # noqa: PLC0415
    from shoal.comm.threads import ThreadComm, run  # noqa: PLC0415
    from shoal.core.facts import Cluster, Link, Topology  # noqa: PLC0415
    from shoal.servers.servers import serve  # noqa: PLC0415
    from shoal.tensors.cut import cut_of  # noqa: PLC0415

    names = "shoal.front.session_start", "shoal.front.joining"  # the second one in older checkouts
    found = next(name for name in names if importlib.util.find_spec(name) is not None)
    using = importlib.import_module(found).using
    torch.set_num_threads(1)
    cluster = Cluster(Topology(("a", "b")), Link(1e-4, 1e9), servers=("c",))
    turns: list[Queue[str]] = [Queue(), Queue()]
    done: Queue[list[float]] = Queue()

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10_000, 32)
            self.head = nn.Linear(32, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids).mean(1))

    def times_of(work: Any, times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            begin_s = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin_s)
        return seconds

    def worker(comm: ThreadComm) -> None:
        torch.manual_seed(0)
        words, linears = Words(), nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
        ids, x = torch.randint(10_000, (8, 4)), torch.randn(8, 32) + comm.rank
        y = torch.randint(4, (8,))
        learn = torch.optim.SGD(linears.parameters(), lr=0.01, momentum=0.9)
        loss_fn = nn.functional.cross_entropy
        with using(comm, cluster):
            shoal.parallelize(
                words,
                loss_fn,
                torch.optim.SGD(words.parameters(), lr=0.01),
                sample=(ids, y),
                pins={"table": "server_rows", "head": "replicate:allreduce"},
            )
            shoal.parallelize(linears, loss_fn, learn, sample=(x, y), pins={"*": "server"})
            table: Any = cut_of(words.table.weight)
            wanted = torch.arange(0, 10_000, 39)[:256]

            def step() -> None:
                learn.zero_grad()
                loss_fn(linears(x), y).backward()
                learn.step()

            while (turn := turns[comm.rank].get()) != "end":
                pulls = turn == "pull"
                work = partial(table.pull, wanted) if pulls else step
                mine = times_of(work, PULLS if pulls else STEPS)
                linears.state_dict()  # nothing is on its way
                done.put(mine)

    def take_turns() -> None:
        for line in sys.stdin:
            begin_s = time.process_time()
            for queue in turns:
                queue.put(line.strip())
            if line.strip() == "end":
                return
            seconds = [statistics.median(done.get()) for _ in turns]
            each = PULLS if line.strip() == "pull" else STEPS
            cpu_s = (time.process_time() - begin_s) / each
            print(json.dumps([max(seconds), cpu_s]), flush=True)

    from threading import Thread  # noqa: PLC0415

    Thread(target=take_turns, daemon=True).start()
    run(
        3,
        lambda comm: serve(comm) if comm.rank == 2 else worker(comm),
        timeout_s=600,
        hosts=("a", "b", "c"),
        servers=1,
    )


def interval(ratios: list[float]) -> dict[str, float]:
    """The median, and its 95 % interval."""
    drawn = random.Random(0)
    medians = sorted(
        statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAPS)
    )
    low, high = medians[BOOTSTRAPS // 40], medians[-BOOTSTRAPS // 40]
    return {"median": statistics.median(ratios), "low": low, "high": high}


def main() -> None:
    """Run both versions in turn, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        be_one()
        return
    ones: list[subprocess.Popen[str]] = []
    atexit.register(lambda: [one.kill() for one in ones])  # if one of them fails
    ones += [
        subprocess.Popen(
            [sys.executable, __file__, "--one"],
            env={**os.environ, "PYTHONPATH": str(folder.resolve() / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder in (options.before, options.after)
    ]

    def turn(one: subprocess.Popen[str], name: str) -> list[float]:
        assert one.stdin is not None and one.stdout is not None
        one.stdin.write(name + "\n")
        one.stdin.flush()
        figures: list[float] = json.loads(one.stdout.readline())
        return figures

    for name in ("pull", "step"):
        for one in (*ones, *ones):
            turn(one, name)  # not counted
        rounds = []
        for number in range(options.turns):  # A B, then B A: neither is always the first
            places = [0, 1] if number % 2 else [1, 0]
            figures = {place: turn(ones[place], name) for place in places}
            rounds.append([figures[0], figures[1]])
        for place, clock in enumerate(("by the clock", "processor")):
            before, after = ([r[i][place] for r in rounds] for i in range(2))
            ratios = [b / a for a, b in zip(before, after, strict=True)]
            medians = [f"{statistics.median(s) * 1e6:.0f} µs" for s in (before, after)]
            print(name, clock, *medians, interval(ratios), flush=True)
    for one in ones:
        assert one.stdin is not None
        one.stdin.write("end\n")
        one.stdin.close()
        one.wait()


if __name__ == "__main__":
    main()
