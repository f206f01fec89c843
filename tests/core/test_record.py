"""Numbers of steps as they come: of however many steps, in the memory of so many points."""

from __future__ import annotations

import math

import pytest

from shoal.core.record import Series


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 7, 8, 9, 100, 1001])
@pytest.mark.parametrize("most", [4, 5])
def test_points_are_means_of_steps_in_a_row(steps: int, most: int) -> None:
    series = Series(most=most)
    for step in range(steps):
        series.add(float(step))
    curve = series.curve
    assert len(curve.values) <= most
    size = curve.steps_a_point
    assert size == 1 or steps >= most
    expected = []
    for first in range(0, steps, size):
        part = range(first, min(first + size, steps))
        expected.append(sum(part) / len(part))
    assert curve.values == pytest.approx(expected)


def test_what_is_not_finite_is_a_gap() -> None:
    series = Series()
    for value in (1.0, math.nan, math.inf, 2.0):
        series.add(value)
    assert series.curve.values == (1.0, None, None, 2.0)
