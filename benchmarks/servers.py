"""Spare hosts as servers: their exchange against all-reduce, and what running ahead is worth.

    sudo .venv/bin/python benchmarks/servers.py [exchange] [training] [ahead]       half an hour;
                                                                                    results/servers.json

exchange   buckets summed and brought back, back to back, several in flight: 4 workers by
           themselves, by all-reduce; with 4 more hosts as servers, and with 2 more (then workers
           serve a share too). As in training, a lane brings buckets to servers while another brings
           back what is summed, in a steady state: the first to come back is of before, and a turn
           is many buckets long, as in one of a dozen how it begins and ends is a tenth. Once more
           where a packet waits at a link for 5 ms at most, not 50
training   steps of benchmarks/recipes/eight_linears.py, which are exchange and little else: by
           all-reduce without servers, by 4 and by 2 servers, and as the planner would have it with
           4; for both queues
ahead      a small model; in each step another worker, drawn at random, takes three times as long
           (it sleeps): seconds a step of the synchronous server, of a bound of 3, and of none; and
           the same with one worker slow for good
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal
from shoal.comm.process_group import join
from shoal.contracts.comm import Comm
from shoal.exchange.direct import Direct
from shoal.strategies.server import shares

WORKERS = 4
# bytes of a bucket, lanes, rounds
IN_FLIGHT = {"4 MiB, four": (4 << 20, 4, 12), "16 MiB, eight": (16 << 20, 8, 2)}
TURNS = 3  # of lanes × rounds buckets
STEP_S, SLOWER, STEPS = 0.05, 3, 60
RESULTS = Path(__file__).parent / "results" / "servers.json"


def lab(
    rate: str, servers: int, serving: int, *arguments: str, queue: str = "50ms"
) -> list[dict[str, float]]:
    """Run this file on hosts of a lab, of which `serving` are Shoal's servers; what ranks printed
    as JSON.
    """
    hosts = ["--hosts", str(WORKERS + servers - serving), "--servers", str(serving)]
    links = ["--rate", rate, "--queue", queue]
    command = [
        sys.executable,
        "-m",
        "shoal",
        "lab",
        *hosts,
        *links,
        "--",
        sys.executable,
        __file__,
        *arguments,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, end="", flush=True)
    return [
        json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines() if "] {" in line
    ]


def exchange(servers: int, in_flight: str) -> None:
    """On a rank: seconds of one bucket's exchange, by way."""
    nbytes, num_lanes, rounds = IN_FLIGHT[in_flight]
    everyone = join(60.0, 60.0, os.environ["SHOAL_HOST"], servers)
    there, back = (
        [everyone.channel(f"{way}{i}") for i in range(num_lanes)] for way in ("there", "back")
    )
    sizes = (
        [int(nbytes // 4 * share) for share in shares(WORKERS, servers)]
        if servers
        else [0] * WORKERS
    )
    going, coming = ([torch.zeros(nbytes // 4) for _ in range(num_lanes)] for _ in range(2))

    def to_servers(comm: Comm, flat: Tensor) -> None:
        Direct().reduce_scatter(flat[: sum(sizes)].split(sizes), comm)

    def from_servers(comm: Comm, flat: Tensor) -> None:
        Direct().all_gather(flat[: sum(sizes)].split(sizes), comm)

    def by_all_reduce(comm: Comm, flat: Tensor) -> None:
        comm.all_reduce(flat)

    work: dict[str, list[tuple[Callable[[Comm, Tensor], None], Comm, Tensor]]] = {"all-reduce": []}
    if servers:
        both_ways = (to_servers, there, going), (from_servers, back, coming)
        work[f"{WORKERS} + {servers} servers"] = [
            (half, comm, flat)
            for half, comms, flats in both_ways
            for comm, flat in zip(comms, flats, strict=True)
        ]
    if everyone.rank < WORKERS:
        among = everyone.group(range(WORKERS))
        own_lanes = [among.channel(f"own{i}") for i in range(num_lanes)]
        work["all-reduce"] = [(by_all_reduce, *own) for own in zip(own_lanes, going, strict=True)]
    seconds: dict[str, list[float]] = {name: [] for name in work}
    with ThreadPoolExecutor(2 * num_lanes) as pool:

        def serve(what: Callable[[Comm, Tensor], None], comm: Comm, flat: Tensor) -> None:
            for _ in range(rounds):
                what(comm, flat)

        for _ in range(TURNS):
            for name, errands in work.items():
                everyone.gather_objects(None, "set-up")
                start = time.perf_counter()
                for errand in [pool.submit(serve, *each) for each in errands]:
                    errand.result()
                ranks = everyone.gather_objects(time.perf_counter() - start, "set-up")
                seconds[name].append(max(ranks) / (rounds * num_lanes))
    if everyone.rank == 0:
        print(
            json.dumps({name: statistics.median(each) for name, each in seconds.items()}),
            flush=True,
        )
    everyone.leave(None)


def ahead(staleness: int | None, slow: str) -> None:
    """On a rank: seconds a step where workers are slow in turn, or one of them for good."""
    world = shoal.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(16, 64) + world.rank, torch.randint(10, (16,))
    loss_fn = nn.functional.cross_entropy
    how = {"pins": {"*": "server"}} if staleness == 0 else {"staleness": staleness}
    shoal.parallelize(model, loss_fn, optimizer, sample=(x, y), **how)
    draw = random.Random(0)
    own_s = []
    for _ in range(STEPS):
        start = time.perf_counter()
        chosen = draw.randrange(world.size) if slow == "random" else 0
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        time.sleep(STEP_S * (SLOWER if chosen == world.rank else 1))
        optimizer.step()
        own_s.append(time.perf_counter() - start)
    model.state_dict()
    print(json.dumps({"rank": world.rank, "step_s": sum(own_s) / STEPS}), flush=True)


def training(servers: int, pins: Sequence[str], queue: str) -> dict[str, float]:
    """Seconds of a step by `shoal train`, predicted and median."""
    shoal_ = [sys.executable, "-m", "shoal"]
    links = [
        "--hosts",
        str(WORKERS),
        "--servers",
        str(servers),
        "--rate",
        "200mbit",
        "--queue",
        queue,
    ]
    recipe = str(RESULTS.parent.parent / "recipes" / "eight_linears.py")
    pinned = [word for pin in pins for word in ("--pin", pin)]
    command = [*shoal_, "lab", *links, "--", *shoal_, "train", recipe, *pinned, "--steps", "14"]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = {name: re.search(rf"{name} step ([\d.]+) ms", out) for name in ("median", "predicted")}
    seconds = {name: float(each[1]) / 1e3 for name, each in found.items() if each}
    print(servers, *pins, queue, seconds, flush=True)
    return seconds


def main() -> None:
    """Run what was asked for, and write the figures."""
    wanted = sys.argv[1:] or ["exchange", "training", "ahead"]
    figures = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if "exchange" in wanted:
        figures["exchange_s"] = {
            f"{servers} servers, {in_flight}, at most {queue} at a link": lab(
                "200mbit", servers, 0, "--exchange", str(servers), in_flight, queue=queue
            )[0]
            for queue in ("50ms", "5ms")
            for in_flight in IN_FLIGHT
            for servers in (WORKERS, WORKERS // 2)
        }
    if "training" in wanted:
        ways = {"all-reduce": (0, ["*=replicate:allreduce"]), "4 servers": (4, ["*=server"])}
        ways |= {"2 servers": (2, ["*=server"]), "auto, 4 servers": (4, [])}
        figures["training_s"] = {
            f"{name}, at most {queue} at a link": training(*way, queue)
            for queue in ("50ms", "5ms")
            for name, way in ways.items()
        }
    if "ahead" in wanted:
        figures["ahead_step_s"] = {}
        for slow in ("random", "one"):
            for bound in ("0", "3", "none"):
                ranks = lab("1gbit", 2, 2, "--ahead", bound, slow)
                by_rank = {each["rank"]: each["step_s"] for each in ranks}
                figures["ahead_step_s"][f"{slow}, bound {bound}"] = [
                    by_rank[rank] for rank in range(WORKERS)
                ]
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    if "--exchange" in sys.argv:
        exchange(int(sys.argv[2]), sys.argv[3])
    elif "--ahead" in sys.argv:
        ahead(None if sys.argv[2] == "none" else int(sys.argv[2]), sys.argv[3])
    else:
        main()
