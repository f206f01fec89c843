"""Ways and options that many of these tests are repeated with."""

import pytest
from one_process import SMALL

from shoal.planner.search_options import DEFAULT, SearchOptions


@pytest.fixture(params=["sliced", "sliced, low, small"])
def owned_way(request: pytest.FixtureRequest) -> str:
    """Layers whole and buckets kept; and layers cut into parts whose buckets take memory on their
    way only.
    """
    return str(request.param)


@pytest.fixture(params=["sliced", "sliced, low, small", "server, small"])
def owner_way(request: pytest.FixtureRequest) -> str:
    """As `owned_way`; and layers cut into parts that servers own."""
    return str(request.param)


@pytest.fixture(params=[DEFAULT, SMALL], ids=["whole", "small"])
def search_options(request: pytest.FixtureRequest) -> SearchOptions:
    """Layers whole; and layers that have owners in several transfers, as large ones are."""
    options: SearchOptions = request.param
    return options
