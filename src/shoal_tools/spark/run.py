"""`run`, on the driver. It checks arguments, columns and free cores before anything starts."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa

from shoal.contracts.launcher import roles
from shoal.core import errors
from shoal.core.errors import ShoalError, UsageError, WorldError
from shoal.core.numbers import is_count, is_positive
from shoal_tools.launch.cluster import BarrierStage, check_slots
from shoal_tools.spark.job import Start, TaskOutcome, Work
from shoal_tools.spark.pickles import dumps, loads
from shoal_tools.spark.rows import no_rows
from shoal_tools.spark.task import SCHEMA, task_of

T = TypeVar("T")
# errors that report another rank; the error of that rank itself says more
_OF_OTHERS = [kind.__name__ for kind in (errors.PeerLost, errors.MissingRank)]
_RANK = "shoal rank"  # a column that says which rank a row goes to


def run(
    fn: Callable[..., T],
    df: Any,
    *,
    num_ranks: int,
    num_servers: int = 0,
    num_tail: int = 0,
    batch_size: int = 32,
    epochs: int = 1,
    columns: Sequence[str] | None = None,
    to_batch: Callable[[dict[str, Any]], Any] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    repartition: bool = True,
    validation: str = "",
    start_timeout_s: float = 60.0,
) -> list[T]:
    """Call a function on every rank, each in a task of one barrier stage, with a loader of `df`.

    Inside it `shoal.init()` has been called. The loader is sharded already: each row comes once an
    epoch, on one of the ranks, and every rank makes as many steps. Every rank iterates over it. The
    first pass reads rows as Spark sends them. For later ones they are kept on the executor's local
    disk.

    Args:
        fn: a function of the loader. It is sent to the executors, and its result comes back.
        df: a Spark DataFrame.
        num_ranks: number of ranks that train. Their tasks run at once, so each needs a free core.
        num_servers: number of further tasks for servers (strategy "server"). They do not call `fn`.
        num_tail: number of further tasks for the end of the model (strategy "stage"). They call
            `fn` with one batch, and begin to serve when it calls `parallelize`.
        batch_size: rows of each rank in a step.
        epochs: number of passes that `fn` makes. With 1 nothing is written to disk.
        columns: names of the columns to send; by default all.
        to_batch: a function that takes the columns of a batch, as `{"x": tensor}`, and makes the
            loader's batch of them. By default the dict itself is the batch.
        shuffle: whether rows are shuffled on each rank, anew in every epoch.
        seed: seed of the shuffle.
        repartition: whether rows are first spread evenly over the ranks, and put in an order that
            follows from them and the seed. If False, each rank reads one partition as it is,
            whatever its size, and the DataFrame must have as many partitions as there are ranks.
        validation: the name of a column of truth values. Rows where it is true are not trained on:
            `fn` takes a second loader, which gives these rows in each pass. They are kept on disk.
        start_timeout_s: seconds to wait for every rank to start.

    Returns:
        The results of `fn` on the ranks that train, in the order of ranks.

    Raises:
        UsageError: there are more ranks than free cores, a column is missing, there are no rows, or
            a rank raised it.
        WorldError: a rank was lost, or `fn` raised an error that is not Shoal's.
    """
    work = Work(
        fn, batch_size, epochs, to_batch, shuffle, seed, start_timeout_s, validation=validation
    )
    _check(work, num_ranks, num_servers, num_tail)
    frame, spark = arrays(_mark(df, columns, validation)), df.sparkSession
    pickled = dumps(work, "fn")
    num_others = num_servers + num_tail
    num_tasks = num_ranks + num_others
    beside = f", num_servers={num_servers}, num_tail={num_tail}" if num_others else ""
    check_slots(spark, num_tasks, f"num_ranks={num_ranks}{beside}")
    if num_tail:
        pickled = dumps(replace(work, sample=_sample(frame, batch_size)), "fn")
    frame = _split(frame, num_ranks, num_others, repartition, work)
    start = Start(pickled, secrets.token_hex(16), roles(num_servers, num_tail))
    stage = frame.mapInArrow(task_of(start), SCHEMA, barrier=True)
    stage = stage.repartition(1)  # Spark restarts a barrier stage only if it is not the last one
    rows = BarrierStage(spark, num_tasks).run(stage.collect)
    outcomes = sorted((TaskOutcome(**row.asDict()) for row in rows), key=lambda each: each.rank)
    raise_first(outcomes)
    if len(outcomes) < num_tasks:  # Spark has seen that there is nothing to do
        raise no_rows()
    results = (loads(bytes(each.result), "a rank's result") for each in outcomes[:num_ranks])
    return list(results)


def raise_first(outcomes: Iterable[TaskOutcome]) -> None:
    """Raise the error that caused the others: one that does not report the loss of another rank."""
    failed = [outcome for outcome in outcomes if outcome.kind]
    if not failed:
        return
    first = min(failed, key=lambda each: (each.kind in _OF_OTHERS, each.rank))
    kind = getattr(errors, first.kind, None)
    error: ShoalError
    if isinstance(kind, type) and issubclass(kind, ShoalError):
        where = "; ".join(filter(None, (first.where, first.executor)))
        parts = {"got": first.got, "expected": first.expected, "do": first.do}
        error = kind(first.what, where=where, rank=first.rank, **parts)
    else:
        error = WorldError(
            "the function failed on a rank",
            where=first.executor,
            got=first.what,
            do="see where it was raised there, below",
            rank=first.rank,
        )
    error.add_note(f"On that rank:\n{first.trace.rstrip()}")
    raise error


def _check(work: Work, num_ranks: int, num_servers: int, num_tail: int) -> None:
    for name, value in {"num_servers": num_servers, "num_tail": num_tail}.items():
        if not is_count(value) or value < 0:
            raise UsageError(f"{name} is a whole number, 0 or more", got=repr(value)[:80])
    counts = {"num_ranks": num_ranks, "batch_size": work.batch_size, "epochs": work.epochs}
    for name, value in counts.items():
        if not is_count(value) or value < 1:
            raise UsageError(f"{name} is a whole number, 1 or more", got=repr(value)[:80])
    if not is_positive(work.timeout_s, 1e6):
        raise UsageError("start_timeout_s is more than 0 s", got=repr(work.timeout_s)[:80])


def select_columns(df: Any, columns: Sequence[str] | None) -> Any:
    """These columns of a DataFrame.

    Raises:
        UsageError: it is no DataFrame, or lacks a column.
    """
    if not (hasattr(df, "mapInArrow") and hasattr(df.sparkSession, "sparkContext")):
        raise UsageError(
            "run takes a DataFrame of a Spark session in this process",
            got=type(df).__name__,
            expected="pyspark.sql.DataFrame, and not over Spark Connect",
        )
    missing = [name for name in columns or () if name not in df.columns]
    if missing:
        raise UsageError(
            "the DataFrame has no such column",
            got=", ".join(map(repr, missing)),
            expected="of " + ", ".join(map(repr, df.columns)),
            do="correct the name",
        )
    return df if columns is None else df.select(*columns)


def _mark(df: Any, columns: Sequence[str] | None, validation: str) -> Any:
    """Select these columns, and the one that marks rows, in which a null counts as false."""
    if not validation:
        return select_columns(df, columns)
    sent = None if columns is None else list(dict.fromkeys([*columns, validation]))
    frame = select_columns(df, [validation] if sent is None else sent)
    kind = frame.schema[validation].dataType.simpleString()
    if kind != "boolean":
        raise UsageError(
            "the column that marks rows to validate with has no truth values",
            got=f"{validation!r}, of {kind}",
            expected="boolean",
            do=f'df.withColumn("{validation}", a condition)',
        )
    functions = importlib.import_module("pyspark.sql.functions")
    frame = df if sent is None else frame
    is_marked = functions.coalesce(frame[validation], functions.lit(False))
    return frame.withColumn(validation, is_marked)


def arrays(df: Any) -> Any:
    """Convert columns of Spark ML's vectors to arrays, because Arrow has no type for vectors."""
    names = [field.name for field in df.schema.fields if _is_vector(field)]
    return df.withColumns({name: as_array(df, name) for name in names}) if names else df


def as_array(df: Any, name: str) -> Any:
    """Return a column; if it has Spark ML's vectors, convert them to arrays."""
    if not _is_vector(df.schema[name]):
        return df[name]
    return importlib.import_module("pyspark.ml.functions").vector_to_array(df[name])


def _is_vector(field: Any) -> bool:
    return type(field.dataType).__name__ == "VectorUDT"


def _split(df: Any, num_ranks: int, num_others: int, repartition: bool, work: Work) -> Any:
    """A partition for each rank, and an empty one for each that does not train.

    After a shuffle, rows come in any order. So they are sorted by a hash, which gives the same
    order when the stage starts again. Marked rows come first.
    """
    there = num_ranks if repartition else df.rdd.getNumPartitions()
    if there != num_ranks:
        raise UsageError(
            "without repartition there are as many partitions as ranks",
            got=f"{there} partitions, num_ranks={num_ranks}",
            do=f"num_ranks={there}, or repartition=True",
        )
    functions = importlib.import_module("pyspark.sql.functions")
    order = [functions.desc(work.validation)] if work.validation else []
    if repartition:
        named = [
            each.name for each in df.schema.fields if "map<" not in each.dataType.simpleString()
        ]
        order.append(functions.xxhash64(functions.lit(work.seed), *(df[name] for name in named)))
        df = df.repartition(num_ranks)
    if num_others:  # one more shuffle: a stage has as many partitions as tasks
        df = df.withColumn(_RANK, functions.spark_partition_id())
        df = df.repartitionById(num_ranks + num_others, _RANK).drop(_RANK)
    return df.sortWithinPartitions(*order) if order else df


def _sample(df: Any, num_rows: int) -> bytes:
    """Return the first rows as an Arrow stream."""
    table = df.limit(num_rows).toArrow()
    if not len(table):
        raise no_rows()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
