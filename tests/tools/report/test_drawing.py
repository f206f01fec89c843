"""Charts: points are where their numbers are, gaps stay gaps, axes have round numbers."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shoal_tools.report.drawing import FLOOR, LEFT, RIGHT, TOP, Points, line_chart, ticks

SPACE = "{http://www.w3.org/2000/svg}"


def chart(points: Points) -> ElementTree.Element:
    return ElementTree.fromstring(line_chart("a & b", {"<loss>": points}, "step", str))


def lines(picture: ElementTree.Element) -> list[list[tuple[float, float]]]:
    return [
        [
            (float(x), float(y))
            for x, y in (pair.split(",") for pair in line.get("points", "").split())
        ]
        for line in picture.iter(f"{SPACE}polyline")
    ]


def test_points_fill_the_frame() -> None:
    (line,) = lines(chart([(1, 4.0), (2, 2.0), (3, 0.0)]))
    middle = (LEFT + RIGHT) / 2, (FLOOR + TOP) / 2
    assert line == [(LEFT, TOP), middle, (RIGHT, FLOOR)]


def test_a_gap_divides_a_line_and_a_lone_point_is_a_dot() -> None:
    picture = chart([(1, 1.0), (2, 2.0), (3, None), (4, 3.0), (5, None), (6, 1.0), (7, 2.0)])
    assert [len(line) for line in lines(picture)] == [2, 2]
    assert len(list(picture.iter(f"{SPACE}circle"))) == 1


@pytest.mark.parametrize("points", [[(1, 5.0)], [(1, 0.0), (2, 0.0)], [(1, -3.0), (2, -3.0)]])
def test_numbers_that_are_all_alike_are_drawn(points: Points) -> None:
    assert chart(points).tag == f"{SPACE}svg"


@pytest.mark.parametrize("points", [[], [(1, None)]])
def test_nothing_is_drawn_of_nothing(points: Points) -> None:
    assert line_chart("nothing", {"loss": points}, "step", str) == ""


@pytest.mark.parametrize(("least", "most"), [(0, 1), (3, 1000), (-5, 5), (0.001, 0.0013), (7, 7)])
def test_ticks_are_few_and_inside(least: float, most: float) -> None:
    found = ticks(least, most)
    assert 1 <= len(found) <= 7
    assert all(least - 1e-9 <= tick <= most + 1e-9 for tick in found)
    assert found == sorted(set(found))
