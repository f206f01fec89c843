"""Writes beside training: their errors come once, as they were, and nothing is kept behind them."""

from __future__ import annotations

import weakref

import pytest

from shoal.checkpoint.writer_thread import Background
from shoal.core.errors import WorldError


class Checkpoint:
    """Something large that is written."""

    def __init__(self) -> None:
        self.told: list[BaseException] = []
        self.background = Background(self.told.append)


def test_an_error_is_raised_as_it_was_and_once() -> None:
    def lost() -> None:
        raise WorldError("rank 1 was lost")

    checkpoint = Checkpoint()
    checkpoint.background.start(lost, alone=True)
    with pytest.raises(WorldError, match="rank 1 was lost") as caught:
        checkpoint.background.finish()
    checkpoint.background.finish()
    assert checkpoint.told == [caught.value]


def test_what_is_written_is_let_go() -> None:
    checkpoint = Checkpoint()
    written: list[int] = []
    for number in range(2):
        checkpoint.background.start(lambda number=number: written.append(number), alone=True)
    checkpoint.background.finish()
    kept = weakref.ref(checkpoint.background)
    del checkpoint
    assert kept() is None
    assert written == [0, 1]
