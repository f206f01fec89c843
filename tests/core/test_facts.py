"""Which ranks are on which host, however they are numbered."""

from __future__ import annotations

from shoal.core.facts import Topology


def test_ranks_by_host() -> None:
    topology = Topology(("b", "a", "b", "b"))
    assert (topology.size, topology.ranks_per_host) == (4, 3)
    assert list(topology.ranks_on.items()) == [("b", (0, 2, 3)), ("a", (1,))]
    assert topology.local_ranks == (0, 0, 1, 2)
    assert topology.apart(0, 1) and not topology.apart(0, 2)
