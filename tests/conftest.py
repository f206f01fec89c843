"""The quick set: of a test's cases as few as show every value of every parameter once.

All other cases of a test are marked `slow`. Of a test that starts processes the quick set has one
case, as these cost seconds. `make test` runs the quick set, `make test-all` everything. A module or
test marked `quick` keeps all of its cases: those are cheap. What takes long by itself is marked
`slow` where it stands.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Hashable, Iterable
from importlib import import_module
from typing import Any

import pytest

from quick_set import showing_all

# What measuring takes in the quick set, where a test does not ask for `exact_times`. Ranks are
# threads, which share a core: each work would be timed over several turns of the others.
BRIEF = {
    "shoal.profiling.timeline._MOST": 3,  # times of a work
    "shoal.profiling.timeline._SHARED_S": 0.0,  # of the same on a shared core
    "shoal.profiling.optimizer._MOST_TIMES": 1,  # copies of a small model's parameters
}
# no test takes a figure that another has measured; processes that it starts, too
os.environ["SHOAL_CACHE"] = "off"
TRIED: dict[Hashable, Any] = {}  # what trials of optimizers have found


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not in the quick set."""
    tests = defaultdict[str, dict[pytest.Item, list[Hashable]]](dict)
    for item in items:
        told = any(item.get_closest_marker(name) for name in ("quick", "slow"))
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not told:
            tests[item.nodeid.partition("[")[0]][item] = values_of(item)
    for cases in tests.values():
        kept = list(cases)[:1] if _starts_processes(cases) else showing_all(cases)
        for case in cases.keys() - set(kept):
            case.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what lasts as long as the run: all modules and cases."""
    gc.freeze()


@pytest.fixture(autouse=True)
def measured_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One measured step instead of up to 200, and so on in the quick set: few tests depend on how
    exactly times are known.
    """
    if request.node.get_closest_marker("exact_times"):
        return
    monkeypatch.setattr("shoal.profiling.steps._MOST", 1)
    if not request.node.get_closest_marker("slow"):
        for name, value in BRIEF.items():
            monkeypatch.setattr(name, value)
        of_codecs = import_module("shoal.codecs.paces")._SECONDS
        for size in of_codecs:
            monkeypatch.setitem(of_codecs, size, 0.0)


@pytest.fixture(autouse=True)
def tried_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the quick set one trial of each kind of PyTorch's own optimizers in a process: of equal
    ones it finds the same.
    """
    if request.node.get_closest_marker("slow"):
        return
    updates = import_module("shoal.profiling.updates")
    really_try = updates._try

    def known(optimizer: Any, group: Any, sparse: bool = False) -> Any:
        kind = type(optimizer)
        is_new = not optimizer.state and all(p.device.type == "cpu" for p in group["params"])
        if not (is_new and kind.__module__.startswith("torch.optim.")):
            return really_try(optimizer, group, sparse)
        told = repr((updates.settings(group), updates.attributes(optimizer)))
        key = kind, kind.step, told, max(p.dim() for p in group["params"]) > 2, sparse
        if key not in TRIED:
            TRIED[key] = really_try(optimizer, group, sparse)
        return TRIED[key]

    monkeypatch.setattr(updates, "_try", known)


def _starts_processes(cases: Iterable[pytest.Item]) -> bool:
    return any(case.get_closest_marker("processes") for case in cases)


def values_of(case: pytest.Function) -> list[Hashable]:
    """A case's parameters: each name with a value that can be compared."""
    return [
        (name, value if isinstance(value, str | int | float) else id(value))
        for name, value in case.callspec.params.items()
    ]
