"""Local steps: each outer rule equals a plain rendering of its algorithm in one process.

ranks     shoal: each rank steps on its rows, every H steps they come together
plain     one process with a model and an optimizer for each rank, written out below
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from locally import (
    ROUND,
    RULES,
    STEPS,
    Make,
    adamw,
    going_on,
    net,
    on_ranks,
    plain,
    sgd,
    train,
    with_norm,
)
from one_process import assert_same_bits, difference, features, rows_of, state
from torch import nn

import shoal


def assert_rule(
    make_model: Callable[[], nn.Module], make: Make, outer: shoal.Outer, ranks: int, **how: Any
) -> None:
    batches = features(6, 4, steps=STEPS)
    expected = plain(make_model, make, outer, ranks, batches, **how)
    own, common = on_ranks(make_model, make, outer, ranks, batches, **how)
    assert_same_bits(common)
    for rank, model in enumerate(expected.models):
        assert difference(state(model), own[rank]) <= 1e-10
    parameters = dict(zip(dict(make_model().named_parameters()), expected.old, strict=True))
    got = {name: common[0][name] for name in parameters}
    assert difference(parameters, got) <= 1e-10
    if ranks > 1:
        assert difference(own[0], own[1]) > 1e-3, "ranks did not step by themselves"


_QUICK = {("nesterov", 3), ("slowmo", 2), ("bmuf", 4), ("average", 1)}


@pytest.mark.parametrize(
    ("rule", "ranks"),
    [
        pytest.param(rule, ranks, marks=[] if (rule, ranks) in _QUICK else pytest.mark.slow)
        for rule in RULES
        for ranks in (1, 2, 3, 4)
    ],
)
def test_rule_is_its_algorithm(rule: str, ranks: int) -> None:
    assert_rule(net, sgd, RULES[rule], ranks, uneven=True)


def test_slowmo_follows_a_schedule() -> None:
    assert_rule(net, sgd, RULES["slowmo"], 2, schedule=True)


@pytest.mark.slow
def test_ranks_have_their_own_moments() -> None:
    assert_rule(net, adamw, RULES["nesterov"], 3)


@pytest.mark.slow
def test_a_step_is_one_of_each_optimizer() -> None:
    def both(parameters: Any) -> Any:
        weight, *others = parameters
        return [sgd([weight]), sgd(others)]

    batches = features(6, 4, steps=STEPS)
    expected = plain(net, sgd, RULES["nesterov"], 2, batches)
    own, _ = on_ranks(net, both, RULES["nesterov"], 2, batches)
    for rank, model in enumerate(expected.models):
        assert difference(state(model), own[rank]) <= 1e-10


@pytest.mark.slow
def test_weights_of_16_bits() -> None:
    """Momentum is kept in 32; ranks have the same bits as a round ends."""

    def narrow() -> nn.Module:
        return net().bfloat16()

    batches = [(x.bfloat16(), y) for x, y in features(6, 4, steps=2 * ROUND)]
    expected = plain(net, sgd, RULES["nesterov"], 2, features(6, 4, steps=2 * ROUND))
    own, common = on_ranks(narrow, sgd, RULES["nesterov"], 2, batches)
    assert_same_bits([*own, *common])
    assert difference(state(expected.models[0]), own[0]) <= 0.05


def test_buffers_are_averaged() -> None:
    assert_rule(with_norm, sgd, RULES["average"], 2, uneven=True)


@pytest.mark.parametrize(
    ("rule", "first", "second"),
    [
        ("slowmo", 2, 1),
        *(
            pytest.param(rule, first, second, marks=pytest.mark.slow)
            for rule in ("nesterov", "slowmo")
            for first, second in ((2, 3), (3, 1), (1, 2), (3, 3))
        ),
    ],
)
def test_goes_on_with_other_ranks(rule: str, first: int, second: int, tmp_path: Path) -> None:
    """A checkpoint has the weights of the last round's end, and the mean of the moments."""
    batches, outer = features(6, 4, steps=STEPS), RULES[rule]
    before, after = batches[:7], batches[7:] + batches[:4]  # saved within a round
    workers = plain(net, adamw, outer, first, before, uneven=True)
    expected = going_on(workers, second, adamw)
    for batch in after:
        expected.step([rows_of(batch, rank, second, True) for rank in range(second)])
    how: dict[str, Any] = {"make": adamw, "outer": outer}
    train("abc"[:first], [net() for _ in range(first)], before, saves=tmp_path / "saved", **how)
    got = [net() for _ in range(second)]
    train("abc"[:second], got, after, loads=tmp_path / "saved", **how)
    for model, other in zip(expected.models, got, strict=True):
        assert difference(state(model), state(other)) <= 1e-10
