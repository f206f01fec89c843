"""Numbers as people write them: in variables, options and files.

`str.isdigit` is true of "²", and `int` refuses that; a float may be "nan" or "inf". Each number has
bounds that suit its use, so that a typing error does not ask for ten million ranks.
"""

from __future__ import annotations

import math
import re
from typing import Any

from shoal.core.errors import UsageError

_MOST_DIGITS = 18
MOST_RANKS = 1 << 16  # largest number of ranks of a job
# largest number of ranks to plan for: planning time grows with their square
MOST_RANKS_IMAGINED = 1 << 12
MOST_RANKS_HERE = 1 << 10  # largest number of ranks that one machine starts
MOST_SECONDS = 1e8
MOST_COUNTED = 1 << 50  # largest number of steps, bytes, or anything else that is counted


def whole(text: str) -> int | None:
    """Return the whole number that a text shows, in ASCII digits; None for any other text."""
    return int(text) if re.fullmatch(rf"[0-9]{{1,{_MOST_DIGITS}}}", text) else None


def decimal(text: str) -> float | None:
    """Return the number that a text shows, such as 12 or 2.5; None for any other text."""
    form = rf"[0-9]{{1,{_MOST_DIGITS}}}(\.[0-9]{{1,{_MOST_DIGITS}}})?"
    return float(text) if re.fullmatch(form, text) else None


def how_many(number: int, noun: str) -> str:
    """Write a number of things.

    Examples:
        >>> how_many(1, "rank"), how_many(1200, "layer")
        ('1 rank', '1,200 layers')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number. A truth value is not, although Python says so."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: Any, most: float = math.inf) -> bool:
    """Return whether a value is a finite number over 0, and at most `most`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= most and value != math.inf


def check_whole(rule: str, value: Any, least: int, most: int = MOST_COUNTED, *, do: str) -> None:
    """Raise UsageError unless a value is a whole number in a range.

    Args:
        rule: the sentence that the value breaks, such as "the lag is a number of steps".
        value: a value as the caller gave it.
        least: the smallest number that is right.
        most: the largest number that is right.
        do: the way out.

    Examples:
        >>> from shoal.core.numbers import check_whole
        >>> check_whole("the lag is a number of steps", 1.5, 0, do="give 0 to wait")
        Traceback (most recent call last):
        shoal.core.errors.UsageError: the lag is a number of steps
          got: 1.5
          expected: a whole number from 0 to 1,125,899,906,842,624
          do this: give 0 to wait
    """
    if not is_count(value) or not least <= value <= most:
        expected = f"a whole number from {least:,} to {most:,}"
        raise UsageError(rule, got=shown(value), expected=expected, do=do)


def check_number(rule: str, value: Any, least: float, most: float, *, do: str) -> None:
    """Raise UsageError unless a value is a finite number in a range.

    `check_whole` explains the arguments.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        expected = f"a number from {least:g} to {most:g}"
        raise UsageError(rule, got=shown(value), expected=expected, do=do)


def check_truth(rule: str, value: Any, *, do: str) -> None:
    """Raise UsageError unless a value is True or False. `check_whole` explains the arguments."""
    if not isinstance(value, bool):
        raise UsageError(rule, got=shown(value), expected="True or False", do=do)


def shown(value: Any) -> str:
    """Write a value for messages: short, whatever the value is."""
    try:
        return repr(value)[:80]
    except Exception as error:  # e.g. an int of more digits than Python writes
        return f"{type(value).__name__}, which cannot be shown: {type(error).__name__}"
