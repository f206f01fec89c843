"""One task of the barrier stage: it starts its rank's process, feeds it, and reports its outcome.

An error in the function is an outcome, which the driver reads, because running the function again
would not help. If the process was killed, the task fails, so that Spark starts the whole stage
again.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from shoal.contracts.launcher import TOKEN
from shoal_tools.launch.executor_rank import ExecutorRank, rank_of_task
from shoal_tools.spark.job import OUTCOME, ROWS, WORK, Start, TaskOutcome

_TEXTS = ("executor", "kind", "what", "where", "got", "expected", "do", "trace")
_TYPES = {"rank": pa.int32(), **dict.fromkeys(_TEXTS, pa.string()), "result": pa.binary()}
SCHEMA = ", ".join(["rank int", *(f"`{name}` string" for name in _TEXTS), "result binary"])


def task_of(start: Start) -> Any:
    """Return the function that Spark calls in each task, with its partition as Arrow batches."""

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        outcome = hold(start, batches)
        values = asdict(outcome)
        arrays = [pa.array([values[name]], kind) for name, kind in _TYPES.items()]
        yield pa.RecordBatch.from_arrays(arrays, names=list(_TYPES))

    return task


def hold(start: Start, batches: Iterable[Any]) -> TaskOutcome:
    """Run this task's rank to its end.

    Raises:
        PeerLost: the rank's process was killed.
    """
    with rank_of_task() as rank:
        (rank.folder / WORK).write_bytes(start.work)
        code = _run(rank, {**start.roles, TOKEN: start.token}, batches)
        if not (rank.folder / OUTCOME).exists():
            raise rank.error(code)
        outcome: TaskOutcome = pickle.loads((rank.folder / OUTCOME).read_bytes())
        return outcome


def _run(rank: ExecutorRank, settings: Mapping[str, str], batches: Iterable[Any]) -> int:
    """Run the rank's process, feed it, and return its exit code."""
    away, here = os.pipe()
    words = (sys.executable, "-m", "shoal_tools.spark.rank", str(rank.folder))
    process = rank.start(
        words,
        {**settings, ROWS: str(away)},
        stdout=sys.stderr.fileno(),
        stderr=None,
        pass_fds=(away,),
    )
    os.close(away)
    with suppress(BrokenPipeError):  # the rank has ended, or reads no more rows
        _feed(here, batches)
    return process.wait()


def _feed(descriptor: int, batches: Iterable[Any]) -> None:
    writer: Any = None
    with os.fdopen(descriptor, "wb") as pipe:
        for batch in batches:
            writer = writer or pa.ipc.new_stream(pipe, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
