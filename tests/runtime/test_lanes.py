"""Lanes: errands in order, errors kept for who waits, and an end behind what is under way where a rank gives up."""

from __future__ import annotations

import threading
from weakref import ref

import pytest
from torch import nn

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import WorldError
from shoal.runtime.lanes import Lane
from shoal.runtime.session import Session, Threads, using
from shoal.runtime.weights import Weigher


def test_an_abandoned_lane_ends_behind_what_it_is_doing() -> None:
    lane, begun, may_end, done = Lane(ThreadComm(), "lane"), threading.Event(), threading.Event(), []

    def slowly(comm: object) -> None:
        begun.set()
        may_end.wait()
        done.append("first")

    first = lane.run(slowly, "first")
    second = lane.run(lambda comm: done.append("second"), "second")
    begun.wait()
    lane.abandon()
    with pytest.raises(WorldError, match="has ended"):
        lane.run(lambda comm: done.append("third"), "third")
    may_end.set()
    first.wait("a test")
    lane._thread.join(timeout=5)
    assert not lane._thread.is_alive() and done == ["first"]
    with pytest.raises(WorldError, match="has ended"):
        second.wait("a test")


def test_a_rank_that_ends_for_an_error_abandons_its_lanes() -> None:
    sessions: list[Session] = []

    def work(comm: ThreadComm) -> None:
        with using(comm) as session:
            sessions.append(session)
            session.threads[0] = Threads(ref(nn.Identity()), [Lane(comm, "lane")], Weigher(None))
            raise ValueError("a mistake of the script")

    with pytest.raises(ValueError, match="a mistake"):
        run(1, work)
    (lane,) = sessions[0].threads[0].lanes
    lane._thread.join(timeout=5)
    assert not lane._thread.is_alive()
