"""Measures the links: latency, rate and processor cost of a byte, and how much of the rate each exchange reaches.

Every rank sends to the next and receives from the one before, all at once, back to back: after a pause a shaped link
lets a burst (128 KB in the lab) pass for free, so each size begins with messages that are not counted, and the large
ones decide the rate. What the ranks agree on is the slowest rank's, so that all go on alike and return the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from statistics import median

import torch
from torch import Tensor

from shoal.core.contracts import Bucket, Comm, Exchange
from shoal.core.facts import Link, Topology
from shoal.profiling.fit import fit_line

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_CPU = torch.device("cpu")
_BURST = 1 << 18  # bytes: what may pass for free after a pause, and some more
_GROUPS, _MOST_IN_GROUP = 9, 16  # of messages timed together, so that clumps even out; the median group counts
_SMALL_BUCKET = 1 << 20
_SHARE_BUDGET_S = 1.5  # for each exchange
_COMPUTE_WIDTH = 256  # of the products that the main thread computes meanwhile: under a millisecond each
_MOST_ROUNDS = 16


def probe_link(comm: Comm, *, sizes: Sequence[int] = SIZES, budget_s: float = 3.0, device: torch.device = _CPU) -> Link:
    """Measure what one rank's way to the others carries while all of them use theirs.

    Args:
        comm: the ranks, all of which call this at once.
        sizes: bytes of a message, at least two of them; on a slow link the largest are left out.
        budget_s: about how long it may take; at most twice that.
        device: where messages lie (nccl moves CUDA tensors only).

    Returns:
        The same link on every rank. `cpu_s_per_byte` is the whole process's: where ranks are threads it counts them
        all. With one rank there is nothing to measure: no latency, no limit.
    """
    if comm.size == 1:
        return Link(latency_s=0.0, bytes_per_s=math.inf)
    end = time.perf_counter() + budget_s
    seconds: dict[int, float] = {}
    cpu_s_per_byte = 0.0
    ordered = sorted(sizes)
    for index, size in enumerate(ordered):
        left_s = min(comm.gather_objects(end - time.perf_counter()))
        if len(seconds) >= 2:
            latency_s, s_per_byte = fit_line(seconds)
            if 2 * (latency_s + s_per_byte * size) > left_s:  # one to warm up, one to measure
                break
        seconds[size], cpu_s_per_byte = _time_messages(comm, size, left_s / (len(ordered) - index), device)
    latency_s, s_per_byte = fit_line(seconds)
    return Link(latency_s, 1 / max(s_per_byte, 1e-13), cpu_s_per_byte)


def _time_messages(comm: Comm, size: int, allowed_s: float, device: torch.device) -> tuple[float, float]:
    """(seconds a message, processor seconds a byte) of messages of one size, back to back, in about `allowed_s`."""
    outgoing = torch.zeros(size, dtype=torch.uint8, device=device)
    incoming = torch.empty_like(outgoing)

    def shift(messages: int) -> float:
        start = time.perf_counter()
        for _ in range(messages):
            received = comm.receive(incoming, (comm.rank - 1) % comm.size)
            sent = comm.send(outgoing, (comm.rank + 1) % comm.size)
            received.wait()
            sent.wait()
        _finish(device)
        return (time.perf_counter() - start) / messages

    warm_up = max(1, min(_BURST // size, 4 * _MOST_IN_GROUP))
    one_s = max(comm.gather_objects(shift(warm_up)))
    in_group = max(1, min(int(allowed_s / one_s / _GROUPS), _MOST_IN_GROUP))
    groups = max(1, min(int(allowed_s / one_s / in_group), _GROUPS))
    cpu_start = time.process_time()
    message_s = median(shift(in_group) for _ in range(groups))  # the first one may profit from the pause
    cpu_s_per_byte = (time.process_time() - cpu_start) / (groups * in_group * size)
    ranks = comm.gather_objects((message_s, cpu_s_per_byte))
    return max(seconds for seconds, _ in ranks), max(cpu for _, cpu in ranks)


def probe_shares(
    comm: Comm,
    link: Link,
    exchanges: Mapping[str, Exchange],
    *,
    lanes: Sequence[Comm],
    nbytes: int = 4 << 20,
    topology: Topology | None = None,
    device: torch.device = _CPU,
) -> dict[str, float]:
    """Measure at what share of the link's rate each exchange moves its stated bytes, as the engine will run it.

    The main thread computes meanwhile, as it does in backward: where ranks share cores, messages wait for a processor.

    Args:
        comm: the ranks, all of which call this at once with the same exchanges.
        link: what `probe_link` measured.
        exchanges: by name.
        lanes: one channel for each bucket in flight at once; each gets a thread.
        nbytes: of a bucket; 1 MiB where that would take too long on this link.
        topology: which hosts the ranks are on; each on its own where it is not given.
        device: where buckets lie.

    Returns:
        By name: seconds that the stated bytes and rounds should take / seconds that a bucket took, between 0.01 and 4
        (above 1 where lanes hide each other's latency); 1 for an exchange that sends nothing. The same on every rank.
    """
    topology = topology or Topology(tuple(f"host {rank}" for rank in range(comm.size)))
    shares = {}
    with ThreadPoolExecutor(len(lanes), thread_name_prefix="probe lane") as pool:
        for name, exchange in exchanges.items():
            bucket = Bucket(nbytes // 4, 4)
            if 2 * len(lanes) * _stated_s(exchange, bucket, topology, link) > _SHARE_BUDGET_S:
                bucket = Bucket(min(nbytes, _SMALL_BUCKET) // 4, 4)
            stated_s = _stated_s(exchange, bucket, topology, link)
            measured_s = _measured_s(comm, exchange, bucket, lanes, pool, device) if stated_s else 0.0
            shares[name] = min(max(stated_s / measured_s, 0.01), 4.0) if stated_s else 1.0
    return shares


def _stated_s(exchange: Exchange, bucket: Bucket, topology: Topology, link: Link) -> float:
    """Seconds that a bucket takes at the link's full rate; 0 for an exchange that sends nothing."""
    traffic = exchange.traffic(bucket, topology)
    return traffic.worst / link.bytes_per_s + traffic.rounds * link.latency_s if traffic.worst else 0.0


def _measured_s(
    comm: Comm, exchange: Exchange, bucket: Bucket, lanes: Sequence[Comm], pool: Executor, device: torch.device
) -> float:
    """Seconds a bucket, with as many of them in flight as there are lanes, back to back, beside compute."""
    operand = torch.ones(_COMPUTE_WIDTH, _COMPUTE_WIDTH, device=device)
    product = torch.empty_like(operand)
    flats = [torch.zeros(bucket.numel, dtype=torch.float32, device=device) for _ in lanes]

    def serve(lane: Comm, flat: Tensor, rounds: int) -> None:
        for _ in range(rounds):
            exchange.reduce(flat, lane)
            exchange.gather(flat, lane)

    def slowest(rounds: int) -> float:
        comm.gather_objects(None)
        start = time.perf_counter()
        serving = [pool.submit(serve, lane, flat, rounds) for lane, flat in zip(lanes, flats, strict=True)]
        while not all(each.done() for each in serving):
            torch.mm(operand, operand, out=product)
        for each in serving:
            each.result()
        _finish(device)
        round_s: list[float] = comm.gather_objects((time.perf_counter() - start) / rounds)
        return max(round_s)

    first_s = slowest(1)  # makes the connections, and uses up the burst
    return slowest(max(2, min(int(_SHARE_BUDGET_S / first_s), _MOST_ROUNDS))) / len(lanes)


def _finish(device: torch.device) -> None:
    """Wait for what is queued on the device; on a CPU nothing is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
