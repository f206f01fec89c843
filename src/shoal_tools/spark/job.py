"""What the driver asks of a rank, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# a variable of a rank's process: the descriptor that rows come by
ROWS = "SHOAL_SPARK_ROWS"
# files in its folder: what it is to do, and how it ended
WORK, OUTCOME = "work", "outcome"


@dataclass(frozen=True)
class Work:
    """What every rank does."""

    fn: Callable[..., Any]  # of one loader, or of two where rows are marked
    batch_size: int  # rows of each rank in a step
    epochs: int  # 1: rows are read once, and not kept
    to_batch: Callable[[dict[str, Any]], Any] | None
    shuffle: bool
    seed: int
    timeout_s: float
    sample: bytes = b""  # rows for tail hosts to look at, as an Arrow stream
    validation: str = ""  # the column of rows that are not trained on


@dataclass(frozen=True)
class Start:
    """What a task needs to start a rank."""

    work: bytes  # a pickled Work
    token: str = field(repr=False)
    roles: Mapping[str, str] = field(default_factory=dict)  # variables


@dataclass(frozen=True)
class TaskOutcome:
    """How a rank ended: a result, or an error in its parts."""

    rank: int
    executor: str
    kind: str = ""  # of the error: the name of its class; "" for none
    what: str = ""
    where: str = ""
    got: str = ""
    expected: str = ""
    do: str = ""
    trace: str = ""
    result: bytes = b""  # pickled
