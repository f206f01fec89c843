"""Functions and results between driver and ranks, by Spark's own pickler.

Both ends are one user's, and Spark itself moves pickles between them.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

from shoal.core.errors import UsageError


def dumps(value: Any, what: str) -> bytes:
    """A value as bytes, functions of a notebook too.

    Raises:
        UsageError: it holds what cannot be sent, such as an open file.
    """
    try:
        return bytes(importlib.import_module("pyspark.cloudpickle").dumps(value))
    except Exception as error:  # whatever a user's object raises
        raise UsageError(
            f"{what} cannot be pickled",
            got=f"{type(error).__name__}: {error}",
            do="open files, connections and sessions inside the function; return plain data or "
            "tensors",
        ) from error


def loads(data: bytes, what: str) -> Any:
    """The value again.

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
