"""Work on every rank that may fail on some: either all go on, or all stop with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.contracts.comm import Comm
from shoal.core.errors import LabError, PlanError, RanksDiffer, SampleError, UsageError

T = TypeVar("T")


def agreed(
    comm: Comm,
    work: Callable[[], T],
    purpose: str,
    elsewhere: type[UsageError] = RanksDiffer,
) -> T:
    """Do work in which a mistake raises. If it fails on any rank, raise on all of them.

    Args:
        comm: the ranks, all of which call this at once.
        work: the work; a mistake is a UsageError.
        purpose: its purpose, for messages.
        elsewhere: the error on ranks where it did not fail.
    """
    try:
        result = work()  # save 11
    except UsageError as error:
        comm.gather_objects(str(error), purpose)
        raise
    for rank, text in enumerate(comm.gather_objects(None, purpose)):
        if text is not None:
            raise elsewhere(
                f"rank {rank} cannot go on: {text}", rank=rank, do="see that rank's own message"
            )
    return result


@dataclass(frozen=True)
class _Mistake:
    """UsageError as plain data."""

    kind: str
    what: str
    details: dict[str, Any]

    @classmethod
    def of(cls, error: UsageError) -> _Mistake:
        kind = next(kind for kind in type(error).__mro__ if kind.__name__ in _MISTAKES)
        details = {name: getattr(error, name) for name in ("where", "got", "expected", "do")}
        return cls(kind.__name__, error.what, {**details, "rank": error.rank})

    def error(self) -> UsageError:
        return _MISTAKES[self.kind](self.what, **self.details)


_KINDS: tuple[type[UsageError], ...] = (PlanError, SampleError, RanksDiffer, LabError, UsageError)
_MISTAKES = {kind.__name__: kind for kind in _KINDS}


def from_first(comm: Comm, kind: type[T], work: Callable[[], T]) -> T:
    """Do something on rank 0 and give every rank its result, or its error.

    Args:
        comm: the ranks, all of which call this at once.
        kind: the type of the result, which is plain data or a dataclass.
        work: the work; a mistake is a UsageError.
    """
    outcome: T | _Mistake | None = None
    if comm.rank == 0:
        try:
            outcome = work()
        except UsageError as error:
            outcome = _Mistake.of(error)
    first: T | _Mistake = comm.gather_objects(
        outcome, f"parallelize: {kind.__name__.lower()} of rank 0", kind, _Mistake
    )[0]
    if isinstance(first, _Mistake):
        raise first.error()
    return first
