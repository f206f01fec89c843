"""Costs against sums done by hand."""

from __future__ import annotations

import pytest

from shoal.core.cost import Cost, Pace, Phase, Price, Traffic, Wait, total

PACE = Pace(wall=Price(round_s=0.5, byte_s=0.01), cpu=Price(round_s=0.1, byte_s=0.001))


def test_a_phase_alone_takes_its_link_and_its_lane() -> None:
    """As a codec would state it: half of the bytes, and the seconds to encode and to decode."""
    plain = Phase(Traffic((100.0, 80.0), (90.0, 100.0), rounds=2), PACE)
    coded = Phase(plain.traffic.scaled(0.5), PACE, before_s=0.2, after_s=0.3)
    assert plain.alone_s == pytest.approx(2 * 0.5 + 100 * 0.01)
    assert coded.alone_s == pytest.approx(2 * 0.5 + 50 * 0.01 + 0.5)


def test_a_phase_that_goes_every_few_steps_counts_as_a_part_of_each() -> None:
    """As local steps would state it."""
    phase = Phase(Traffic((90.0,), (60.0,), rounds=2), PACE, after_s=0.3, every=3)
    cost = Cost(after_step=phase, backward_s=0.25).mean
    assert cost.after_step is not None
    assert cost.traffic.sent == pytest.approx((30.0,))
    assert cost.alone_s == pytest.approx(phase.alone_s / 3)
    assert cost.processor_s == pytest.approx((2 * 0.1 + 90 * 0.001) / 3)
    assert cost.backward_s == 0.25, "what is computed in every step"
    assert cost.mean is cost


def test_the_two_ways_of_an_exchange_with_servers_make_all_of_it() -> None:
    traffic = Traffic((30.0, 30.0, 60.0), (30.0, 30.0, 60.0), rounds=2, leaving=(9.0, 8.0, 7.0))
    out, back = traffic.one_way(workers=2)
    assert (out.sent, out.received) == ((30.0, 30.0, 0.0), (0.0, 0.0, 60.0))
    assert (back.sent, back.received) == ((0.0, 0.0, 60.0), (30.0, 30.0, 0.0))
    assert total([out, back]) == traffic
    assert total([traffic.half] * 2) == traffic


def test_bytes_out_and_bytes_in_take_the_processor_once() -> None:
    out, back = Traffic((50.0, 0.0), (0.0, 50.0), 1), Traffic((0.0, 50.0), (50.0, 0.0), 1)
    cost = Cost(in_backward=Phase(out, PACE, Wait.NEVER), after_step=Phase(back, PACE))
    assert cost.processor_s == pytest.approx(2 * 0.1 + 50 * 0.001)
    assert cost.alone_s == pytest.approx(2 * (0.5 + 50 * 0.01)), "one after the other"
