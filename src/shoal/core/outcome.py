"""Outcome of a prediction: a step as it was predicted, and as it went. Plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

COMPUTE, EXCHANGES, OPTIMIZER, BETWEEN = "compute", "exchanges", "optimizer", "between steps"
_SAID = {
    COMPUTE: "forward and backward, by themselves",
    EXCHANGES: "that the main thread waits for exchanges",
    OPTIMIZER: "the optimizer's own step",
    BETWEEN: "data, and the program itself",
}
_LABEL = 60  # characters of an exchange's label
_SLOWER_LINK = 0.7  # ratio to the first rate, below which a link is reported as slower
_MUCH_LONGER = 1.1  # ratio to the median rank, above which a rank is reported as slowest


@dataclass(frozen=True)
class Spending:
    """Time of a rank's main thread in a step, by use: the mean of its middle steps.

    All times are in seconds. They add up to the step, from the end of one backward to the end of
    the next.
    """

    steps: int = 0  # number of steps that were measured
    compute_s: float = 0.0
    waiting_s: float = 0.0
    optimizer_s: float = 0.0
    between_s: float = 0.0
    longest: str = ""  # label of the exchange that it waits for longest
    longest_s: float = 0.0

    @property
    def own_s(self) -> float:
        """Seconds in which it does not wait for others."""
        return self.compute_s + self.optimizer_s + self.between_s


@dataclass(frozen=True)
class Term:
    """Part of a step: seconds as predicted, and as measured.

    Examples:
        >>> round(Term("optimizer", predicted_s=0.010, measured_s=0.012).off_s, 4)
        0.002
    """

    name: str
    predicted_s: float
    measured_s: float

    @property
    def off_s(self) -> float:
        """Seconds that it took beyond the prediction; below 0 if it took less."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True)
class Outcome:
    """Step as it was predicted, and as it went.

    Print it to read it. It describes the slowest rank, or the only one that was asked.

    Args:
        predicted_s: seconds of a step; 0 if nothing predicts it.
        measured_s: measured seconds, without the time between steps, which is not predicted.
        steps: number of steps that were measured.
        terms: "compute", "exchanges", "optimizer" and "between steps". Empty for a plan with a
            tail, tables at servers, or steps that are not alike.
        longest: the exchange that is waited for longest, and for how many seconds.
        slowest: the rank that computes far longer than the others, and by how much.
        links: rates of the slowest link when the plan was made, and now, in bytes a second. None if
            it was not tried again.

    Examples:
        >>> terms = Term("compute", 0.05, 0.05), Term("exchanges", 0.01, 0.04)
        >>> Outcome(predicted_s=0.06, measured_s=0.09, steps=20, terms=terms).off.name
        'exchanges'
    """

    predicted_s: float
    measured_s: float
    steps: int
    terms: tuple[Term, ...] = ()
    longest: tuple[str, float] = ("", 0.0)
    slowest: tuple[int, float] | None = None
    links: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """Error of the prediction, as a part of the measured step: below 0 if it is too short.

        Examples:
            >>> Outcome(predicted_s=0.9, measured_s=1.0, steps=10).error
            -0.09999999999999998
        """
        if not self.measured_s or not self.predicted_s:
            return 0.0
        return self.predicted_s / self.measured_s - 1

    @property
    def off(self) -> Term | None:
        """The term of the measured step with the largest error, in seconds."""
        terms = (term for term in self.terms if term.name != BETWEEN)
        return max(terms, key=lambda term: abs(term.off_s), default=None)

    def term(self, name: str) -> Term:
        """Return a term by its name (KeyError if there is none)."""
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(name)

    def __str__(self) -> str:
        """Write predicted and measured seconds, the term with the largest error, and all terms.

        Examples:
            >>> terms = Term(COMPUTE, 0.05, 0.052), Term(EXCHANGES, 0.01, 0.04)
            >>> print(Outcome(0.06, 0.092, 20, terms, ("site 0 (sliced direct: head)", 0.03)))
            predicted step 60.0 ms: 35% under the measured one, 92.0 ms (mean, 20 steps)
            off most: exchanges, 10.0 ms predicted, 40.0 ms measured
              compute            50.0 ms    52.0 ms  forward and backward, by themselves
              exchanges          10.0 ms    40.0 ms  that the main thread waits for exchanges
            30.0 ms of the waiting is for site 0 (sliced direct: head)
        """
        side = "under" if self.error < 0 else "over"
        lines = [
            f"predicted step {_ms(self.predicted_s)}: {abs(self.error):.0%} {side} the measured "
            f"one, {_ms(self.measured_s)}{self._counted}"
        ]
        if not self.predicted_s:
            measured = f"measured step {_ms(self.measured_s)}{self._counted}"
            lines = [f"{measured}; such plans have no prediction"]
        if (off := self.off) is not None:
            lines.append(
                f"off most: {off.name}, {_ms(off.predicted_s)} predicted, "
                f"{_ms(off.measured_s)} measured"
            )
        lines += [
            f"  {term.name:14} {_ms(term.predicted_s):>11} {_ms(term.measured_s):>10}  "
            f"{_SAID[term.name]}"
            for term in self.terms
        ]
        return "\n".join([*lines, *self.causes()])

    @property
    def _counted(self) -> str:
        """Number of measured steps, in words. Their middle half counts."""
        return f" (mean, {self.steps} steps)" if self.steps > 1 else ""

    def causes(self) -> list[str]:
        """Return the known causes of the error, a line each."""
        causes = []
        label, longest_s = self.longest
        if label and longest_s > 0.01 * self.measured_s:
            short = label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…"
            causes.append(f"{_ms(longest_s)} of the waiting is for {short}")
        if self.slowest is not None:
            rank, longer_s = self.slowest
            causes.append(f"rank {rank} is slowest, by {_ms(longer_s)} a step")
        if self.links is not None and self.links[1] < _SLOWER_LINK * self.links[0]:
            then, now = (f"{rate * 8e-6:,.0f} Mbit/s" for rate in self.links)
            causes.append(f"the slowest link carried {then} as the plan was made, and {now} now")
        return causes

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        return {
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "error": self.error,
            "steps": self.steps,
            "off": self.off.name if self.off else None,
            "terms": [asdict(term) for term in self.terms],
            "longest": {"exchange": self.longest[0], "waited_s": self.longest[1]},
            "slowest_rank": None if self.slowest is None else self.slowest[0],
            "links_bytes_per_s": None if self.links is None else list(self.links),
        }


def of_slowest(ranks: list[Spending]) -> tuple[Spending, tuple[int, float] | None]:
    """Return the spending of the slowest rank, for which all others wait. If it is far slower, also
    return its number, and the seconds.

    Examples:
        >>> quick, slow = Spending(9, 1.0, waiting_s=2.0), Spending(9, 3.0)
        >>> of_slowest([quick, slow, quick])[1]
        (1, 2.0)
    """
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].own_s)
    own_s = sorted(spending.own_s for spending in ranks)
    usual_s = own_s[(len(own_s) - 1) // 2]
    spent = ranks[slowest]
    if len(ranks) == 1 or spent.own_s <= _MUCH_LONGER * usual_s:
        return spent, None
    return spent, (slowest, spent.own_s - usual_s)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
