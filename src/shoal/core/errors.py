"""What can go wrong, in two families, and the one shape of message they share.

*You can fix it* (`UsageError`, a ValueError): raised before the first step. *The world broke*
(`WorldError`, a RuntimeError): a peer was lost or a deadline passed. A message says what happened,
where, what was got and expected, and what to do, one line each.
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
        self.rank = rank  # the rank that the error is about, where there is one
        lines = [what]
        details = {"where": where, "got": got, "expected": expected}
        lines += [f"  {key}: {value}" for key, value in details.items() if value]
        if do:
            lines.append(f"  do this: {do}")
        super().__init__(printable("\n".join(lines), keep="\n\t"))

    def struck(self, where: str) -> Self:
        """The same error, told where it struck."""
        details = {"got": self.got, "expected": self.expected, "do": self.do}
        return type(self)(self.what, where=where, rank=self.rank, **details)

    def advised(self, more: str) -> Self:
        """The same error, with one thing more that can be done."""
        details = {"where": self.where, "got": self.got, "expected": self.expected}
        do = f"{self.do}; or {more}" if self.do else more
        return type(self)(self.what, do=do, rank=self.rank, **details)


class UsageError(ShoalError, ValueError):
    """Something the caller can put right; raised before the first step."""


class PlanError(UsageError):
    """A plan, pin or strategy that does not fit the model or the cluster."""


class SampleError(UsageError):
    """No sample, or one that the model does not take."""


class RanksDiffer(UsageError):
    """Ranks called with different models, plans, or the same batch."""


class LabError(UsageError):
    """The lab cannot be built here: not root, no `ip` or `tc`, or a queue this kernel lacks."""


class WorldError(ShoalError, RuntimeError):
    """The world outside the program broke."""


class MissingRank(WorldError):
    """Not every rank came to the start within the stated time."""


class PeerLost(WorldError):
    """A rank died or its host went away."""


class DeadlinePassed(WorldError):
    """A peer is alive but did not take part in an exchange in time."""
