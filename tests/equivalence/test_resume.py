"""Going on from a checkpoint is as if nothing had happened: any ranks, any plan, any optimizer."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import assert_same_bits, difference
from resumed import BEFORE, OPTIMIZERS, ROWS, WAYS, Outcome, Script, going_on, on_ranks, saving
from torch import Tensor

import shoal

RANKS = (1, 2, 3, 4)
Case = tuple[str, int, str, int, str]  # optimizer, ranks and way before, ranks and way after


def pairwise() -> list[Case]:
    """Every two of a case's five values together, where they can be; all pairs of ways."""
    covered: set[tuple[object, ...]] = set()
    cases = []
    for before, after in product(WAYS, WAYS):
        whole = WAYS[before].whole and WAYS[after].whole
        optimizers = [name for name in OPTIMIZERS if whole or name != "Adafactor"]
        several = [ranks for ranks in RANKS if ranks > 1]
        candidates = [
            (optimizer, ranks, before, then, after)
            for optimizer, ranks, then in product(optimizers, RANKS, RANKS)
        ]
        best = max(candidates, key=lambda case: len(pairs(case) - covered))
        covered |= pairs(best)
        cases.append(best)
        for optimizer in optimizers[2:]:  # also with the optimizer that few ways take
            cases.append((optimizer, several[len(cases) % 3], before, RANKS[len(cases) % 4], after))
    return cases


def pairs(case: Case) -> set[tuple[object, ...]]:
    return set(combinations(enumerate(case), 2))


CASES = pairwise()
QUICK = ("pair", "head")
_IDS = ["{}-{} {}-{} {}".format(*case) for case in CASES]


def test_every_two_values_come_together() -> None:
    assert len(set(CASES)) >= 200
    covered = {pair for case in CASES for pair in pairs(case)}
    every = [set(column) for column in zip(*CASES, strict=True)]
    for place, other in combinations(range(5), 2):
        for pair in product(every[place], every[other]):
            takes_parts = any(value in WAYS and not WAYS[value].whole for value in pair)
            if not ("Adafactor" in pair and takes_parts):
                assert tuple(zip((place, other), pair, strict=True)) in covered


@pytest.mark.parametrize(("optimizer", "ranks", "before", "then", "after"), CASES, ids=_IDS)
def test_going_on_is_as_if_nothing_had_happened(
    optimizer: str, ranks: int, before: str, then: int, after: str, tmp_path: Path
) -> None:
    make = OPTIMIZERS[optimizer]
    truth = on_ranks(make, ranks, WAYS[before], saving(tmp_path / "saved"))
    got = on_ranks(make, then, WAYS[after], going_on(tmp_path / "saved"))
    assert_same_bits([outcome.model for outcome in got])
    error = difference(truth[0].model, got[0].model)
    assert error <= (0 if (ranks, before) == (then, after) else 1e-10), f"{error:.1e}"
    assert got[0].rate == truth[0].rate
    assert_same_state(truth[0].optimizer, got[0].optimizer)
    assert taken(got) == taken(truth)[BEFORE:]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_same_ranks_and_plan_get_the_same_bits(way: str, tmp_path: Path) -> None:
    make = OPTIMIZERS["AdamW"]
    truth = on_ranks(make, 3, WAYS[way], saving(tmp_path / "saved"))
    got = on_ranks(make, 3, WAYS[way], going_on(tmp_path / "saved"))
    assert_same_bits([truth[0].model, *(outcome.model for outcome in got)])


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way not in QUICK)) for way in WAYS]
)
def test_beside_training_the_same_bytes_are_written(way: str, tmp_path: Path) -> None:
    """Where layers are cut, parts cross to the writers meanwhile."""

    def loop(script: Script, loss_fn: Any) -> None:
        script.train(loss_fn, 2)
        saved = {"model": script.model, "optimizer": script.optimizer}
        shoal.save(tmp_path / "now", **saved)
        with shoal.Checkpoints(tmp_path / "run", keep=1, **saved) as checkpoints:
            checkpoints.save(wait=False)
            script.train(loss_fn, 2)

    on_ranks(OPTIMIZERS["AdamW"], 3, WAYS[way], loop)
    for name in ("model.safetensors", "optimizer.safetensors"):
        expected = (tmp_path / "now" / name).read_bytes()
        assert (tmp_path / "run" / "step-00000000" / name).read_bytes() == expected


def test_each_row_of_the_epoch_comes_once(tmp_path: Path) -> None:
    make, way = OPTIMIZERS["SGD"], WAYS["replicate"]
    first = on_ranks(make, 3, way, saving(tmp_path / "saved", steps=0))
    second = on_ranks(make, 4, way, going_on(tmp_path / "saved", steps=1))
    steps = taken(first) + taken(second)
    assert Counter(row for step in steps for row in step) == Counter(range(ROWS))


def taken(outcomes: list[Outcome]) -> list[list[int]]:
    """The rows of all ranks together, in each step."""
    steps = zip(*(outcome.ids for outcome in outcomes), strict=True)
    return [sorted(row for rows in step for row in rows) for step in steps]


def assert_same_state(expected: dict, got: dict) -> None:
    assert got["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert got["state"][number].keys() == state.keys()
        for name, value in state.items():
            other = got["state"][number][name]
            if isinstance(value, Tensor) and value.numel():
                scale = max(float(value.abs().max()), 1e-3)
                assert other.dtype == value.dtype
                assert float((other - value).abs().max()) <= 1e-10 * scale, (number, name)
            else:
                assert torch.equal(other, value) if isinstance(value, Tensor) else other == value
