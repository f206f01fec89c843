"""Pickle functions and results between driver and ranks, with Spark's own pickler.

Both ends belong to one user, and Spark itself moves pickles between them.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

from shoal.core.errors import UsageError


def dumps(value: Any, what: str) -> bytes:
    """Pickle a value. It may hold functions that are defined in a notebook.

    Raises:
        UsageError: it holds an object that cannot be sent, such as an open file.
    """
    try:
        return bytes(importlib.import_module("pyspark.cloudpickle").dumps(value))
    except Exception as error:  # a user's object may raise anything
        raise UsageError(
            f"{what} cannot be pickled",
            got=f"{type(error).__name__}: {error}",
            do="open files, connections and sessions inside the function; return plain data or "
            "tensors",
        ) from error


def loads(data: bytes, what: str) -> Any:
    """Load a pickled value.

    Raises:
        UsageError: a module that it needs is not here.
    """
    try:
        return pickle.loads(data)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"{what} needs a module that is not here",
            got=str(error),
            do="install it on every executor, or send it: spark.sparkContext.addPyFile(…)",
        ) from error
