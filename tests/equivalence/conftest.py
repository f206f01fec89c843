"""One measured step instead of 25: what these tests compare does not depend on how exactly times
are known.
"""

import pytest


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten every profile."""
    monkeypatch.setattr("shoal.profiling.layers._FEWEST", 1)
    monkeypatch.setattr("shoal.profiling.layers._MOST", 1)
