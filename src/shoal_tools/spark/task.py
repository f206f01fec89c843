"""One task of the barrier stage: it starts its rank's process, feeds it, and reports its outcome.

An error in the function is an outcome, which the driver reads, because running the function again
would not help. If the process was killed, the task fails, so that Spark starts the whole stage
again.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from shoal.contracts.launcher import TOKEN
from shoal.core.errors import PeerLost
from shoal_tools.launch.barrier import TaskSeat, local_folder, seat_of
from shoal_tools.launch.host_end import POLITE, job_folder
from shoal_tools.launch.processes import DIE_WITH_PARENT
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
    context = importlib.import_module("pyspark").BarrierTaskContext.get()
    with closing(seat_of(context)) as place:
        return _hold(start, batches, place)


def _hold(start: Start, batches: Iterable[Any], place: TaskSeat) -> TaskOutcome:
    settings = {**place.settings, **start.roles, TOKEN: start.token}
    with job_folder(local_folder()) as folder:
        (folder / WORK).write_bytes(start.work)
        code = _run(folder, settings, batches)
        if (folder / OUTCOME).exists():
            outcome: TaskOutcome = pickle.loads((folder / OUTCOME).read_bytes())
            return outcome
    ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    raise PeerLost(
        "the process of a rank ended without a word",
        where=place.executor,
        got=ended,
        do="look at the executor's stderr; SIGKILL is mostly the system's, for want of memory: "
        "raise spark.executor.memoryOverhead, or lower batch_size",
    )


def _run(folder: Path, settings: Mapping[str, str], batches: Iterable[Any]) -> int:
    """Run the rank's process, which ends with this one, and return its exit code."""
    away, here = os.pipe()
    path = os.pathsep.join(each for each in sys.path if each)  # has files from Spark, too
    command = (sys.executable, "-m", "shoal_tools.spark.rank", str(folder))
    process = subprocess.Popen(
        (*DIE_WITH_PARENT, *command) if shutil.which(DIE_WITH_PARENT[0]) else command,
        env={**POLITE, **os.environ, "PYTHONPATH": path, **settings, ROWS: str(away)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        pass_fds=(away,),
    )
    os.close(away)
    try:
        with suppress(BrokenPipeError):  # the rank has ended, or reads no more rows
            _feed(here, batches)
        return process.wait()
    finally:
        process.kill()
        process.wait()


def _feed(descriptor: int, batches: Iterable[Any]) -> None:
    writer: Any = None
    with os.fdopen(descriptor, "wb") as pipe:
        for batch in batches:
            writer = writer or pa.ipc.new_stream(pipe, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
