"""`run`, on the driver: what can be checked there is checked before anything starts."""

from __future__ import annotations

import importlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from shoal.core import errors
from shoal.core.errors import ShoalError, UsageError, WorldError
from shoal.core.numbers import is_count, is_positive
from shoal.integrations.spark.job import Outcome, Start, Work
from shoal.integrations.spark.pickles import dumps, loads
from shoal.integrations.spark.task import SCHEMA, task_of

T = TypeVar("T")
# errors that tell of another rank, which says more
_OF_OTHERS = [kind.__name__ for kind in (errors.PeerLost, errors.MissingRank)]
_SLOTS_WAIT_S = 10.0  # for executors that are still starting


def run(
    fn: Callable[[Any], T],
    df: Any,
    *,
    num_ranks: int,
    batch_size: int = 32,
    epochs: int = 1,
    columns: Sequence[str] | None = None,
    to_batch: Callable[[dict[str, Any]], Any] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    repartition: bool = True,
    start_timeout_s: float = 60.0,
) -> list[T]:
    """Call a function on every rank, each in a task of one barrier stage, with a loader of `df`.

    Inside it `shoal.init()` has been called. The loader is sharded already: each row comes once an
    epoch, on one of the ranks, and every rank makes as many steps. Every rank iterates over it. The
    first pass reads rows as Spark sends them. For later ones they are kept on the executor's local
    disk.

    Args:
        fn: a function of the loader, which is sent to the executors. What it returns comes back.
        df: a Spark DataFrame.
        num_ranks: as many tasks run at once, so as many free cores are needed.
        batch_size: rows of each rank in a step.
        epochs: how many passes `fn` makes. With 1 nothing is written to disk.
        columns: those to send, by default all.
        to_batch: a function of a batch by column, as `{"x": tensor}`, that makes what the loader
            gives. By default that itself.
        shuffle: whether rows are shuffled on each rank, anew in every epoch.
        seed: of that order.
        repartition: whether rows are spread evenly over the ranks first, and put in an order that
            follows from them and the seed. Without, each rank has one partition, whatever its size,
            as it is, and there must be as many of those as ranks.
        start_timeout_s: seconds to wait for every rank to start.

    Returns:
        What `fn` returned, by rank.

    Raises:
        UsageError: more ranks than free cores, a missing column, or an error of a rank.
        WorldError: a rank was lost, or `fn` raised an error that is not Shoal's.
    """
    work = Work(fn, batch_size, epochs, to_batch, shuffle, seed, start_timeout_s)
    _check(work, num_ranks)
    frame = arrays(selected(df, columns))
    pickled = dumps(work, "fn")
    _check_slots(df.sparkSession, num_ranks)
    frame = _parted(frame, num_ranks, repartition, seed)
    start = Start(pickled, secrets.token_hex(16))
    stage = frame.mapInArrow(task_of(start), SCHEMA, barrier=True)
    stage = stage.repartition(1)  # Spark restarts a barrier stage only if it is not the last one
    outcomes = [Outcome(**row.asDict()) for row in _collected(stage)]
    outcomes.sort(key=lambda outcome: outcome.rank)
    raise_first(outcomes)
    return [loads(bytes(outcome.result), "a rank's result") for outcome in outcomes]


def raise_first(outcomes: Iterable[Outcome]) -> None:
    """Raise the error that came first, by what ranks tell: one that tells of no other rank."""
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


def _check(work: Work, num_ranks: int) -> None:
    counts = {"num_ranks": num_ranks, "batch_size": work.batch_size, "epochs": work.epochs}
    for name, value in counts.items():
        if not is_count(value) or value < 1:
            raise UsageError(f"{name} is a whole number, 1 or more", got=repr(value)[:80])
    if not is_positive(work.timeout_s, 1e6):
        raise UsageError("start_timeout_s is more than 0 s", got=repr(work.timeout_s)[:80])


def selected(df: Any, columns: Sequence[str] | None) -> Any:
    """These columns of a DataFrame.

    Raises:
        UsageError: it is none, or lacks one.
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


def arrays(df: Any) -> Any:
    """A DataFrame with Spark ML's vectors as arrays, which Arrow has a type for."""
    names = [field.name for field in df.schema.fields if _is_vector(field)]
    return df.withColumns({name: as_array(df, name) for name in names}) if names else df


def as_array(df: Any, name: str) -> Any:
    """A column, of Spark ML's vectors as arrays."""
    if not _is_vector(df.schema[name]):
        return df[name]
    return importlib.import_module("pyspark.ml.functions").vector_to_array(df[name])


def _is_vector(field: Any) -> bool:
    return type(field.dataType).__name__ == "VectorUDT"


def _check_slots(session: Any, num_ranks: int) -> None:
    """Spark itself would look again and again, for ten minutes."""
    context = session.sparkContext
    java = context._jsc.sc()
    profile = java.resourceProfileManager().defaultResourceProfile()
    deadline = time.monotonic() + _SLOTS_WAIT_S
    while (slots := java.maxNumConcurrentTasks(profile)) < num_ranks:
        if time.monotonic() > deadline or context.master.startswith("local"):
            raise UsageError(
                "there are more ranks than tasks that the cluster can run at once",
                where=f"Spark at {context.master}",
                got=f"num_ranks={num_ranks}, {slots} free for tasks of "
                f"{context.getConf().get('spark.task.cpus', '1')} cores",
                do=f"num_ranks={max(slots, 1)}; or more executors, or more cores for each",
            )
        time.sleep(0.5)


def _parted(df: Any, num_ranks: int, repartition: bool, seed: int) -> Any:
    """A partition for each rank. Behind a shuffle rows come in any order: by a hash it is one, the
    same when the stage starts again.
    """
    if repartition:
        functions = importlib.import_module("pyspark.sql.functions")
        names = [
            each.name for each in df.schema.fields if "map<" not in each.dataType.simpleString()
        ]
        order = functions.xxhash64(functions.lit(seed), *(df[name] for name in names))
        return df.repartition(num_ranks).sortWithinPartitions(order)
    there = df.rdd.getNumPartitions()
    if there != num_ranks:
        raise UsageError(
            "without repartition there are as many partitions as ranks",
            got=f"{there} partitions, num_ranks={num_ranks}",
            do=f"num_ranks={there}, or repartition=True",
        )
    return df


def _collected(stage: Any) -> list[Any]:
    try:
        return list(stage.collect())
    except Exception as error:
        if "pyspark" not in type(error).__module__ and "py4j" not in type(error).__module__:
            raise
        raised = [
            line for line in str(error).splitlines() if re.match(r"[\w.]*(Error|Lost): ", line)
        ]
        raise WorldError(
            "Spark gave the stage up",
            got=(raised or str(error).splitlines() or [type(error).__name__])[0].strip()[:300],
            do="look at the executors' stderr; Spark's own words are above. Where a module is "
            "missing there: install shoal[spark] on every executor, and let PYSPARK_PYTHON name "
            "that Python before the session starts",
        ) from error
