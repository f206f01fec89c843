"""Stragglers: the rank or link that keeps others waiting is named in one line, with numbers.

    1  measure   each backward: seconds of a step, seconds without waiting, seconds between steps,
                 and the time that the main thread waited for a processor, and for pages of memory
    2  tell      every three seconds or so each rank sends its medians, during other exchanges
    3  judge     at the next backward, alike on every rank. A rank that computes half as long again
                 as the others is named. If all ranks wait far longer than the plan predicts, links
                 are tried with some messages between neighbours
    4  name      a finding of two judgements in a row is logged on rank 0, once until it is over

This costs two reads of a clock for each backward, and two short messages to every other rank every
three seconds or five backwards, whichever is longer. Guarded by tests/engine/test_stragglers.py; in
the lab: benchmarks/stragglers.py.
"""

from __future__ import annotations

import logging
import math
import resource
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import final

import torch

from shoal.contracts.cadence import Event
from shoal.contracts.comm import Comm
from shoal.core.facts import Topology
from shoal.engine.common_state import exchanged
from shoal.engine.engine import Engine
from shoal.engine.lanes import Errand, Lane

# seconds from one report to the next, and bounds for the number of backwards
_WINDOW_S, _WINDOW = 3.0, (5, 500)
_SLOWER = 1.5  # factor over the others' computing
_LEAST = 0.15  # part of the step below which a delay costs too little to report
_EXPOSED = 2.0  # factor over the predicted wait
_SLOW_LINK = 1 / 3  # part of the rate that was measured
_TIMES = 2  # judgements in a row
_TRIES = 3  # tries of a link, of which the best counts
_REST = 10  # judgements between two trials of links
_TRIAL_S, _TRIAL_BYTES = 0.02, (1 << 18, 1 << 22)  # seconds and bytes of one message
_BUSY, _SWAPS = 0.2, 5.0  # part of the time without a processor; pages read from disk in a step
_LOGGER = logging.getLogger("shoal")


@dataclass(frozen=True)
class StepReport:
    """Report of a rank on its steps: medians of seconds, and possible causes."""

    step_s: float
    own_s: float  # seconds without waiting for others
    between_s: float  # seconds from the end of a backward to the next forward
    queued: float  # part of the time in which it could compute, but had no processor
    pages: float  # pages read from disk in a step
    expected_s: float  # predicted seconds of communication that nothing hides

    @property
    def waited_s(self) -> float:
        """Seconds that it waits for others, or for links."""
        return max(0.0, self.step_s - self.own_s)

    @property
    def cause(self) -> str:
        """Reason why it is slow, as far as it is visible."""
        if self.pages > _SWAPS:
            return f"it swaps: {self.pages:.0f} pages a step come from disk"
        if self.queued > _BUSY:
            return (
                f"its processors are busy: {self.queued:.0%} of the time its main thread waited "
                "for one"
            )
        if self.between_s > self.own_s / 2:
            return f"{_ms(self.between_s)} of it pass between steps: data, or the program itself"
        return "a slower or throttled processor, or more rows"


@final
class Stragglers:
    """Stragglers among the ranks of one model, as one rank finds them.

    Args:
        engine: the engine with the events to listen to.
        lane: the lane for the reports.
        topology: the ranks and their hosts.
        expected_s: predicted seconds a step of communication that nothing hides.
        bytes_per_s: rate of a link, as measured.
        clock: clock of the main thread; by default the real one.
    """

    def __init__(
        self,
        engine: Engine,
        lane: Lane,
        topology: Topology,
        expected_s: float,
        bytes_per_s: float,
        clock: MainThreadClock | None = None,
    ) -> None:
        self._routes, self._lane, self._topology = engine.routes, lane, topology
        self._expected_s, self._bytes_per_s = expected_s, bytes_per_s
        self._window = _WINDOW[0]  # used until the length of steps is known
        self._clock = MainThreadClock() if clock is None else clock
        self._told: tuple[Errand, list[list[float]]] | None = None
        self._times: Counter[str] = Counter()  # judgements in a row, by subject
        self._named: set[str] = set()
        self._rest = 0
        self._waits: dict[str, float] = {}  # waits of the main thread, at the last report
        # longest wait in a step since the last report
        self._longest: tuple[str, float] | None = None
        engine.listen(Event.FORWARD_ENTERED, self._clock.forward)
        engine.listen(Event.BACKWARD_ENDED, self.on_backward_end)

    def on_backward_end(self) -> None:
        """Measure, and report or judge if it is time."""
        if self._told is not None:
            errand, told = self._told
            self._told = None
            errand.wait(errand.purpose)
            self._judge([StepReport(*report) for report in told])
        self._clock.backward(self._routes.waited_s())
        if self._clock.steps >= self._window:
            waits = self._routes.waits()
            self._longest = longest_wait(self._waits, waits, self._clock.steps)
            self._waits = waits
            own = [*self._clock.medians(), self._expected_s]
            found: list[list[float]] = []

            def tell(comm: Comm) -> None:
                found.extend(exchanged(comm, own))

            self._told = self._lane.run(tell, "telling how long steps take"), found

    def _judge(self, seen: Sequence[StepReport]) -> None:
        found = slow_ranks(seen, self._topology)
        self._rest = max(0, self._rest - 1)
        self._window = window_of(max(report.step_s for report in seen))
        if links_are_late(seen):
            self._times["links"] += 1
            if self._times["links"] >= _TIMES and not self._rest:
                self._rest = _REST
                found |= self._slow_links(seen)
        else:
            self._times["links"] = 0
        for subject in found:
            self._times[subject] += 1
        for subject in [w for w in self._times if w != "links" and w not in found]:
            del self._times[subject]
            if not subject.startswith("link"):
                self._named.discard(subject)
        for subject, line in found.items():
            is_sure = self._times[subject] >= _TIMES or subject.startswith("link")
            if is_sure and subject not in self._named:
                self._named.add(subject)
                if self._lane.rank == 0:
                    _LOGGER.warning(line)

    def _slow_links(self, seen: Sequence[StepReport]) -> dict[str, str]:
        """Try the links now (a collective), and name a slow one."""
        rates: list[float] = []
        nbytes = int(min(max(self._bytes_per_s * _TRIAL_S, _TRIAL_BYTES[0]), _TRIAL_BYTES[1]))

        def try_links(comm: Comm) -> None:
            rates.extend(rate for (rate,) in exchanged(comm, [_rate_from_left(comm, nbytes)]))

        self._lane.run(try_links, "trying links").wait("trying links")
        where = slow_link(rates, self._bytes_per_s, self._topology)
        if where is None:
            return {}
        waited_s = min(report.waited_s for report in seen)
        step_s = max(report.step_s for report in seen)
        mostly = ""
        if self._longest is not None:
            label, longest_s = self._longest
            mostly = f", rank 0 {_ms(longest_s)} of it for {label}"
        line = (
            f"shoal: the link {where} carries {_mbit(min(rates))}, and carried "
            f"{_mbit(self._bytes_per_s)} when it was measured. Every rank waits "
            f"{_ms(waited_s)} of a step of {_ms(step_s)} for exchanges{mostly}; "
            f"{_ms(seen[0].expected_s)} were predicted. Look at its cable, its switch and what "
            "else it carries; or call parallelize again, which plans for it"
        )
        return {f"link {where}": line}


def longest_wait(
    before: Mapping[str, float], after: Mapping[str, float], steps: int
) -> tuple[str, float] | None:
    """Return the longest wait between two looks, with its seconds in a step."""
    waits = {label: seconds - before.get(label, 0.0) for label, seconds in after.items()}
    label = max(waits, key=lambda each: waits[each], default=None)
    return None if label is None or waits[label] <= 0 else (label, waits[label] / steps)


def window_of(step_s: float) -> int:
    """Return the backwards from one report to the next, for steps of so many seconds."""
    fewest, most = _WINDOW
    return most if step_s <= 0 else min(max(math.ceil(_WINDOW_S / step_s), fewest), most)


def slow_ranks(seen: Sequence[StepReport], topology: Topology) -> dict[str, str]:
    """Return the ranks that compute far longer than the others, each with a line to log."""
    found = {}
    for rank, own in enumerate(seen):
        others = [report for other, report in enumerate(seen) if other != rank]
        if not others:
            continue
        usual_s = median(report.own_s for report in others)
        if own.own_s > _SLOWER * usual_s and own.own_s - usual_s > _LEAST * own.step_s:
            host = topology.hosts[rank]
            found[f"rank {rank}"] = (
                f"shoal: rank {rank} (host {host}) takes {_ms(own.own_s)} a step, the others "
                f"{_ms(usual_s)}, and all wait for it. Likely cause: {own.cause}. Where it lasts: "
                'shoal.shard(loader, batch="global", shares="speed") gives it fewer rows'
            )
    return found


def links_are_late(seen: Sequence[StepReport]) -> bool:
    """Return whether every rank waits far longer than predicted, so that no rank's computing is the
    cause.
    """
    waited_s = min(report.waited_s for report in seen)
    step_s = max(report.step_s for report in seen)
    return waited_s > max(_EXPOSED * seen[0].expected_s, _LEAST * step_s)


def slow_link(rates: Sequence[float], usual: float, topology: Topology) -> str | None:
    """Name a link that is far slower than usual, given each rank's rate from the rank before it."""
    ranks, hosts = len(rates), topology.hosts
    slow = [
        (hosts[(rank - 1) % ranks], hosts[rank])
        for rank, rate in enumerate(rates)
        if rate < _SLOW_LINK * usual and hosts[(rank - 1) % ranks] != hosts[rank]
    ]
    if not slow:
        return None
    pairs = {frozenset(pair) for pair in slow}
    if len(pairs) == 1:
        return f"between hosts {slow[0][0]} and {slow[0][1]}"
    times = Counter(host for pair in pairs for host in pair)
    (first, most), (_, second) = times.most_common(2)
    if most > second:
        return f"of host {first}"
    return f"between hosts {', '.join(sorted(times))}"


def _rate_from_left(comm: Comm, nbytes: int) -> float:
    """Return the bytes a second from the rank before, while all ranks send: the best of some
    tries.
    """
    ranks = comm.workers
    left, right = (comm.rank - 1) % ranks, (comm.rank + 1) % ranks
    sent = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    received = torch.empty_like(sent)
    best_s = float("inf")
    for _ in range(_TRIES):
        exchanged(comm, [0.0])  # makes all ranks begin at once
        begin_s = time.perf_counter()
        coming = comm.receive(received, left)
        going = comm.send(sent, right)
        coming.wait()
        best_s = min(best_s, time.perf_counter() - begin_s)
        going.wait()
    return nbytes / max(best_s, 1e-9)


class MainThreadClock:
    """Clock of this rank's main thread: its use of time since the last medians."""

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        self._ended_s: float | None = None  # end of the last backward, by perf_counter
        self._forward_s: float | None = None  # start of the first forward after it
        self._waited_s = 0.0
        self._steps: list[tuple[float, float, float]] = []
        self._since = self._spending()

    @property
    def steps(self) -> int:
        """Number of measured steps."""
        return len(self._steps)

    def forward(self) -> None:
        """Note that the model is called."""
        if self._forward_s is None:
            self._forward_s = time.perf_counter()

    def backward(self, waited_s: float) -> None:
        """Note that a backward has ended.

        `waited_s` is the main thread's total waiting time so far.
        """
        now_s = time.perf_counter()
        if self._ended_s is None:
            self._since = self._spending()
        else:
            step_s, waited = now_s - self._ended_s, waited_s - self._waited_s
            between_s = (self._forward_s or now_s) - self._ended_s
            self._steps.append((step_s, max(0.0, step_s - waited), between_s))
        self._ended_s, self._forward_s, self._waited_s = now_s, None, waited_s

    def medians(self) -> list[float]:
        """Return medians of the steps since the last call: step, own, between; then queued, and
        pages a step.
        """
        medians = [median(column) for column in zip(*self._steps, strict=True)]
        now, before, steps = self._spending(), self._since, len(self._steps)
        wall_s = max(now[0] - before[0], 1e-9)
        queued, pages = (now[1] - before[1]) / wall_s, (now[2] - before[2]) / steps
        self._since = now
        self._steps.clear()
        return [*medians, queued, pages]

    def _spending(self) -> tuple[float, float, float]:
        """Return the time, the seconds without a processor, and the pages read from disk, all up to
        now.
        """
        pages = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return time.perf_counter(), _queued_s(self._thread), float(pages)


def _queued_s(thread: int) -> float:
    """Return the seconds that a thread could compute and had no processor; 0 if unknown."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-6:,.0f} Mbit/s"
