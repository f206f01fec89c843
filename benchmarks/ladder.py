"""Two checkouts of Shoal, one bucket's all-reduce in turn: did the way to the network get slower?

    .venv/bin/python benchmarks/ladder.py --before DIR --after DIR      some minutes
    .venv/bin/python benchmarks/ladder.py --after DIR --draw            the calls of one message

Each checkout has processes of its own: two ranks that are threads, and two that are processes with
sockets between them. All stand ready and take turns (A B B A …). In a turn the carrier of a bucket
of 64 KiB or 1 MiB sums it some times on a lane, as a transfer does. The figures are seconds by the
clock, and processor seconds of all the processes of a version, which other programs on the machine
change less. The ratio is the median over turns of after ÷ before; its 95 % interval is a bootstrap
over turns. A ratio above 1 says that the second checkout is slower.

`--draw` prints each function between a transfer and torch for a message of `direct` and a sum of
`allreduce`.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from served import interval

TIMES = {64 << 10: 40, 1 << 20: 15}  # sums of a bucket of so many bytes in a turn
EXCHANGES = ("direct", "allreduce")


def be_rank(comm: Any, turns: Any, done: Any) -> None:
    """Take turns until the last; a turn names an exchange and the bytes of the bucket."""
    import torch  # noqa: PLC0415  (the checkout that PYTHONPATH names is imported here)

    from shoal.codecs.coded_exchange import read_exchange  # noqa: PLC0415
    from shoal.contracts.exchange import LiveBucket  # noqa: PLC0415
    from shoal.engine.lanes import Lane  # noqa: PLC0415

    lane, carriers = Lane(comm.channel("lane"), "lane 0"), {}
    for name in EXCHANGES:
        for nbytes in TIMES:
            flat = torch.zeros(nbytes // 4)
            live = LiveBucket.even(flat, {"weight": nbytes // 4}, comm.size)
            carriers[name, nbytes] = read_exchange(name).carrier(live)
    for turn in turns:
        name, size = turn.split()
        carrier = carriers[name, int(size)]

        def work(channel: Any, carrier: Any = carrier) -> None:
            carrier.reduce(channel)
            carrier.gather(channel)

        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(TIMES[int(size)]):
            lane.run(work, "exchange 0").wait("a turn")
        each = TIMES[int(size)]
        cpu_s = time.process_time() - begin_cpu_s
        done([(time.perf_counter() - begin_s) / each, cpu_s / each])
    lane.close()


def be_one(way: str) -> None:
    """Be a version's two threads, or one of its two processes."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)

    def say(figures: list[float]) -> None:
        print(json.dumps(figures), flush=True)

    words = (line.strip() for line in sys.stdin)
    if way == "sockets":
        import shoal  # noqa: PLC0415
        from shoal.session.session import current  # noqa: PLC0415

        shoal.init(timeout_s=600)
        be_rank(current().comm, words, say)
        return
    from queue import Queue  # noqa: PLC0415

    from shoal.comm.threads import run  # noqa: PLC0415

    given: Queue[str] = Queue()

    def rank(comm: Any) -> None:
        if comm.rank == 1:
            be_rank(comm, iter(given.get, ""), lambda figures: None)
            return

        def turns() -> Any:
            for word in words:
                given.put(word)
                yield word
            given.put("")

        be_rank(comm, turns(), say)

    run(2, rank, timeout_s=600)


class Version:
    """The processes of one checkout for threads or sockets."""

    def __init__(self, folder: Path, way: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        places: list[dict[str, str]] = [{}]
        if way == "sockets":
            base = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            base |= {"LOCAL_WORLD_SIZE": "2"}
            places = [{**base, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--one", way],
                env={**os.environ, "PYTHONPATH": str(folder.resolve() / "src"), **place},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for place in places
        ]
        atexit.register(lambda: [rank.kill() for rank in self.ranks])

    def turn(self, words: str) -> list[float]:
        """Take a turn: the seconds of the slowest rank, and the processor seconds of all."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(words + "\n")
            rank.stdin.flush()
        figures = [json.loads(rank.stdout.readline()) for rank in self.ranks if rank.stdout]
        return [max(f[0] for f in figures), sum(f[1] for f in figures)]

    def end(self) -> None:
        """Let the processes end."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait()


def compare(before: Path, after: Path, turns: int, ways: list[str]) -> None:
    """Print a row for each way, exchange and size."""
    for way in ways:
        both = [Version(folder, way) for folder in (before, after)]
        for name in EXCHANGES:
            for size in TIMES:
                words = f"{name} {size}"
                for version in (*both, *both):
                    version.turn(words)  # not counted
                rounds = []
                for number in range(turns):  # A B, then B A: neither is always the first
                    places = [0, 1] if number % 2 else [1, 0]
                    figures = {place: both[place].turn(words) for place in places}
                    rounds.append([figures[0], figures[1]])
                for place, clock in enumerate(("clock", "processor")):
                    old, new = ([r[i][place] for r in rounds] for i in range(2))
                    ratio = interval([b / a for a, b in zip(old, new, strict=True)])
                    medians = " ".join(f"{statistics.median(s) * 1e6:.0f} µs" for s in (old, new))
                    spread = "{median:.3f} ({low:.3f} to {high:.3f})".format(**ratio)
                    print(way, name, f"{size >> 10} KiB", clock, medians, spread, flush=True)
        for version in both:
            version.end()


def draw() -> None:
    """Print the calls from a transfer to torch's process group, of one process with two threads."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    import shoal  # noqa: PLC0415
    from shoal.session.session import current  # noqa: PLC0415

    shoal.init(timeout_s=60)
    found: dict[str, list[str]] = {}

    def spy(kind: str) -> Any:
        original = getattr(dist.ProcessGroup if "." not in kind else dist, kind.split(".")[-1])

        def call(*args: Any, **kwargs: Any) -> Any:
            frames = traceback.extract_stack()[:-1]
            lines = [f"{f.name}  {f.filename.split('/src/')[-1]}" for f in frames]
            found.setdefault(kind, lines)
            return original(*args, **kwargs)

        return call

    dist.all_reduce = spy("dist.all_reduce")
    dist.ProcessGroup.send = spy("send")
    works = dist.Work.wait
    stacks: list[list[str]] = []

    def wait(*args: Any) -> Any:
        frames = traceback.extract_stack()[:-1]
        stacks.append([f"{f.name}  {f.filename.split('/src/')[-1]}" for f in frames])
        return works(*args)

    dist.Work.wait = wait
    from shoal.codecs.coded_exchange import read_exchange  # noqa: PLC0415
    from shoal.contracts.exchange import LiveBucket  # noqa: PLC0415
    from shoal.engine.lanes import Lane  # noqa: PLC0415

    comm = current().comm
    lane = Lane(comm.channel("lane"), "lane 0")
    for name in ("direct", "allreduce"):
        found.clear()
        stacks.clear()
        flat = torch.zeros(1024)
        carrier = read_exchange(name).carrier(LiveBucket.even(flat, {"w": 1024}, comm.size))
        lane.run(carrier.reduce, "exchange 0").wait("a turn")
        calls: list[str] = []  # of Shoal's functions in a whole sum

        def profile(frame: Any, event: str, arg: object, calls: list[str] = calls) -> None:
            if event == "call" and "/src/shoal/" in frame.f_code.co_filename:
                calls.append(frame.f_code.co_name)

        def counted(channel: Any, carrier: Any = carrier, profile: Any = profile) -> None:
            sys.setprofile(profile)
            carrier.reduce(channel)
            carrier.gather(channel)
            sys.setprofile(None)

        lane.run(counted, "exchange 0").wait("a turn")
        if comm.rank == 0:
            print(f"{name}: {len(calls)} calls of Shoal's functions for a sum")
            for kind, lines in {**found, "wait": stacks[0] if stacks else []}.items():
                own = [line for line in lines if "shoal" in line]
                print(f"  {kind}, {len(own)} calls:", *own, sep="\n    ")
    lane.close()


def main() -> None:
    """Compare two versions, draw one, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path)
    parser.add_argument("--turns", type=int, default=80)
    parser.add_argument("--ways", nargs="+", default=["threads", "sockets"])
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one == "draw":
        draw()
    elif options.one:
        be_one(options.one)
    elif options.draw:
        base = {**os.environ, "PYTHONPATH": str(options.after.resolve() / "src")}
        base |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--one", "draw"],
                env={**base, "RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": "2"},
            )
            for r in range(2)
        ]
        for rank in ranks:
            rank.wait()
    else:
        compare(options.before, options.after, options.turns, options.ways)


if __name__ == "__main__":
    main()
