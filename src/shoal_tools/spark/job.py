"""The data that driver, task and rank hand each other: the work, its start, its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# environment variable of a rank's process: the file descriptor to read rows from
ROWS = "SHOAL_SPARK_ROWS"
# files in the rank's folder: its work, and its outcome
WORK, OUTCOME = "work", "outcome"


@dataclass(frozen=True)
class Work:
    """Work of a rank: a function, and how its rows become batches. It is the same on all ranks."""

    fn: Callable[..., Any]  # takes one loader, or two if rows are marked
    batch_size: int  # number of rows of each rank in a step
    epochs: int  # 1: rows are read once, and not kept
    to_batch: Callable[[dict[str, Any]], Any] | None
    shuffle: bool
    seed: int
    timeout_s: float
    sample: bytes = b""  # a few rows for tail hosts, as an Arrow stream
    validation: str = ""  # the column that marks rows to validate with


@dataclass(frozen=True)
class Start:
    """Pickled work, token and roles, which a task needs to start a rank."""

    work: bytes  # a pickled Work
    token: str = field(repr=False)
    roles: Mapping[str, str] = field(default_factory=dict)  # environment variables


@dataclass(frozen=True)
class TaskOutcome:
    """End of a rank: the result of its function, or the parts of its error."""

    rank: int
    executor: str
    kind: str = ""  # class name of the error, or "" if there was none
    what: str = ""
    where: str = ""
    got: str = ""
    expected: str = ""
    do: str = ""
    trace: str = ""
    result: bytes = b""  # pickled
