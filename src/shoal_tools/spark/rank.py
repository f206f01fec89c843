"""The process of one rank, which a task starts: python -m shoal_tools.spark.rank FOLDER.

It reads the work from the folder and rows as an Arrow stream from the pipe that ROWS names. It
leaves the outcome in the folder. It is a process of its own because Spark keeps its Python workers
for later tasks, and a session lasts as long as its process.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from shoal.core.errors import ShoalError
from shoal.data.sharded import ShardedBatches
from shoal.front.session_start import Served, init, is_tail_host
from shoal.front.shard import shard
from shoal.session.session import current
from shoal_tools.launch.barrier import EXECUTOR
from shoal_tools.spark.batches import columns_of
from shoal_tools.spark.job import OUTCOME, ROWS, WORK, TaskOutcome, Work
from shoal_tools.spark.pickles import dumps, loads
from shoal_tools.spark.rows import RankRows, Split
from shoal_tools.spark.uneven_rows import JointBatches

_KEPT, _MARKED = "rows.arrow", "marked.arrow"


def main(folder: Path) -> None:
    """Run the rank, and leave its outcome in the folder. An error is left there, then raised."""
    rank, executor = int(os.environ["RANK"]), os.environ[EXECUTOR]
    try:
        work = loads((folder / WORK).read_bytes(), "what the driver sent")
        result = dumps(done(work, folder), "what the function returned")
        outcome = TaskOutcome(rank, executor, result=result)
    except BaseException as error:
        _leave(folder, _failure(rank, executor, error))
        raise
    _leave(folder, outcome)


def _failure(rank: int, executor: str, error: BaseException) -> TaskOutcome:
    kind, trace = type(error).__name__, traceback.format_exc()
    if not isinstance(error, ShoalError):
        return TaskOutcome(rank, executor, kind, repr(error), trace=trace)
    return TaskOutcome(
        rank,
        executor,
        kind,
        error.what,
        where=error.where,
        got=error.got,
        expected=error.expected,
        do=error.do,
        trace=trace,
    )


def done(work: Work, folder: Path) -> Any:
    """Join the other ranks and call the function; a server or tail host serves, for None."""
    try:
        init(start_timeout_s=work.timeout_s)
        if is_tail_host(current()):
            return work.fn(_SampleLoader(work), *([None] if work.validation else []))
        return work.fn(*loaders_of(work, _stream(int(os.environ[ROWS])), folder))
    except Served:
        return None


class _SampleLoader:
    """Loader of a tail host, which has no rows: it gives one sample batch for `parallelize`."""

    def __init__(self, work: Work) -> None:
        self._table = pa.ipc.open_stream(work.sample).read_all()
        self._convert = _Convert(work.to_batch)

    def __iter__(self) -> Iterator[Any]:
        yield self._convert(self._table)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, because the batch is the same in every epoch."""


def loaders_of(work: Work, stream: Iterator[Any], folder: Path) -> list[Any]:
    """Make the loader of this rank, and a second one if rows are marked (a collective)."""
    file = folder / _KEPT if work.epochs > 1 else None
    if not work.validation:
        return [loader_of(work, RankRows(stream, file))]
    split = Split(stream, work.validation)
    marked = RankRows(split.marked(), folder / _MARKED)
    marked.keep()
    channel = current().comm.channel("marked rows from Spark")
    convert = _Convert(work.to_batch)
    aside = JointBatches(channel, marked, work.batch_size, None, convert, "rows to validate with")
    return [loader_of(work, RankRows(split.others(), file)), aside]


def loader_of(work: Work, rows: RankRows) -> ShardedBatches[Any]:
    """Make the loader of this rank's rows, in a session (a collective)."""
    convert = _Convert(work.to_batch)
    channel = current().comm.channel("rows from Spark")
    seed = work.seed if work.shuffle else None
    batches = JointBatches(channel, rows, work.batch_size, seed, convert)
    return shard(batches, shards_itself=True)


class _Convert:
    """Converter of tables to batches, with the user's function if there is one."""

    def __init__(self, to_batch: Callable[[dict[str, Any]], Any] | None) -> None:
        self._to_batch = to_batch

    def __call__(self, table: Any) -> Any:
        columns = columns_of(table)
        return columns if self._to_batch is None else self._to_batch(columns)


def _stream(descriptor: int) -> Iterator[Any]:
    """Yield the record batches from the pipe. The pipe is empty if there are no rows."""
    with os.fdopen(descriptor, "rb") as pipe:
        if pipe.peek(1):
            yield from pa.ipc.open_stream(pipe)


def _leave(folder: Path, outcome: TaskOutcome) -> None:
    """Write the outcome to another name and rename it, so that a reader sees it whole."""
    part = folder / f"{OUTCOME}.part"
    part.write_bytes(dumps(outcome, "the outcome"))
    part.rename(folder / OUTCOME)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
