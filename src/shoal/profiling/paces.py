"""Measures the pace of each exchange as the engine will run it: wall and processor seconds.

As many buckets are in flight as there are lanes, back to back, small ones and large ones:

    seconds of a round of buckets, one on each lane
                                      = messages in a row · round_s + lanes · bytes · byte_s
    processor seconds of one bucket   = messages in a row · round_s + bytes · byte_s

Processor time is short compared with the clock's grain, so a byte never counts for less than a byte
of the link's own messages. No rank computes meanwhile. Ranks that share cores do not keep step:
when the last of them comes to a gradient the others wait for it, and their processors are free.
(Measured with every rank computing, on four ranks and two cores, an all-reduce of 64 KB took
anything from 2 to 400 ms: no figure to plan with.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Exchange, SplitExchange
from shoal.core.cost import Pace, Price, Traffic
from shoal.core.facts import Link
from shoal.core.side_threads import side_threads
from shoal.profiling.fit import fit_line
from shoal.profiling.processor import ProcessorTime

# bytes of a small bucket; bytes to try for a large one, of which the first that fits is used
_SMALL, _LARGE = 1 << 16, (4 << 20, 1 << 20, 1 << 18)
# seconds for each exchange and size if two runs agree, and for two more if they do not
_QUICK_S, _BUDGET_S = 0.12, 0.5
_TIMES = 2
_AGREE = 0.1  # relative difference of runs that agree
_MOST_ROUNDS = 64
_ONE_LINK = 1.2  # limit over the link's rate: lanes that carry no more share one link
_PACK_S = 0.1
_COLD = 64 << 20  # bytes: more than a cache holds twice
_DUPLEX_S = 1.0  # seconds of each turn: a link's queues are empty after a tenth of them
CPU = torch.device("cpu")
_COMPUTED = 384  # rows and columns of the product between two moves: some milliseconds


def probe_paces(
    comm: Comm,
    link: Link,
    exchanges: Mapping[str, Exchange],
    *,
    lanes: Sequence[Comm],
    sharing: int = 1,
    device: torch.device = CPU,
) -> dict[str, Pace]:
    """Measure how long each exchange takes to move its stated bytes.

    Args:
        comm: the ranks, all of which call this at once with the same exchanges.
        link: the link as `probe_link` measured it.
        exchanges: by name; about a second for each.
        lanes: one channel for each bucket in flight at once; each gets a thread.
        sharing: how many of the ranks run on this rank's machine.
        device: where the buckets are.

    Returns:
        By name, the same on every rank: the slowest rank's. Zeros for an exchange that sends
        nothing. The processor time is the whole process's: if ranks are threads, it counts them
        all.
    """
    with side_threads(len(lanes), "probe lane") as pool:

        def run(exchange: Exchange, nbytes: int, rounds: int) -> tuple[float, float]:
            """Return (seconds, processor seconds) of so many rounds, the slowest rank's."""
            flats = [torch.zeros(nbytes // 4, dtype=torch.float32, device=device) for _ in lanes]

            def exchanged(lane: Comm, flat: Tensor) -> None:
                with own_stream(device):
                    for _ in range(rounds):
                        exchange.reduce(flat, lane)
                        exchange.gather(flat, lane)

            def serve(lane: Comm, flat: Tensor) -> None:
                lane.beside(partial(exchanged, lane, flat))

            comm.gather_objects(None, "measuring the links: paces")
            start, cpu_start = time.perf_counter(), ProcessorTime.now()
            list(pool.map(serve, lanes, flats))
            own_seconds = time.perf_counter() - start, ProcessorTime.now().since(cpu_start, sharing)
            ranks: list[tuple[float, float]] = comm.gather_objects(
                own_seconds, "measuring the links: paces"
            )
            return max(seconds for seconds, _ in ranks), max(cpu for _, cpu in ranks)

        def pace(exchange: Exchange) -> Pace:
            by_size = {_SMALL: exchange} | {nbytes: exchange.scaled(nbytes) for nbytes in _LARGE}
            traffic = {
                nbytes: measured.traffic(Bucket(nbytes // 4, 4), comm.topology)
                for nbytes, measured in by_size.items()
            }
            if not traffic[_SMALL].worst:
                return Pace(Price(0.0, 0.0), Price(0.0, 0.0))
            # seconds of a message by its bytes: a large bucket may go in more messages
            wall, cpu = {}, {}
            for nbytes in (_SMALL, _large(traffic, link, len(lanes))):
                timed = partial(run, by_size[nbytes], nbytes)
                first_s, _ = timed(1)  # makes the connections, and uses up the burst
                seconds, cpu_seconds = _a_round(timed, first_s)
                messages, sent = traffic[nbytes].rounds, traffic[nbytes].worst
                wall[len(lanes) * sent / messages] = seconds / messages
                cpu[sent / messages] = cpu_seconds / len(lanes) / messages
            processor = Price(*fit_line(cpu))
            at_least = replace(processor, byte_s=max(processor.byte_s, link.cpu_s_per_byte))
            return Pace(_on_link(wall, link), at_least)

        return {name: pace(exchange) for name, exchange in exchanges.items()}


def _on_link(seconds: Mapping[float, float], link: Link) -> Price:
    """Fit a price to measured sizes; no byte is cheaper than the link can carry it.

    Small buckets wait for one another's messages, and a shaped link lets a burst pass after each
    wait. A line through a small and a large bucket is too flat: it would make a large bucket faster
    than the link. Lanes with links of their own are faster than one link, and are priced as
    measured.

    Args:
        seconds: seconds by the bytes of a message on all lanes.
        link: the link that lanes share.
    """
    round_s, byte_s = fit_line(seconds)
    least_s, largest = 1 / link.bytes_per_s, max(seconds)
    if byte_s >= least_s or largest * least_s > _ONE_LINK * seconds[largest]:
        return Price(round_s, byte_s)
    left = [(max(0.0, s - nbytes * least_s), 1 / max(s, 1e-9)) for nbytes, s in seconds.items()]
    weights = sum(weight for _, weight in left)
    return Price(sum(s * weight for s, weight in left) / weights, least_s)


def _a_round(run: Callable[[int], tuple[float, ...]], first_s: float) -> list[float]:
    """Return one round's figures. `run` makes some rounds, and its first figure is seconds.

    Runs that agree are averaged, because the kernel counts interrupts by ticks. If they do not
    agree, the smallest figure counts.
    """
    for budget_s in _QUICK_S, _BUDGET_S:
        rounds = max(1, min(int(budget_s / _TIMES / first_s), _MOST_ROUNDS))
        runs = [[figure / rounds for figure in run(rounds)] for _ in range(_TIMES)]
        seconds = [own[0] for own in runs]
        if max(seconds) <= (1 + _AGREE) * min(seconds):
            return [fmean(figures) for figures in zip(*runs, strict=True)]
    return [min(figures) for figures in zip(*runs, strict=True)]


def probe_moves(
    comm: Comm,
    link: Link,
    direct: Exchange,
    *,
    lane: Comm,
    sharing: int = 1,
    device: torch.device = CPU,
) -> Pace:
    """Measure the wait of main threads for rows among all ranks, one move at a time.

    Ranks that share cores come to a move one after the other, about a time slice of the kernel's
    apart, and wait for the last.

    Args:
        comm: the ranks, all of which call this at once.
        link: the link as `probe_link` measured it.
        direct: an exchange with two halves. Every rank sends to every other in each half.
        lane: the channel to move them on.
        sharing: how many of the ranks run on this rank's machine.
        device: where the rows are.
    """
    matrix = torch.full((_COMPUTED, _COMPUTED), 0.5, dtype=torch.float32, device=device)
    flat = torch.zeros(_SMALL // 4, dtype=torch.float32, device=device)
    product = torch.empty_like(matrix)
    (pace,) = probe_paces(
        comm, link, {"moves": direct}, lanes=[lane], sharing=sharing, device=device
    ).values()

    def seconds(times: int, halves: Sequence[Callable[[Tensor, Comm], None]]) -> float:
        comm.gather_objects(None, "measuring the links: paces")
        start = time.perf_counter()
        for _ in range(times):
            for half in halves:
                torch.mm(matrix, matrix, out=product)
                lane.beside(partial(half, flat, lane))
        finish(device)
        ranks: list[float] = comm.gather_objects(
            (time.perf_counter() - start) / times, "measuring the links: paces"
        )
        return max(ranks)

    moving, computing = (direct.reduce, direct.gather), (_nothing, _nothing)
    first_s = seconds(1, moving)

    def timed(halves: Sequence[Callable[[Tensor, Comm], None]], times: int) -> tuple[float]:
        return (times * seconds(times, halves),)

    ((both_s,), (computed_s,)) = (
        _a_round(partial(timed, halves), first_s) for halves in (moving, computing)
    )
    traffic = direct.traffic(Bucket(flat.numel(), flat.itemsize), comm.topology)
    round_s = max(0.0, both_s - computed_s - traffic.worst * pace.wall.byte_s) / traffic.rounds
    return Pace(Price(max(pace.wall.round_s, round_s), pace.wall.byte_s), pace.cpu)


def probe_duplex(
    comm: Comm, exchange: SplitExchange, shares: Sequence[float], num_lanes: int, nbytes: int
) -> float:
    """Measure how much of its rate each direction of a link keeps while both are in use.

    If packets wait long at a link, acknowledgements of one direction wait in the queue of the
    other, and TCP slows down.

    Args:
        comm: all ranks, servers too, all of which call this at once.
        exchange: the exchange that carries buckets to servers and back.
        shares: the part of a bucket that each rank owns.
        num_lanes: how many buckets go at once, and how many come.
        nbytes: bytes of a bucket.

    Returns:
        1 if neither direction slows the other, a half if they take turns. The same on every rank.
    """
    there, back = (
        [comm.channel(f"duplex-{way}{i}") for i in range(num_lanes)] for way in ("there", "back")
    )
    sizes = [int(nbytes // 4 * share) for share in shares]
    with side_threads(2 * num_lanes, "probe lane") as pool:

        def serve(half: Callable[[Sequence[Tensor], Comm], None], lane: Comm, rounds: int) -> float:
            slices = torch.zeros(sum(sizes), dtype=torch.float32, device="cpu").split(sizes)

            def exchanged() -> None:
                for _ in range(rounds):
                    half(slices, lane)

            lane.beside(exchanged)
            return time.perf_counter()

        def seconds(
            rounds: int, *ways: tuple[Callable[[Sequence[Tensor], Comm], None], Sequence[Comm]]
        ) -> list[float]:
            """Return the seconds until each way was done, the soonest first."""
            comm.gather_objects(None, "measuring the links: paces")
            start = time.perf_counter()
            errands = [
                [pool.submit(serve, half, lane, rounds) for lane in lanes] for half, lanes in ways
            ]
            own_seconds = [max(errand.result() for errand in way) - start for way in errands]
            return sorted(
                max(ranks)
                for ranks in zip(
                    *comm.gather_objects(own_seconds, "measuring the links: paces"), strict=True
                )
            )

        going, coming = (exchange.reduce_scatter, there), (exchange.all_gather, back)
        rounds = max(1, min(int(_DUPLEX_S / seconds(1, going, coming)[-1]), _MOST_ROUNDS))
        turns = [(seconds(rounds, going), seconds(rounds, going, coming)) for _ in range(_TIMES)]
        alone_s = min(alone_s for (alone_s,), _ in turns)
        # The second direction runs alone once the first is done. That time shows the part of it
        # that was not done while both ran.
        done_s = [
            (alone_s + max(0.0, alone_s - (last_s - both_s)), 2 * both_s)
            for _, (both_s, last_s) in turns
        ]
        kept = min(1.0, max(alone / both for alone, both in done_s))
    for lane in (*there, *back):
        lane.close()
    return kept


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Compute on a stream of this thread's own, to its end, if the device has streams."""
    if device.type == "cpu":
        yield
        return
    with torch.Stream(device):
        yield
        finish(device)


def finish(device: torch.device) -> None:
    """Wait until the device has done this thread's work."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def _nothing(flat: Tensor, lane: Comm) -> None:
    """Move nothing."""


def probe_pack(comm: Comm, device: torch.device = CPU) -> float:
    """Return the seconds to pack a byte of gradient into its bucket while every rank packs.

    Neither is in a cache, because the rest of a step has replaced both.
    """
    gradients = torch.ones(_COLD // 4, dtype=torch.float32, device=device).split(_LARGE[0] // 4)
    buckets = torch.ones(_COLD // 4, dtype=torch.float32, device=device).split(_LARGE[0] // 4)
    comm.gather_objects(None, "measuring the links: paces")
    start, nbytes = time.perf_counter(), 0
    while time.perf_counter() - start < _PACK_S:
        for gradient, bucket in zip(gradients, buckets, strict=True):
            torch.mul(gradient, 0.5, out=bucket)
            nbytes += gradient.nbytes
    finish(device)
    seconds: list[float] = comm.gather_objects(
        (time.perf_counter() - start) / nbytes, "measuring the links: paces"
    )
    return max(seconds)


def _large(traffic: Mapping[int, Traffic], link: Link, in_flight: int) -> int:
    """Return the largest bucket with three quick rounds, or the smallest bucket."""
    for nbytes in _LARGE:
        if 3 * in_flight * traffic[nbytes].worst / link.bytes_per_s <= _QUICK_S:
            break
    return nbytes
