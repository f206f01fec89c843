"""The quick set shows every value, as many pairs as it can, and is the same in every process."""

from __future__ import annotations

from itertools import product

import pytest

from quick_set import showing_all

STRATEGIES, RANKS, UNEVEN = "abcde", (1, 2, 3), (False, True)


def test_every_value_is_shown_by_as_few_cases_as_the_longest_parameter_has_values() -> None:
    cases = {case: case for case in product(STRATEGIES, RANKS, UNEVEN)}
    shown = list(showing_all(cases))
    assert len(shown) == len(STRATEGIES)
    for parameter, values in enumerate((STRATEGIES, RANKS, UNEVEN)):
        assert {case[parameter] for case in shown} == set(values)
    assert len({(ranks, uneven) for _, ranks, uneven in shown}) >= 4
    assert shown == list(showing_all(cases))


@pytest.mark.parametrize("number", [1, 4])
def test_of_one_parameter_every_value_is_a_case_of_its_own(number: int) -> None:
    cases = {value: [value] for value in range(number)}
    assert list(showing_all(cases)) == list(range(number))
