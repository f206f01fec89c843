"""Ordinary loops by seed, whole scripts with their loaders: as in one process."""

from __future__ import annotations

from collections import Counter

import pytest
from ordinary_loops import judged

slow = pytest.mark.slow
FEW = range(4)


@pytest.mark.filterwarnings("ignore")  # as of losses that are no means over rows
@pytest.mark.parametrize("number", [*FEW, *(pytest.param(n, marks=slow) for n in range(4, 60))])
def test_a_script_trains_on_ranks_as_in_one_process(number: int) -> None:
    """More of them: tests/served/ordinary_loops.py."""
    said = judged(number, Counter())
    assert said.partition(" ")[0] in ("same", "refused", "unwritten:"), said
