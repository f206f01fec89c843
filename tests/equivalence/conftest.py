"""One measured step instead of 25: what these tests compare does not depend on how exactly times
are known.
"""

import pytest
from one_process import cut_small


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten every profile."""
    monkeypatch.setattr("shoal.profiling.layers._FEWEST", 1)
    monkeypatch.setattr("shoal.profiling.layers._MOST", 1)


@pytest.fixture(params=["sliced", "sliced, low"])
def owned_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Layers whole and buckets kept; and layers cut into parts whose buckets take memory on their
    way only.
    """
    return _cut_but_for_sliced(request.param, monkeypatch)


@pytest.fixture(params=["sliced", "sliced, low", "server"])
def owner_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As `owned_way`; and layers cut into parts that servers own."""
    return _cut_but_for_sliced(request.param, monkeypatch)


def _cut_but_for_sliced(way: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if way != "sliced":
        cut_small(monkeypatch)
    return way


@pytest.fixture
def cut_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in several transfers, as large ones are."""
    cut_small(monkeypatch)
