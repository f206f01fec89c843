"""Names and globs of pins and placements: which names of a model they mean."""

from __future__ import annotations

import pytest

from shoal.core.errors import PlanError
from shoal.core.names import matched

NAMES = ["block[0]", "block0", "block1", "head", "head.*"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("head", ["head"]),
        ("block?", ["block0", "block1"]),
        ("block[0]", ["block[0]"]),  # a name before a glob, which would mean block0
        ("head.*", ["head.*"]),
        ("*", NAMES),
    ],
)
def test_a_name_is_itself_and_a_glob_is_all_that_it_matches(
    pattern: str, expected: list[str]
) -> None:
    assert matched(pattern, NAMES, "pin", "layer") == expected


def test_a_pattern_that_matches_nothing_is_told_near_names() -> None:
    with pytest.raises(PlanError, match=r"the pin 'haed' matches no layer(.|\n)*head"):
        matched("haed", NAMES, "pin", "layer")
