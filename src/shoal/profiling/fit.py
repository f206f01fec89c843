"""A line through measured points: a fixed cost, and the cost of each row or byte."""

from __future__ import annotations

from collections.abc import Mapping


def fit_line(seconds: Mapping[int, float] | Mapping[float, float]) -> tuple[float, float]:
    """Fit `seconds[size]` = fixed + slope · size by least squares, with neither part below 0.

    The weights are 1/seconds: large sizes decide the slope, small ones the fixed part.

    Returns:
        (fixed seconds, seconds per unit of size).
    """
    points = [(size, s, 1 / max(s, 1e-9)) for size, s in seconds.items()]
    total = sum(w for _, _, w in points)
    mean_x = sum(w * x for x, _, w in points) / total
    mean_y = sum(w * y for _, y, w in points) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread if spread else 0.0
    if slope < 0:
        return mean_y, 0.0
    if mean_y < slope * mean_x:  # a line through the origin
        return 0.0, sum(w * x * y for x, y, w in points) / sum(w * x * x for x, _, w in points)
    return mean_y - slope * mean_x, slope
