"""How many cores a rank has, and whether it has them all the time."""

from __future__ import annotations

import math

import pytest

from shoal.comm.threads import run
from shoal.core.cores import CORES
from shoal.core.errors import UsageError
from shoal.front import cluster

MACHINE = 4  # cores


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of so many cores, without quotas."""
    monkeypatch.delenv(CORES, raising=False)
    monkeypatch.setattr(cluster, "bound_cores", lambda: MACHINE)
    monkeypatch.setattr(cluster, "quota_cores", lambda: math.inf)


@pytest.mark.parametrize(
    ("ranks", "given", "quota", "found"),
    [
        (2, None, math.inf, (2.0, False, 2)),
        (8, None, math.inf, (0.5, False, 8)),
        (8, "0.25", math.inf, (0.25, True, 8)),
        (8, "0.75", math.inf, (0.5, False, 8)),  # more than there is
        (1, None, 0.5, (0.5, True, 1)),  # a container of its own
        (2, None, 0.5, (0.25, False, 2)),  # one container, whose time they share
    ],
)
def test_a_quota_of_ones_own_is_steady_and_a_share_of_cores_is_not(
    ranks: int,
    given: str | None,
    quota: float,
    found: tuple[float, bool, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "quota_cores", lambda: quota)
    if given is not None:
        monkeypatch.setenv(CORES, given)
    assert run(ranks, cluster._cores) == [found] * ranks


def test_a_launcher_that_gives_no_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES, "some")
    with pytest.raises(UsageError, match="no number of cores"):
        run(2, cluster._cores)
