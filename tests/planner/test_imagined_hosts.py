"""Imagined hosts are those that were measured, but for what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up import cluster, layer, model

from shoal.core.cost import Pace, Price
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.foresight import Network
from shoal.planner.imagined_hosts import imagined, stretch

DIRECT = Pace(Price(1.2e-3, 1e-8), Price(3e-4, 2e-9))
RING = Pace(Price(5e-4, 9e-9), Price(1e-4, 1e-9))
MEASURED = replace(
    cluster(4, 125e6, latency_s=2e-4, cores=1.5),
    paces={"direct": DIRECT, "ring": RING},
    moves=DIRECT,
    pack_byte_s=1e-10,
)


def test_as_many_hosts_as_measured_are_those_measured() -> None:
    """So a simulation of them is the planner's own prediction."""
    assert imagined(MEASURED, 4, Network()) == MEASURED


def test_a_byte_takes_longer_on_a_slower_link_and_as_much_of_the_processor() -> None:
    slower = imagined(MEASURED, 4, Network(bytes_per_s=25e6))
    assert slower.link.bytes_per_s == 25e6
    assert slower.paces["ring"].wall == Price(5e-4, pytest.approx(45e-9))
    assert slower.paces["ring"].cpu == RING.cpu


def test_what_is_between_switches_is_shared() -> None:
    assert imagined(MEASURED, 8, Network(oversubscription=5.0)) == imagined(
        MEASURED, 8, Network(bytes_per_s=25e6)
    )


def test_messages_to_more_ranks_take_longer() -> None:
    """Of `direct` a rank sends one to every other; of a ring one, however many ranks there are."""
    more = imagined(MEASURED, 31, Network())
    assert more.paces["direct"].cpu == Price(pytest.approx(3e-3), 2e-9)
    assert more.paces["direct"].wall == Price(pytest.approx(2e-4 + 10 * 1e-3), 1e-8)
    assert more.paces["ring"] == RING
    assert more.moves == more.paces["direct"]


def test_latency_takes_the_place_of_the_measured() -> None:
    far = imagined(MEASURED, 4, Network(latency_s=1e-2))
    assert far.link.latency_s == 1e-2
    assert far.paces["ring"].wall.round_s == pytest.approx(5e-4 + 1e-2 - 2e-4)


def test_ranks_that_shared_a_link_have_one_each() -> None:
    shared = replace(MEASURED, topology=Topology(("one", "one", "other", "other")))
    apart = imagined(shared, 4, Network())
    assert apart.link.bytes_per_s == 2 * 125e6
    assert apart.paces["ring"].wall.byte_s == pytest.approx(RING.wall.byte_s / 2)


def test_links_that_nobody_measured_give_all_that_they_have() -> None:
    alone = Cluster(Topology(("here",)), Link(0.0, float("inf")), 3.0)
    two = imagined(alone, 2, Network(bytes_per_s=1e9))
    assert two.link == Link(1e-4, 1e9, 1e-9)
    assert two.cores_per_rank == 3.0
    assert two.pace("ring").wall == Price(1e-4, 1e-9)


def test_who_computes_longer_does_so_everywhere() -> None:
    profile = model(layer("a", 0.5, 10, needed_s=0.25), forward_s=1.0, backward_s=2.0)
    slow = stretch(profile, 2.0)
    assert (slow.forward_s, slow.backward_s, slow.optimizer_s) == (2.0, 4.0, 1.0)
    assert (slow.layers[0].ready_s, slow.layers[0].needed_s) == (1.0, 0.5)
    assert slow.nbytes == profile.nbytes


def test_a_rank_that_is_said_to_have_a_part_of_a_core_has_it_all_the_time() -> None:
    """Each imagined host is its own. Ranks that took turns are taken to do so again."""
    turns = replace(MEASURED, cores_per_rank=0.5)
    assert imagined(turns, 8, Network()).turn == 0.5
    assert imagined(turns, 8, Network(cores_per_rank=0.25)).turn == 1.0
    quota = replace(turns, steady=True)
    assert imagined(quota, 4, Network()) == quota
