"""Each exchange alone, back to back: how much of the link it fills, and its curve from 2 to 8
hosts.

    sudo .venv/bin/python benchmarks/exchanges.py shares    4 hosts, 1 Gbit/s and unshaped, against
                                                            gloo's own: 9 min
    sudo .venv/bin/python benchmarks/exchanges.py curves    2 to 8 hosts, 200 Mbit/s, against their
                                                            formulas: 6 min
    sudo .venv/bin/python benchmarks/exchanges.py hosts     2 hosts of 2 ranks each, 1 Gbit/s: 1 min
    python benchmarks/exchanges.py plot                     docs/lab/exchanges.svg from the curves
                                                            (needs matplotlib)

Needs root and Linux (the lab). Figures in results/exchanges-*.json, and printed as tables.
Contenders take turns, A B A B; a turn is about a second of one exchange after another, after a
warm-up, as a burst passes for free after a pause. A figure is the median over turns of the slowest
rank's time.

The formulas (`in_buckets`), in buckets of n bytes through the busiest link, one direction, P hosts:

    direct, ring, all-reduce   2·(P−1)/P; each half of it half
    tree, in chunks            (first + (chunks − 1)·busiest) / chunks; first = way of one chunk up
                               and down again, a link shared evenly by a rank's children; busiest =
                               1, 2, 2, 3, 3 …
    one server, P workers      P·(chunks + 1)/chunks: it has a host of its own, which is not counted
                               in P

    share of the link = formula · n ÷ rate ÷ seconds
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.contracts.comm import Comm, Pending
from shoal.contracts.exchange import Bucket, Exchange, SplitExchange
from shoal.core.facts import Topology
from shoal.core.pieces import chunks_of, cut
from shoal.exchange.allreduce import AllReduce
from shoal.exchange.arrivals import after_sending, arrivals, landing_beside
from shoal.exchange.direct import Direct
from shoal.exchange.hierarchical import Hierarchical
from shoal.exchange.ring import Ring
from shoal.exchange.tree import Tree
from shoal.session.session import current

HERE = Path(__file__).parent
SHARES, CURVES = HERE / "results/exchanges-shares.json", HERE / "results/exchanges-curves.json"
HOSTS = HERE / "results/exchanges-hosts.json"
PLOT = HERE.parent / "docs/lab/exchanges.svg"
# what of a full Ethernet frame is the sender's own: 956 of 1000 Mbit/s, and so says iperf3
PAYLOAD = 1448 / 1514
BYTES_PER_S = {"1gbit": 125e6, "200mbit": 25e6}
KB, MB = 1 << 10, 1 << 20
CHUNK = Tree().chunk_bytes


@dataclass
class Lane:
    """What a contender gets: a channel of Shoal's, a process group of gloo's, a flat tensor and its
    slices.
    """

    comm: Comm
    group: dist.ProcessGroup
    flat: Tensor

    def __post_init__(self) -> None:
        self.slices = cut(self.flat, self.comm.size)
        self.own = self.slices[self.comm.rank].clone()


def halves(exchange: Exchange) -> dict[str, Callable[[Lane], None]]:
    """An exchange whole, and where it splits, each half."""

    def whole(lane: Lane) -> None:
        exchange.reduce(lane.flat, lane.comm)
        exchange.gather(lane.flat, lane.comm)

    runs = {exchange.name: whole}
    if isinstance(exchange, SplitExchange):
        runs[f"{exchange.name}.reduce"] = lambda lane: exchange.reduce(lane.flat, lane.comm)
        runs[f"{exchange.name}.gather"] = lambda lane: exchange.gather(lane.flat, lane.comm)
    return runs


def one_server(lane: Lane) -> None:
    """One server, rank 0, that has no gradients of its own: workers send it all they have, and get
    the sum back.
    """
    comm, chunks = lane.comm, chunks_of(lane.flat, CHUNK)
    if comm.rank:
        sends = [comm.send(chunk, 0) for chunk in chunks]
        for _ in arrivals(comm, 0, after_sending(chunks, sends)):
            pass
        return
    lane.flat.zero_()
    arriving = [arrivals(comm, worker, landing_beside(chunks)) for worker in range(1, comm.size)]
    back: list[Pending] = []
    for chunk in chunks:
        for each in arriving:
            chunk.add_(next(each))
        back += [comm.send(chunk, worker) for worker in range(1, comm.size)]
    for send in back:
        send.wait()


def gloo_reduce_broadcast(lane: Lane) -> None:
    """Gloo's own way up and down a tree."""
    dist.reduce(lane.flat, group=lane.group, group_dst=0)
    dist.broadcast(lane.flat, group=lane.group, group_src=0)


CONTENDERS: dict[str, Callable[[Lane], None]] = {
    **halves(Direct()),
    **halves(Ring()),
    **halves(AllReduce()),
    **halves(Tree()),
    **halves(Hierarchical()),
    "tree, one chunk": lambda lane: Tree(chunk_bytes=1 << 40).reduce(lane.flat, lane.comm),
    "one server": one_server,
    "gloo all_reduce": lambda lane: dist.all_reduce(lane.flat, group=lane.group),
    "gloo reduce_scatter": lambda lane: dist.reduce_scatter(
        lane.own, lane.slices, group=lane.group
    ),
    "gloo all_gather": lambda lane: dist.all_gather(lane.slices, lane.own, group=lane.group),
    "gloo reduce + broadcast": gloo_reduce_broadcast,
}


@dataclass(frozen=True)
class Case:
    """What one lab measures: `lanes` buckets are in flight at once, each on a channel and thread of
    its own.
    """

    hosts: int
    rate: str
    nbytes: int
    lanes: int
    contenders: Sequence[str]
    turns: int = 3
    turn_s: float = 1.0
    ranks_per_host: int = 1


def measure(case: Case) -> list[dict]:
    """Run the case in a lab of its own."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        where = ["--hosts", str(case.hosts), "--ranks-per-host", str(case.ranks_per_host)]
        lab = [sys.executable, "-m", "shoal", "lab", *where, "--rate", case.rate, "--"]
        rank = [sys.executable, str(Path(__file__)), "rank", json.dumps(asdict(case)), str(path)]
        subprocess.run([*lab, *rank], check=True)
        return json.loads(path.read_text())


def serve(case: Case, path: Path) -> None:
    """What every rank runs: each contender in turn; rank 0 writes the figures down."""
    torch.set_num_threads(1)
    shoal.init(timeout_s=60)
    comm = current().comm
    channels = [comm.channel(f"lane {i}") for i in range(case.lanes)]
    lanes = [Lane(channel, dist.new_group(), torch.zeros(case.nbytes // 4)) for channel in channels]
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in case.contenders}
    with ThreadPoolExecutor(case.lanes) as pool:

        def run(name: str, times: int) -> tuple[float, float]:
            """Seconds of the slowest rank, and processor seconds of the average rank, for one
            exchange.
            """

            def repeat(lane: Lane) -> None:
                for _ in range(times):
                    CONTENDERS[name](lane)

            comm.gather_objects(None, "set-up")
            list(pool.map(lambda lane: CONTENDERS[name](lane), lanes))  # uses up the burst
            start, cpu_start = time.perf_counter(), time.process_time()
            list(pool.map(repeat, lanes))
            mine = time.perf_counter() - start, time.process_time() - cpu_start
            ranks = comm.gather_objects(mine, "set-up")
            exchanges = times * case.lanes
            return max(wall for wall, _ in ranks) / exchanges, sum(cpu for _, cpu in ranks) / len(
                ranks
            ) / exchanges

        times = {}
        for name in case.contenders:
            run(name, 1)  # makes the connections
            seconds, _ = run(name, 1)
            times[name] = max(2, round(case.turn_s / seconds / case.lanes))
        for _ in range(case.turns):
            for name in case.contenders:
                figures[name].append(run(name, times[name]))
    if comm.rank == 0:
        rows = []
        for name, turns in figures.items():
            seconds = [wall for wall, _ in turns]
            spread = {"low_s": min(seconds), "seconds": median(seconds), "high_s": max(seconds)}
            what = {k: v for k, v in asdict(case).items() if k not in ("contenders", "turn_s")}
            rows.append(
                {"contender": name, **what, **spread, "cpu_s": median(cpu for _, cpu in turns)}
            )
        path.write_text(json.dumps(rows))


def in_buckets(contender: str, hosts: int, nbytes: int) -> float | None:
    """How many buckets go through the busiest link, one direction, from the start to the end of one
    exchange.
    """
    chunks = 1 if contender == "tree, one chunk" else -(-nbytes // CHUNK)
    if contender.startswith("tree"):
        bucket, topology = (
            Bucket(nbytes // 4, 4),
            Topology(tuple(f"h{rank}" for rank in range(hosts))),
        )
        busiest = Tree().traffic(bucket, topology).worst / nbytes
        return (climb(0, hosts) + descend(0, hosts) + (chunks - 1) * busiest) / chunks
    if contender == "one server":
        return (hosts - 1) * (chunks + 1) / chunks
    if contender == "gloo reduce + broadcast":
        return None  # gloo does not say
    half = contender.endswith((".reduce", ".gather", "reduce_scatter", "all_gather"))
    return (1 if half else 2) * (hosts - 1) / hosts


def climb(rank: int, hosts: int) -> int:
    """Messages in a row until the sum of a rank and all below it is there: children's come one
    after the other.
    """
    end = 0
    for start in sorted(climb(child, hosts) for child in children(rank, hosts)):
        end = max(end, start) + 1
    return end


def descend(rank: int, hosts: int) -> int:
    """Messages in a row until all below a rank have what it has."""
    below = children(rank, hosts)
    return len(below) + max((descend(child, hosts) for child in below), default=0)


def children(rank: int, hosts: int) -> list[int]:
    """Of a rank in the tree."""
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < hosts]


ALONE = (
    "direct",
    "direct.reduce",
    "direct.gather",
    "ring",
    "ring.reduce",
    "ring.gather",
    "allreduce",
    "tree",
)
GLOO = ("gloo all_reduce", "gloo reduce_scatter", "gloo all_gather", "gloo reduce + broadcast")


def shares() -> None:
    """Every exchange and gloo's own at three sizes, with one bucket in flight and with three, as in
    training.
    """
    rows: list[dict] = []
    for rate, lanes in (("1gbit", 1), ("1gbit", 3), ("none", 1)):
        for nbytes in (32 * MB, 4 * MB, 512 * KB):
            rows += measure(Case(4, rate, nbytes, lanes, (*ALONE, *GLOO)))
            SHARES.write_text(json.dumps(rows, indent=1) + "\n")
    tabulate(rows)


def curves() -> None:
    """One server against the tree against direct, 4 MB, from 2 to 8 hosts."""
    rows: list[dict] = []
    for hosts in range(2, 9):
        rows += measure(Case(hosts, "200mbit", 4 * MB, 1, ("direct", "tree", "tree, one chunk")))
        rows += measure(Case(hosts + 1, "200mbit", 4 * MB, 1, ("one server",)))
        CURVES.write_text(json.dumps(rows, indent=1) + "\n")
    tabulate(rows)


def hosts() -> None:
    """What ranks that share a host's link gain by summing beside one another first."""
    contenders = ("hierarchical", "direct", "ring", "allreduce", "gloo all_reduce")
    rows: list[dict] = []
    for nbytes in (32 * MB, 4 * MB, 512 * KB):
        rows += measure(Case(2, "1gbit", nbytes, 1, contenders, ranks_per_host=2))
    HOSTS.write_text(json.dumps(rows, indent=1) + "\n")
    tabulate(rows)


def tabulate(rows: Sequence[dict]) -> None:
    """The tables of docs/lab/exchanges.md."""
    print(
        "| contender | hosts | rate | bucket | lanes | ms | least to most | CPU ms a rank | share "
        "| … of nominal |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [
            row["contender"],
            row["hosts"],
            row["rate"],
            f"{row['nbytes'] // KB} KB",
            row["lanes"],
        ]
        cells += [f"{1e3 * row[key]:.1f}" for key in ("seconds",)]
        cells += [
            f"{1e3 * row['low_s']:.1f} to {1e3 * row['high_s']:.1f}",
            f"{1e3 * row['cpu_s']:.2f}",
        ]
        formula_s = expected_s(row)
        share = formula_s / row["seconds"] if formula_s else None
        cells += [f"{share:.2f}", f"{share * PAYLOAD:.2f}"] if share else ["", ""]
        print("|", " | ".join(map(str, cells)), "|")


def expected_s(row: dict) -> float | None:
    """What the formula gives at the payload rate of the link; None where there is no formula or no
    rate.
    """
    if row.get("ranks_per_host", 1) > 1:
        return None
    buckets = in_buckets(row["contender"], row["hosts"], row["nbytes"])
    rate = BYTES_PER_S.get(row["rate"])
    return buckets * row["nbytes"] / (rate * PAYLOAD) if buckets and rate else None


def plot() -> None:
    """Draw the curves: points measured, lines by formula."""
    try:
        from matplotlib import pyplot  # noqa: PLC0415  a third party, and only this needs it
    except ImportError:
        sys.exit(
            "the plot needs matplotlib: pip install matplotlib (in any environment with Shoal)"
        )
    rows = json.loads(CURVES.read_text())
    pyplot.rcParams.update({"svg.hashsalt": "shoal", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(5.4, 3.4))
    for contender in ("one server", "tree, one chunk", "tree", "direct"):
        mine = [row for row in rows if row["contender"] == contender]
        workers = [row["hosts"] - (contender == "one server") for row in mine]
        (line,) = axes.plot(workers, [expected_s(row) for row in mine], linewidth=1)
        label = "tree, in chunks" if contender == "tree" else contender
        axes.plot(
            workers,
            [row["seconds"] for row in mine],
            "o",
            markersize=4,
            color=line.get_color(),
            label=label,
        )
    axes.set(xlabel="workers", ylabel="seconds for 4 MB", ylim=(0, None))
    axes.set_title("200 Mbit/s: measured (points), by formula (lines)", fontsize=9)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PLOT, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Serve as a rank of a lab, or run what is named."""
    match sys.argv[1:]:
        case ["rank", case, path]:
            serve(Case(**json.loads(case)), Path(path))
        case ["shares"]:
            shares()
        case ["curves"]:
            curves()
        case ["hosts"]:
            hosts()
        case ["plot"]:
            plot()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
