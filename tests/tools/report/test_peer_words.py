"""A benchmark says in words where DDP does as well, and why a step is shorter than compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_records import timed

from shoal.core.record import Contender
from shoal_tools.report.page import page
from shoal_tools.report.peer_words import in_words

SHOAL = Contender("shoal", 1.0, (1.0, 1.0), 0.0)


def said(name: str, *ratio: float) -> list[str]:
    median, low, high = ratio
    peer = Contender(name, median, (median, median), 0.0, (median, low, high))
    return in_words([SHOAL, peer], ["sliced"])


@pytest.mark.quick
def test_ddp_that_is_as_fast_or_faster_is_said_so() -> None:
    assert said("ddp, 25 MB buckets", 1.3, 1.2, 1.4) == []
    assert said("ddp, 25 MB buckets", 1.02, 0.98, 1.1) == [
        "DDP does as well here: the interval of its ratio reaches 1"
    ]
    (faster,) = said("ddp, 1 MB buckets", 0.9, 0.85, 0.95)
    assert faster.startswith("DDP is faster here: its step is 0.90 of Shoal's.")


def test_a_step_that_is_shorter_than_computes_has_a_reason() -> None:
    assert said("plain", 0.7, 0.6, 0.8) == []
    (shorter,) = said("plain", 1.2, 1.1, 1.3)
    assert "shorter than that of a rank alone" in shorter and "holds a part" in shorter


def test_the_page_says_it_too() -> None:
    record = timed(5)
    shoal, ddp = record.contenders
    record = replace(record, contenders=(shoal, replace(ddp, ratio=(1.0, 0.9, 1.1))))
    assert "<li>DDP does as well here: the interval of its ratio reaches 1</li>" in page(record)
