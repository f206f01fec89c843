"""The handwritten digits that Spark's tests train on."""

from __future__ import annotations

import importlib
from typing import Any


def load_digits() -> Any:
    """Load them with scikit-learn, which takes seconds to import: only a test that runs pays."""
    return importlib.import_module("sklearn.datasets").load_digits()
