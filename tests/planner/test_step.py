"""A step that is asked for with a limit: the same to the bit, or known to be over it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from made_up import cluster, layer, linear, measured, model

from shoal.core.plan import Choice
from shoal.planner.timeline import Predictor
from shoal.strategies.pair import PairFacts

WAYS = ("replicate:allreduce", "replicate:ring", "sliced:direct", "factor", "column", "row")


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(40))
def test_a_step_is_as_predicted_up_to_a_limit_and_over_it_otherwise(seed: int) -> None:
    draw = random.Random(seed)
    layers = []
    for i, ready_s in enumerate(sorted(draw.uniform(0, 2) for _ in range(8))):
        width, needed_s = 2 ** draw.randint(7, 12), 1 - i / 8
        if i % 2:
            made = linear(f"l{i}", ready_s, width, 512, draw.choice([4, 1024]), 0.02)
            layers.append(replace(measured(made, PairFacts()), needed_s=needed_s))
        else:
            layers.append(layer(f"l{i}", ready_s, 100 * width, needed_s=needed_s))
    where = cluster(4, 10 ** draw.uniform(6, 9), 1e-3, draw.choice([0.5, 2]))
    burst_bytes = draw.choice([0.0, 5e5, 5e7])
    where = replace(where, link=replace(where.link, burst_bytes=burst_bytes))
    predictor = Predictor(model(*layers), where)
    choices = []
    for each in layers:
        ways = WAYS if each.kind == "Linear" else WAYS[:3]
        strategy, _, exchange = draw.choice(ways).partition(":")
        choices.append(Choice(each.name, strategy, exchange))
    plan = choices, draw.choice([1 << 20, 100 << 20]), draw.choice([1, 3])
    exact_s = predictor.predict(*plan).step_s
    assert predictor.step_s(*plan) == exact_s
    for most_s in (exact_s, 2 * exact_s, 0.99 * exact_s, 0.5 * exact_s, 0.0):
        found_s = predictor.step_s(*plan, most_s=most_s)
        if most_s >= exact_s * (1 + 1e-9):
            assert found_s == exact_s
        elif most_s < exact_s * (1 - 1e-9):
            assert most_s < found_s <= exact_s * (1 + 1e-12)
