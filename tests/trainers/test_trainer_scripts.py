"""Public scripts of trainers: few lines changed, each named, and trained as in one process."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from starting import on_ranks
from trainer_scripts import SCRIPTS, authors_text, changed_lines

NEEDS = {
    "accelerate": ("accelerate", "transformers"),
    "lightning": ("pytorch_lightning", "torchmetrics", "jsonargparse"),
    "transformers": ("transformers", "accelerate"),
}
BOUND = {"accelerate": 1e-10, "lightning": 1e-10, "transformers": 1e-6}  # it computes in float32
NAMES = [(trainer, name) for trainer, names in SCRIPTS.items() for name in names]
RANKS = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(900),
]


@pytest.mark.quick
@pytest.mark.parametrize(("trainer", "name"), NAMES)
def test_lines_that_change_are_few(trainer: str, name: str) -> None:
    changed = changed_lines(name)
    assert len(changed) == SCRIPTS[trainer][name] <= 2
    assert all("shoal" in line.lower().removesuffix("# shoal") for line in changed[:1])
    assert "import Shoal" not in authors_text(name)


@pytest.fixture(scope="module", params=SCRIPTS)
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a trainer's scripts in one process, with their authors' lines, and on two ranks."""
    for package in NEEDS[request.param]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, on_ranks("trainer_scripts.py", request.param, folder=folder, timeout=400)


class TestOnRanks:
    """Weights, and all that a script has found."""

    pytestmark = RANKS

    def test_weights_are_those_of_one_process(self, records: Any) -> None:
        trainer, found = records
        for name in SCRIPTS[trainer]:
            for rank in (0, 1):
                weights = found[2, rank][name]["weights"]
                for key, value in found[1, 0][name]["weights"].items():
                    torch.testing.assert_close(weights[key], value, atol=BOUND[trainer], rtol=0)

    def test_what_a_script_finds_is_that_of_one_process(self, records: Any) -> None:
        trainer, found = records
        for name in SCRIPTS[trainer]:
            expected, own = (found[place][name]["found"] for place in ((1, 0), (2, 0)))
            assert _without_times(own) == pytest.approx(_without_times(expected), abs=1e-5), name


def _without_times(found: Any) -> dict[str, Any]:
    """Return numbers of a script, without the seconds and speeds that trainers add."""
    every = found if isinstance(found, list) else [found]
    return {
        f"{number}.{name}": value
        for number, each in enumerate(every)
        for name, value in each.items()
        if not name.endswith(("runtime", "per_second")) and not isinstance(value, list)
    } | {
        f"{number}.{name}.{at}": item
        for number, each in enumerate(every)
        for name, value in each.items()
        if isinstance(value, list)
        for at, item in enumerate(value)
    }
