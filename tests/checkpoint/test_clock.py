"""A checkpoint comes in time, and ranks decide about it seldom."""

from __future__ import annotations

import pytest

from shoal.checkpoint.clock import CheckpointClock


@pytest.mark.parametrize("step_s", [0.001, 0.03, 0.7, 5.0])
@pytest.mark.parametrize(("every_s", "late_s"), [(0.5, 1.0), (20.0, 1.0), (600.0, 10.0)])
def test_it_comes_in_time_and_few_steps_decide(
    step_s: float, every_s: float, late_s: float
) -> None:
    now_s, decides, decisions, saved = 0.0, 1, 0, list[float]()
    clock = CheckpointClock(every_s, late_s, lambda: now_s)
    last_s, most = 0.0, 20_000
    for step in range(1, most + 1):
        now_s = step * step_s
        if step < decides:
            continue
        decisions += 1
        if clock.is_due:
            saved.append(now_s - last_s)
            last_s = now_s
            clock.saved()
        decides = clock.next_decision(step)
        if len(saved) == 3:
            break
    assert saved or most * step_s < every_s
    for gap in saved:
        assert every_s <= gap + 1e-9 < every_s + max(late_s, 2 * step_s)
    # one in half that time, as steps are whole, and what the end of each wait takes
    assert decisions <= 2 * step * step_s / late_s + 15 * (len(saved) + 1)


def test_time_that_no_step_took_hurries_nobody() -> None:
    """As after a restart, or where the clock does not move between two steps."""
    clock = CheckpointClock(10.0, 1.0, lambda: 0.0)
    assert clock.next_decision(120) >= 121
    assert clock.next_decision(120) >= 121
