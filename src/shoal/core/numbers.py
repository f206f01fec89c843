"""Numbers as people write them: in variables, options and files.

`str.isdigit` is true of "²", and `int` refuses that; a float may be "nan" or "inf". What a number
is for bounds it, so a slip of the finger is no job of ten million ranks.
"""

from __future__ import annotations

import math
import re
from typing import Any

_MOST_DIGITS = 18
MOST_RANKS = 1 << 16  # of a job
MOST_RANKS_IMAGINED = 1 << 12  # to plan for: the time that takes grows with their square
MOST_RANKS_HERE = 1 << 10  # that one machine starts
MOST_SECONDS = 1e8


def whole(text: str) -> int | None:
    """The whole number that a text is, in ASCII digits; None where it is none."""
    return int(text) if re.fullmatch(rf"[0-9]{{1,{_MOST_DIGITS}}}", text) else None


def decimal(text: str) -> float | None:
    """The number that a text is, as 12 or 2.5; None where it is none."""
    form = rf"[0-9]{{1,{_MOST_DIGITS}}}(\.[0-9]{{1,{_MOST_DIGITS}}})?"
    return float(text) if re.fullmatch(form, text) else None


def how_many(number: int, noun: str) -> str:
    """A number of things.

    Examples:
        >>> how_many(1, "rank"), how_many(1200, "layer")
        ('1 rank', '1,200 layers')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def is_count(value: Any) -> bool:
    """Whether a value is a whole number, and not a truth value, which Python takes for one."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: Any, most: float = math.inf) -> bool:
    """Whether a value is a finite number over 0, and at most `most`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= most and value != math.inf
