"""Errors in two families, and the form of message that they share.

*You can fix it* (`UsageError`, a ValueError): raised before the first step. *The world broke*
(`WorldError`, a RuntimeError): a peer was lost or a deadline passed. A message has a line each for
the event, the place, the value found and expected, and the remedy.
"""

from __future__ import annotations

from typing import Self

from shoal.core.printable import printable


class ShoalError(Exception):
    """Base of every error that Shoal raises on purpose."""

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        got: str = "",
        expected: str = "",
        do: str = "",
        rank: int | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.got = got
        self.expected = expected
        self.do = do
        self.rank = rank  # the rank that the error is about, if there is one
        lines = [what]
        details = {"where": where, "got": got, "expected": expected}
        lines += [f"  {key}: {value}" for key, value in details.items() if value]
        if do:
            lines.append(f"  do this: {do}")
        super().__init__(printable("\n".join(lines), keep="\n\t"))

    def struck(self, where: str) -> Self:
        """Return the same error with the place where it occurred."""
        details = {"got": self.got, "expected": self.expected, "do": self.do}
        return type(self)(self.what, where=where, rank=self.rank, **details)

    def with_advice(self, more: str) -> Self:
        """Return the same error with one more remedy."""
        details = {"where": self.where, "got": self.got, "expected": self.expected}
        do = f"{self.do}; or {more}" if self.do else more
        return type(self)(self.what, do=do, rank=self.rank, **details)


class UsageError(ShoalError, ValueError):
    """Error that the caller can put right; raised before the first step."""


class PlanError(UsageError):
    """Error about a plan, pin or strategy that does not fit the model or the cluster."""


class SampleError(UsageError):
    """Error about a missing sample, or one that the model does not take."""


class RanksDiffer(UsageError):
    """Error about ranks that were called with different models or plans, or with the same batch."""


class LabError(UsageError):
    """Error of a lab that cannot be built here: not root, no `ip` or `tc`, or a queue that this
    kernel lacks.
    """


class WorldError(ShoalError, RuntimeError):
    """Error of the world outside the program."""


class MissingRank(WorldError):
    """Error of a start to which not every rank came in the stated time."""


class PeerLost(WorldError):
    """Error about a rank that died, or lost its host."""


class DeadlinePassed(WorldError):
    """Error about a peer that is alive but did not take part in an exchange in time."""
