"""A feature stands in its own files: few others name it."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from shoal.contracts.feature import Feature
from shoal.core.registry import of

SOURCE = Path(__file__).parents[2] / "src"
MOST = 3  # other files that may name a feature: the plan, the signature, what reads older files
# The files that do a feature's work, beside those in features/.
OWN = {
    "check_every": ["engine/replicas.py"],
    "local_steps": [
        *("core/outer_step.py", "front/fast.py", "planner/local*.py", "strategies/*", "servers/*")
    ],
    "replan": ["front/replan.py", "session/replan_record.py"],
    "residuals": ["codecs/*", "contracts/exchange.py", "optim/residuals.py", "servers/*"],
    "staleness": ["servers/*", "session/server_part.py", "remote/*", "strategies/*"],
    "stragglers": ["engine/stragglers.py"],
    "sync_batchnorm": ["strategies/sync_batchnorm.py", "tensors/sync_norm.py"],
}


def others(name: str) -> list[str]:
    """The files that name a feature and are not its own."""
    word, found = re.compile(rf"\b{name}\b"), []
    for path in sorted(SOURCE.rglob("*.py")):
        file = str(path.relative_to(SOURCE)).removeprefix("shoal/")
        own = ["features/*", *OWN.get(name, [])]
        if not any(fnmatch(file, pattern) for pattern in own) and word.search(path.read_text()):
            found.append(file)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(of(Feature)))
def test_few_other_files_name_a_feature(name: str) -> None:
    assert len(others(name)) <= MOST, others(name)


def test_a_name_that_everybody_uses_is_found() -> None:
    assert len(others("engine")) > MOST
