"""Measures the links: latency, rate and processor cost of a byte.

Every rank sends to another host and receives from one, all at once and without a pause. So ranks on
the same host each find their share of its link. If there is one host only, they find the rate
among themselves. After a pause a shaped link (the lab's, or a cloud's) lets a burst pass for free.
So each size begins with messages that are not counted, and the large sizes decide the rate. A train
of messages after a pause shows the size of the burst, because it arrives too early. Ranks agree on
the slowest rank's figures, so that all return the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from shoal.contracts.comm import Comm
from shoal.core.facts import Link
from shoal.profiling.fit import fit_line
from shoal.profiling.processor import ProcessorTime

SIZES = (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_BURST = 1 << 18  # bytes: more than the free burst after a pause
# bytes of a message, messages in a train, and trains, each after a pause
_CAR, _TRAIN, _TRAINS = 1 << 16, 8, 3
_PAUSE_S, _LONGEST_S = 0.05, 0.5  # seconds of one pause, and of all trains
# groups, and the most messages in one: they are timed together, because messages clump. The median
# group counts.
_GROUPS, _MOST_IN_GROUP = 9, 16
# fewest groups, and seconds of each, that are enough if the groups differ by no more than this
# share
_FEWEST, _QUICK_S, _AGREE = 3, 0.1, 0.05
# a trial: its seconds, the least and the most bytes of a message, and the number of messages
_TRIAL_S, _TRIAL_BYTES, _TRIALS = 0.02, (1 << 16, 1 << 22), 3
# limit on how many times as fast or slow a link may be as an earlier start measured it
_ALIKE = 1.7


_TRYING = "trying the links"


def probe_link(
    comm: Comm, *, sharing: int = 1, sizes: Sequence[int] = SIZES, budget_s: float = 2.0
) -> Link:
    """Measure the rate from one rank to the others while all ranks send.

    Args:
        comm: the ranks, all of which call this at once.
        sharing: how many of them run on this rank's machine.
        sizes: bytes of a message, at least two sizes. On a slow link the largest are left out.
        budget_s: about how long it may take, at most twice that. A third is enough if messages of
            one size take equally long.

    Returns:
        The same link on every rank, with a burst up to half a megabyte. `cpu_s_per_byte` is the
        whole process's: if ranks are threads, it counts them all. With one rank there is nothing
        to measure: no latency, no limit. If one host holds more than half of the ranks, some of
        them must send within it, and the measured share of the others is too large.
    """
    if comm.size == 1:
        return Link(latency_s=0.0, bytes_per_s=math.inf)
    end = time.perf_counter() + budget_s
    seconds: dict[int, float] = {}
    cpu_s_per_byte = 0.0
    ordered = sorted(sizes)
    for index, size in enumerate(ordered):
        left_s = min(comm.gather_objects(end - time.perf_counter(), "measuring the links"))
        if len(seconds) >= 2:
            latency_s, s_per_byte = fit_line(seconds)
            if 2 * (latency_s + s_per_byte * size) > left_s:  # one to warm up, one to measure
                break
        seconds[size], cpu_s_per_byte = _time_messages(
            comm, size, left_s / (len(ordered) - index), sharing
        )
    latency_s, s_per_byte = fit_line(seconds)
    link = Link(latency_s, 1 / max(s_per_byte, 1e-13), cpu_s_per_byte)
    return replace(
        link,
        burst_bytes=_burst(comm, link, seconds.get(_CAR, link.latency_s + _CAR / link.bytes_per_s)),
    )


def probe_now(comm: Comm, link: Link) -> float:
    """Measure by a few messages the rate that the slowest rank has now (a collective).

    The trial takes about 0.1 s and is less exact than `probe_link`. Compare it with another trial
    only.

    Args:
        comm: the ranks, all of which call this at once.
        link: the link as it was measured.

    Returns:
        Bytes a second, the same on every rank.
    """
    least, most = _TRIAL_BYTES
    nbytes = int(min(max(link.bytes_per_s * _TRIAL_S, link.burst_bytes, least), most))
    shift = _shifter(comm, nbytes)
    comm.gather_objects(None, _TRYING)
    shift(1)  # a warm-up, because the first message may profit from the pause before
    best_s = min(shift(1) for _ in range(_TRIALS))
    sent_s = max(best_s - link.latency_s, best_s / 2)
    found: list[float] = comm.gather_objects(nbytes / max(sent_s, 1e-9), _TRYING)
    return min(found)


def is_as_before(link: Link, now: float) -> bool:
    """Return whether a link carries about as much `now` as in the trial when it was measured.

    Examples:
        >>> link = Link(1e-4, 125e6, tried=110e6)
        >>> is_as_before(link, 100e6), is_as_before(link, 12e6)
        (True, False)
    """
    return 1 / _ALIKE <= now / link.tried <= _ALIKE


def _burst(comm: Comm, link: Link, steady_s: float) -> float:
    """Return the bytes that pass for free after a pause.

    A train of messages after a pause is through sooner than the same messages at `steady_s` each.
    The time saved gives the bytes.
    """
    if _TRAINS * _TRAIN * steady_s > _LONGEST_S:
        return 0.0
    shift = _shifter(comm, _CAR)
    found = []
    for _ in range(_TRAINS):
        comm.gather_objects(None, "measuring the links")
        time.sleep(_PAUSE_S)
        found.append(_TRAIN * (steady_s - shift(_TRAIN)) * link.bytes_per_s)
    least: float = min(comm.gather_objects(min(found), "measuring the links"))
    return max(0.0, least)


def _time_messages(comm: Comm, size: int, allowed_s: float, sharing: int) -> tuple[float, float]:
    """Return (seconds a message, processor seconds a byte) for one size, without pauses."""
    shift = _shifter(comm, size)
    warm_up = max(1, min(_BURST // size, 4 * _MOST_IN_GROUP))
    one_s = max(comm.gather_objects(shift(warm_up), "measuring the links"))
    in_group = max(1, min(int(allowed_s / one_s / _GROUPS), _MOST_IN_GROUP))
    groups = max(1, min(int(allowed_s / one_s / in_group), _GROUPS))
    quick = max(1, min(in_group, math.ceil(_QUICK_S / one_s)))
    cpu_start = ProcessorTime.now()
    # a warm-up, because the first group may profit from the pause before
    timed = [shift(quick) for _ in range(min(_FEWEST, groups))]
    count = len(timed) * quick
    apart = max(comm.gather_objects(max(timed) / min(timed) - 1, "measuring the links"))
    if apart > _AGREE:
        cpu_start = ProcessorTime.now()
        timed, count = [shift(in_group) for _ in range(groups)], groups * in_group
    message_s = median(timed)
    cpu_s_per_byte = ProcessorTime.now().since(cpu_start, sharing) / (count * size)
    ranks = comm.gather_objects((message_s, cpu_s_per_byte), "measuring the links")
    return max(seconds for seconds, _ in ranks), max(cpu for _, cpu in ranks)


def _shifter(comm: Comm, size: int) -> Callable[[int], float]:
    """Return a function that sends and receives some messages of this size: seconds of each."""
    source, to = _partners(comm)
    outgoing = torch.zeros(size, dtype=torch.uint8, device="cpu")
    incoming = torch.empty_like(outgoing)

    def all_of_them(messages: int) -> float:
        start = time.perf_counter()
        for _ in range(messages):
            received = comm.receive(incoming, source)
            sent = comm.send(outgoing, to)
            received.wait()
            sent.wait()
        return (time.perf_counter() - start) / messages

    def shift(messages: int) -> float:
        return comm.beside(partial(all_of_them, messages))

    return shift


def _partners(comm: Comm) -> tuple[int, int]:
    """Return the ranks to receive from and to send to: a ring whose step is the largest host."""
    ring = [rank for ranks in comm.topology.ranks_on.values() for rank in ranks]
    place, away = ring.index(comm.rank), comm.topology.ranks_per_host % comm.size or 1
    return ring[place - away], ring[(place + away) % comm.size]
