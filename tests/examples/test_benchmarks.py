"""Every benchmark is a program of today's shoal: names that are gone are found before half an hour
of measuring.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_it_can_be_imported(name, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    spec = spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (
            "timm",
            "torchvision",
            "transformers",
            "matplotlib",
            "pytorch_optimizer",
            "pyspark",
        ):
            raise
        pytest.skip(f"it needs {error.name}, in an environment of its own")
