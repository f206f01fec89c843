"""Numbers as people write them, and what only looks like one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shoal.core.numbers import decimal, is_count, is_positive, whole


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_whole_numbers(text: str, number: int) -> None:
    assert whole(text) == number


@pytest.mark.parametrize("text", ["", " 1", "1 ", "-1", "+1", "1_0", "²", "٣", "1.0", "9" * 5000])
def test_texts_that_are_no_whole_number(text: str) -> None:
    assert whole(text) is None


@pytest.mark.parametrize(("text", "number"), [("2.5", 2.5), ("10", 10.0), ("0.0", 0.0)])
def test_decimals(text: str, number: float) -> None:
    assert decimal(text) == number


@pytest.mark.parametrize("text", ["", ".5", "1.", "1e9", "inf", "nan", "²", "1.5.5", "9" * 400])
def test_texts_that_are_no_decimal(text: str) -> None:
    assert decimal(text) is None


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "1", None])
def test_values_that_are_not_over_0(value: Any) -> None:
    assert not is_positive(value)


def test_values_that_are() -> None:
    assert is_positive(1) and is_positive(2.5) and is_positive(7, most=7)
    assert not is_positive(8, most=7)
    assert is_count(3) and not is_count(True) and not is_count(3.0)
