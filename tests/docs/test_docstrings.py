"""The examples of docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pages import PAGES, ROOT

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using
from shoal_tools.launch.lab import Lab


def _is_raised(public: object) -> bool:
    return isinstance(public, type) and issubclass(public, BaseException)


# errors and the end of a server's script are raised, not called
CALLED = [name for name in shoal.__all__ if not _is_raised(getattr(shoal, name))]
NEEDS = {
    "shoal_tools.spark.estimator": "pyspark",
    "shoal.integrations.accelerate": "accelerate",
    "shoal.integrations.accelerate_loaders": "accelerate",
    "shoal.integrations.lightning": "pytorch_lightning",
    "shoal.integrations.lightning_loaders": "pytorch_lightning",
    "shoal.integrations.lightning_package": "pytorch_lightning",
    "shoal.integrations.transformers": "transformers",
}
API = sorted((ROOT / "docs" / "reference").glob("api*.md"))
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def examples() -> Iterator[doctest.DocTest]:
    """Every docstring with an example. `Example (root):` says that it needs a lab."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        needed = NEEDS.get(module.name)
        missing = needed is not None and importlib.util.find_spec(needed) is None
        if not (module.name.endswith("__main__") or missing):
            yield from finder.find(importlib.import_module(module.name))
    yield from finder.find(shoal)


EXAMPLES = {example.name: example for example in examples() if example.examples}


FORKS = "shoal.front.launch.launch"  # a process that has called shoal.init() starts no ranks


def test_an_example_that_starts_ranks_gives_what_it_shows() -> None:
    run_one = (
        "import doctest, shoal; from shoal.front import launch;"
        "(example,) = doctest.DocTestFinder().find(launch.launch, globs={});"
        "result = doctest.DocTestRunner().run(example);"
        "raise SystemExit(result.failed or not result.attempted)"
    )
    assert subprocess.run([sys.executable, "-c", run_one], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {FORKS}))
def test_an_example_gives_what_it_shows(name: str) -> None:
    example = EXAMPLES[name]
    if "Example (root)" in (example.docstring or "") and (os.geteuid() or Lab().missing()):
        pytest.skip("needs root and what a lab is made of")

    def work(comm: ThreadComm) -> doctest.TestResults:
        with using(comm):
            return doctest.DocTestRunner().run(example)

    (results,) = run(1, work)
    assert results.failed == 0 and results.attempted


@pytest.mark.quick
@pytest.mark.parametrize("name", CALLED)
def test_what_is_public_has_an_example(name: str) -> None:
    public = getattr(shoal, name)
    assert f"{public.__module__}.{public.__name__}" in EXAMPLES


def test_the_reference_has_every_public_name_once() -> None:
    entries = re.findall(r"(?m)^::: shoal\.(\w+)$", "\n".join(page.read_text() for page in API))
    assert sorted(entries) == sorted(shoal.__all__)


@pytest.mark.quick
def test_every_test_and_benchmark_that_is_named_exists() -> None:
    named = re.compile(r"\b(?:tests|benchmarks)/[\w/]+\.py")
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (*SOURCES, *PAGES)
        for name in named.findall(path.read_text())
        if not (ROOT / name).is_file()
    }
    assert not missing
