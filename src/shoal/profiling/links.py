"""Measures the links: latency, rate and processor cost of a byte.

Every rank sends to another host and receives from one, all at once, back to back. So ranks that
share a host each find their share of its link; on one host alone they find what they can send each
other. After a pause a shaped link (the lab's, or a cloud's) lets a burst pass for free, so each
size begins with messages that are not counted, and the large ones decide the rate; how much it is,
a train of messages after a pause tells by how much too early it comes. What the ranks agree on is
the slowest rank's, so that all go on alike and return the same.
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
_BURST = 1 << 18  # bytes: what may pass for free after a pause, and some more
_CAR, _TRAIN, _TRAINS = 1 << 16, 8, 3  # bytes of a message; so many after each of so many pauses
_PAUSE_S, _LONGEST_S = 0.05, 0.5  # of a pause; of all trains
# of messages timed together, so that clumps even out; the median group counts
_GROUPS, _MOST_IN_GROUP = 9, 16
# groups, of so many seconds, that are enough where they differ by no more than so much
_FEWEST, _QUICK_S, _AGREE = 3, 0.1, 0.05
# a trial: seconds, and bytes, of one of so many messages
_TRIAL_S, _TRIAL_BYTES, _TRIALS = 0.02, (1 << 16, 1 << 22), 3
_ALIKE = 1.7  # times as fast, or as slow: what a link may be that was measured before


_TRYING = "trying the links"


def probe_link(
    comm: Comm, *, sharing: int = 1, sizes: Sequence[int] = SIZES, budget_s: float = 2.0
) -> Link:
    """Measure what one rank's way to the others carries while all of them use theirs.

    Args:
        comm: the ranks, all of which call this at once.
        sharing: how many of them run on this rank's machine.
        sizes: bytes of a message, at least two of them; on a slow link the largest are left out.
        budget_s: about how long it may take, at most twice that; a third where messages of each
            size take as long as one another.

    Returns:
        The same link on every rank, with a burst up to half a megabyte. `cpu_s_per_byte` is the
        whole process's: where ranks are threads it counts them all. With one rank there is nothing
        to measure: no latency, no limit. Where one host holds more than half of the ranks, some of
        them must send within it, and the share of the others is found larger than it is.
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
    """What the slowest rank's way to the others carries now, by a few messages (a collective).

    Not as exact as `probe_link`, and done in about 0.1 s. Compare it with another trial only.

    Args:
        comm: the ranks, all of which call this at once.
        link: as it was measured.

    Returns:
        Bytes a second, the same on every rank.
    """
    least, most = _TRIAL_BYTES
    nbytes = int(min(max(link.bytes_per_s * _TRIAL_S, link.burst_bytes, least), most))
    shift = _shifter(comm, nbytes)
    comm.gather_objects(None, _TRYING)
    shift(1)  # which may profit from the pause before
    best_s = min(shift(1) for _ in range(_TRIALS))
    sent_s = max(best_s - link.latency_s, best_s / 2)
    found: list[float] = comm.gather_objects(nbytes / max(sent_s, 1e-9), _TRYING)
    return min(found)


def is_as_before(link: Link, now: float) -> bool:
    """Whether a link that was tried as it was measured carries about as much `now`.

    Examples:
        >>> link = Link(1e-4, 125e6, tried=110e6)
        >>> is_as_before(link, 100e6), is_as_before(link, 12e6)
        (True, False)
    """
    return 1 / _ALIKE <= now / link.tried <= _ALIKE


def _burst(comm: Comm, link: Link, steady_s: float) -> float:
    """Bytes that pass for free after a pause: by how much sooner a train of messages is through
    than its cars were that took `steady_s` each."""
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
    """(seconds a message, processor seconds a byte) of messages of one size, back to back."""
    shift = _shifter(comm, size)
    warm_up = max(1, min(_BURST // size, 4 * _MOST_IN_GROUP))
    one_s = max(comm.gather_objects(shift(warm_up), "measuring the links"))
    in_group = max(1, min(int(allowed_s / one_s / _GROUPS), _MOST_IN_GROUP))
    groups = max(1, min(int(allowed_s / one_s / in_group), _GROUPS))
    quick = max(1, min(in_group, math.ceil(_QUICK_S / one_s)))
    cpu_start = ProcessorTime.now()
    # the first one may profit from the pause
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
    """What sends some messages of this size, and receives as many: seconds of each."""
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
    """Whom this rank receives from and sends to: in a ring of hosts, the largest host away."""
    ring = [rank for ranks in comm.topology.ranks_on.values() for rank in ranks]
    place, away = ring.index(comm.rank), comm.topology.ranks_per_host % comm.size or 1
    return ring[place - away], ring[(place + away) % comm.size]
