"""Cells of benchmarks/cells.py: what is drawn, that models train, what is told of figures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from cell_models import MODELS
from cells import A_LAB, HOSTS, OWN, RATES, WAYS, add, cells, line, numbers, read, summary


def test_sixty_cells_have_every_model_rate_plan_and_number_of_hosts() -> None:
    drawn = cells()
    assert drawn == cells()
    assert [cell.number for cell in drawn] == list(range(1, 61))
    assert min(Counter(cell.model for cell in drawn)[model] for model in MODELS) >= 3
    assert Counter(cell.rate for cell in drawn) == dict.fromkeys(RATES, 12)
    assert Counter(cell.hosts for cell in drawn) == {n: A_LAB * HOSTS.count(n) for n in HOSTS}
    ways = Counter(cell.way for cell in drawn)
    assert ways == {way: 3 * count for way, count in Counter(WAYS).items()}
    assert sum(cell.race for cell in drawn) == 12
    assert all(cell.way == OWN for cell in drawn if cell.race)
    assert len({(cell.rate, cell.hosts) for cell in drawn}) == len(HOSTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_and_uses_all_that_it_has(name: str) -> None:
    kind = MODELS[name]
    model = kind.model()
    optimizer = kind.optimizer(model.parameters())
    x, y = kind.batch(torch.Generator().manual_seed(0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    output = model(*x) if isinstance(x, tuple) else model(x)
    loss = kind.loss(output, y)
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    for old, (parameter, new) in zip(before, model.named_parameters(), strict=True):
        assert new.grad is not None, parameter
        assert not torch.equal(old, new), parameter


def test_a_list_of_cells_is_read() -> None:
    assert list(numbers("1-3,7,58-60")) == [1, 2, 3, 7, 58, 59, 60]


def row(number: int, predicted_s: float, **more: object) -> dict[str, object]:
    """A measured cell of 100 ms."""
    terms = {"forward": [0.03, 0.03], "backward": [predicted_s - 0.03, 0.07]}
    return {
        "number": number,
        "model": "gpt",
        "rate": "1gbit",
        "hosts": 4,
        "way": OWN,
        "served": {"replicate:allreduce": 3},
        "predicted_s": predicted_s,
        "step_s": 0.1,
        "error": predicted_s / 0.1 - 1,
        "off": "backward",
        "terms": terms,
        **more,
    }


def test_what_is_measured_is_kept_cell_by_cell(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    assert read(path) == []
    for number in (7, 3, 7):
        add(path, row(number, 0.09))
    assert [found["number"] for found in read(path)] == [3, 7]


def test_figures_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    race = {"own": [0.1, 0.104], "tree": [0.1, 0.1], "ring": [0.2, 0.2]}
    slow = {"own": [0.1, 0.15], "tree": [0.1, 0.1]}
    rows = [row(1, 0.1, race=race), row(2, 0.12, race=slow), row(3, 0.09)]
    summary(rows)
    told = capsys.readouterr().out
    assert "| 2 | gpt | 1gbit | 4 | own | 3 replicate:allreduce | 120 | 100 | +20 % |" in told
    assert "| all  | 3 | 10.0 % | 20.0 % | 20.0 % | +3.3 % |" in told
    assert "within 5 % of the best: 1 of 2" in told
    assert line(row(1, 0.1)).endswith("| backward: 70 for 70 |")
