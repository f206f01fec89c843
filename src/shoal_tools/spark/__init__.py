"""Shoal on the executors of a Spark cluster: a function that trains, fed from a DataFrame.

    run             on the driver: checks, and starts a barrier stage with one task a rank
    task            in each task: where ranks meet, a process for the rank, and rows into it
    rank            in that process: the session, the loader, the function
    rows, together  the rows of one rank, and the steps that all ranks make of their rows

    parts           a user's functions: model, loss, optimizer, and the batch they are called with
    training        the training loop that an estimator's ranks run
    trained         a fitted model, which evaluates and transforms rows
    estimator       stages of Spark ML's pipelines

It needs the extra `spark` of this package, and Java 17 or newer.
"""

import importlib
from typing import Any

try:
    from shoal_tools.launch.cluster import session
    from shoal_tools.spark.parts import Parts
    from shoal_tools.spark.run import run
except ImportError as missing:
    from shoal.contracts.versions import install_shoal
    from shoal.core.errors import UsageError

    raise UsageError(
        "shoal.integrations.spark needs packages that are not installed",
        got=str(missing),
        do=f"on the driver and on every executor, {install_shoal('spark')}",
    ) from missing

__all__ = ["Parts", "ShoalEstimator", "ShoalModel", "run", "session"]


def __getattr__(name: str) -> Any:
    """Import the stages when they are first used, because only they need pyspark at once."""
    if name in ("ShoalEstimator", "ShoalModel"):
        return getattr(importlib.import_module("shoal_tools.spark.estimator"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
