"""Bytes on a host's network interfaces while a trace is recorded, by the kernel's own counters.

Linux only: on other systems nothing is recorded. A shaped interface counts bytes after the shaper.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.core.trace import LinkRate, Recorder

_COUNTERS = Path("/proc/net/dev")
_EACH_S = 0.002
_RECEIVED, _SENT = 0, 8  # columns of an interface's counters


def carried() -> dict[str, int]:
    """Return the bytes that each interface has received and sent until now."""
    try:
        lines = _COUNTERS.read_text().splitlines()[2:]
    except OSError:
        return {}
    counts = {
        name.strip(): numbers.split()
        for name, _, numbers in (line.partition(":") for line in lines)
    }
    ways = {"sent": _SENT, "received": _RECEIVED}
    return {
        f"{name}, {way}": int(counts_of_link[column])
        for name, counts_of_link in counts.items()
        for way, column in ways.items()
    }


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Record every few milliseconds the traffic of each interface, from a separate thread."""
    ended = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(recorder, ended), name="shoal-interfaces", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(recorder: Recorder, ended: threading.Event) -> None:
    before, then_s, told = carried(), time.perf_counter(), dict[str, float]()
    last = False
    while not last:
        last = ended.wait(_EACH_S)
        counts, now_s = carried(), time.perf_counter()
        for link, count in counts.items():
            rate = (count - before.get(link, count)) * 8e-6 / (now_s - then_s)
            if rate != told.get(link, 0.0):
                recorder.rates.append(LinkRate(link, then_s - recorder.start_s, rate))
            told[link] = rate
        before, then_s = counts, now_s
