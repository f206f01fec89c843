"""Doing on every rank what may fail on some: all go on, or all stop and say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, UsageError

T = TypeVar("T")


def agreed(comm: Comm, work: Callable[[], T], elsewhere: type[UsageError] = RanksDiffer) -> T:
    """Do something that a mistake makes fail; if it fails on any rank, raise on all of them.

    Args:
        comm: the ranks, all of which call this at once.
        work: what to do; a mistake is a UsageError.
        elsewhere: the error of the ranks on which it did not fail.
    """
    try:
        result = work()
    except UsageError as error:
        comm.gather_objects(str(error))
        raise
    for rank, text in enumerate(comm.gather_objects(None)):
        if text is not None:
            raise elsewhere(
                f"rank {rank} cannot go on: {text}", rank=rank, do="see that rank's own message"
            )
    return result


def from_first(comm: Comm, work: Callable[[], T]) -> T:
    """Do something on rank 0 and give every rank its result, or its error."""
    outcome: T | UsageError | None = None
    if comm.rank == 0:
        try:
            outcome = work()
        except UsageError as error:
            outcome = error
    first: T | UsageError = comm.gather_objects(outcome)[0]
    if isinstance(first, UsageError):
        raise first
    return first
