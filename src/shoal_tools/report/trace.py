"""Events as a Chrome trace, for https://ui.perfetto.dev: a process for each rank and a prediction.

Source: the Trace Event Format, complete events ("ph": "X") and counters ("ph": "C"), in
microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.trace import LinkRate, TraceEvent

_NOTHING: Mapping[str, Sequence[LinkRate]] = {}


def chrome(
    processes: Mapping[str, Sequence[TraceEvent]],
    links: Mapping[str, Sequence[LinkRate]] = _NOTHING,
) -> str:
    """Return the events of every process, by its name, and its links' rates, as JSON text."""
    rows: list[dict[str, Any]] = []
    for pid, (process, events) in enumerate(processes.items()):
        rows.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        threads = {
            thread: tid
            for tid, thread in enumerate(sorted({event.thread for event in events}, reverse=True))
        }
        for thread, tid in threads.items():
            rows.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
            )
        for event in events:
            at, took = event.begin_s * 1e6, (event.end_s - event.begin_s) * 1e6
            tid = threads[event.thread]
            rows.append(
                {"ph": "X", "name": event.what, "pid": pid, "tid": tid, "ts": at, "dur": took}
            )
        for rate in links.get(process, ()):
            carried = {"Mbit/s": round(rate.mbit_per_s, 1)}
            rows.append(
                {"ph": "C", "name": rate.link, "pid": pid, "ts": rate.at_s * 1e6, "args": carried}
            )
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}) + "\n"
