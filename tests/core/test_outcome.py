"""The term that was off most is named, and an outcome goes into JSON."""

from __future__ import annotations

import json

import pytest

from shoal.core.outcome import (
    BETWEEN,
    COMPUTE,
    EXCHANGES,
    OPTIMIZER,
    Outcome,
    Spending,
    Term,
    of_slowest,
)

pytestmark = pytest.mark.quick
TERMS = (
    Term(COMPUTE, 0.5, 0.45),
    Term(EXCHANGES, 0.2, 0.25),
    Term(OPTIMIZER, 0.1, 0.19),
    Term(BETWEEN, 0.0, 0.5),  # longest, and no part of the step
)
FOUND = Outcome(0.8, 0.89, 50, TERMS, ("site 0", 0.2), (2, 0.1), (1e8, 1e7))


def test_the_term_that_was_off_most_is_named_with_its_seconds() -> None:
    assert FOUND.off == TERMS[2]
    shown = str(FOUND)
    assert "predicted step 800.0 ms: 10% under the measured one, 890.0 ms (mean, 50 steps)" in shown
    assert "off most: optimizer, 100.0 ms predicted, 190.0 ms measured" in shown
    assert "200.0 ms of the waiting is for site 0" in shown
    assert "rank 2 is slowest, by 100.0 ms a step" in shown
    assert "carried 800 Mbit/s as the plan was made, and 80 Mbit/s now" in shown


def test_links_that_carry_about_as_much_are_not_named() -> None:
    assert "Mbit" not in str(Outcome(0.8, 0.89, 50, TERMS, links=(1e8, 0.9e8)))


def test_without_terms_there_is_the_step() -> None:
    bare = Outcome(1.0, 0.5, 3)
    assert (
        str(bare)
        == "predicted step 1000.0 ms: 100% over the measured one, 500.0 ms (mean, 3 steps)"
    )
    assert bare.off is None and bare.to_json()["off"] is None


def test_it_goes_into_json() -> None:
    told = json.loads(json.dumps(FOUND.to_json()))
    assert told["off"] == OPTIMIZER and told["slowest_rank"] == 2 and told["steps"] == 50
    assert told["error"] == pytest.approx(0.8 / 0.89 - 1)
    assert {term["name"]: term["measured_s"] for term in told["terms"]}[EXCHANGES] == 0.25


def test_the_slowest_rank_is_that_which_computes_longest() -> None:
    ranks = [Spending(9, 1.0, waiting_s=0.5), Spending(9, 1.05, waiting_s=0.45)]
    assert of_slowest(ranks) == (ranks[1], None)  # hardly slower, so nobody is named
    ranks.append(Spending(9, 1.0, waiting_s=0.1, between_s=0.4))
    spent, slowest = of_slowest(ranks)
    assert spent is ranks[2] and slowest == (2, pytest.approx(0.35))
