"""What a step's time is spent on adds up to the step, and odd steps do not count."""

from __future__ import annotations

import pytest

from shoal.core.outcome import Spending
from shoal.engine.time_spent import Spent

pytestmark = pytest.mark.quick


class Clock:
    """Time that a test lets pass, some of it waiting."""

    def __init__(self) -> None:
        self.now_s = self.waited_s = 0.0
        self.spent = Spent(lambda: self.waited_s, lambda: self.now_s)

    def pass_by(self, seconds: float, waiting_s: float = 0.0) -> None:
        self.now_s += seconds + waiting_s
        self.waited_s += waiting_s

    def step(self, between_s: float = 0.5) -> None:
        """Data, forward and backward, the optimizer."""
        self.pass_by(between_s)
        self.spent.forward()
        self.pass_by(1.0, waiting_s=0.25)  # for parameters
        self.spent.forward()  # the model calls itself
        self.pass_by(2.0, waiting_s=0.5)  # for gradients
        self.spent.backward()
        self.spent.on_step_begin()  # as clipping has it
        self.pass_by(0.125)
        self.spent.on_step_begin()
        self.pass_by(0.25, waiting_s=0.0625)
        self.spent.on_step_end()


def test_the_parts_of_a_step_add_up_to_it() -> None:
    clock = Clock()
    for _ in range(20):
        clock.step()
    told = clock.spent.told({"site 0": 3.0, "site 1": 1.0})
    assert told == Spending(19, 3.0, 0.8125, 0.25, 0.625, "site 0", 0.75 * 0.8125)
    assert told.own_s + told.waiting_s == pytest.approx(0.5 + 3.75 + 0.125 + 0.3125)


def test_a_step_with_an_evaluation_in_it_does_not_count() -> None:
    clock = Clock()
    for number in range(40):
        clock.step(between_s=100.0 if number % 10 == 9 else 0.5)
    assert clock.spent.told({}).between_s == 0.625


def test_before_two_steps_nothing_is_told() -> None:
    clock = Clock()
    assert clock.spent.told({}) == Spending()
    clock.step()
    assert clock.spent.told({"site 0": 1.0}).steps == 0


def test_a_step_that_fails_takes_no_time() -> None:
    clock = Clock()
    clock.step()
    clock.spent.on_step_begin()
    clock.pass_by(10.0)  # an error
    clock.step()
    assert clock.spent.told({}).optimizer_s == 0.25
