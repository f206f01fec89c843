"""Lanes: errands in order, errors kept for who waits, and an end behind what is under way where a
rank gives up.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from torch import nn

from shoal.comm.threads import ThreadComm, run
from shoal.contracts.comm import Comm
from shoal.core.errors import WorldError
from shoal.engine.lanes import Lane, streaming
from shoal.engine.weights import Weigher
from shoal.front.session_start import using
from shoal.servers.servers import Servers
from shoal.session.session import Session, Threads


def test_an_abandoned_lane_ends_behind_what_it_is_doing() -> None:
    lane, begun, may_end, done = (
        Lane(ThreadComm(), "lane"),
        threading.Event(),
        threading.Event(),
        [],
    )

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
            session.threads[0] = Threads(
                ref(nn.Identity()), [Lane(comm, "lane")], Weigher(comm), None, lambda: None
            )
            session.others = (Servers(comm),)
            raise ValueError("a mistake of the script")

    with pytest.raises(ValueError, match="a mistake"):
        run(1, work)
    (session,), each = sessions, sessions[0].threads[0]
    servers = session.other(Servers)
    assert servers is not None
    for lane in (*each.lanes, each.counts._lane, servers._lane):
        assert lane is not None
        lane._thread.join(timeout=5)
        assert not lane._thread.is_alive()


def test_an_error_that_nobody_waited_for_is_raised_at_the_end() -> None:
    def fail(comm: Comm) -> None:
        raise ValueError("the last update failed")

    heard, unheard = Lane(ThreadComm(), "lane"), Lane(ThreadComm(), "lane")
    errand = heard.run(fail, "update")
    with pytest.raises(ValueError, match="the last update failed"):
        errand.wait("a step")
    heard.drain()  # it was said already
    unheard.run(fail, "update")
    with pytest.raises(ValueError, match="the last update failed"):
        unheard.drain()
    for lane in (heard, unheard):
        lane.close()


class Stream:
    """Stands for a GPU's, on which there is only one order: that of the calls."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device, self.moments = name, log, torch.device("cuda"), 0

    def record_event(self) -> str:
        """A moment on this stream."""
        self.moments += 1
        return f"{self.name} {self.moments}"

    def wait_event(self, event: str) -> None:
        """What comes now waits for that moment."""
        self.log.append(f"{self.name} waits for {event}")


def test_on_a_gpu_a_lane_waits_for_what_was_computed_when_it_was_asked_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    current = threading.local()
    main = Stream("main", log)
    monkeypatch.setattr(torch, "Stream", lambda device: Stream("lane", log))
    monkeypatch.setattr(
        torch.accelerator, "set_stream", lambda stream: setattr(current, "stream", stream)
    )
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: getattr(current, "stream", main)
    )
    lane, may_begin = Lane(ThreadComm(), "lane", torch.device("cuda")), threading.Event()

    lane.run(lambda comm: (may_begin.wait(), log.append("first"))[1], "first")
    second = lane.run(lambda comm: log.append("second"), "second")
    main.record_event()  # backward goes on
    may_begin.set()
    second.wait("a test")
    log.append("main goes on")
    second.wait("a test")  # an error there would come again, and so does this
    lane.close()

    assert log == [
        "lane waits for main 1",
        "first",
        "lane waits for main 2",
        "second",
        "main waits for lane 2",
        "main goes on",
        "main waits for lane 2",
    ]


def test_a_drained_lane_is_waited_for_on_the_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what NCCL carries is only queued when the lane has done with it."""
    ended = [True, False, False]  # what the GPU says, the last first
    moment = SimpleNamespace(query=ended.pop)
    stream = SimpleNamespace(record_event=lambda: moment, wait_event=lambda event: None)
    monkeypatch.setattr(torch, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    lane = Lane(ThreadComm(), "lane", torch.device("cuda"))
    lane.drain()
    assert not ended
    lane.close()


def test_on_a_cpu_a_lane_has_no_stream() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    assert streaming([cpu, cpu]) is None and streaming([]) is None
    assert streaming([cpu, gpu, cpu]) == gpu, "a table on the host, say, and all else on a GPU"
    lane = Lane(ThreadComm(), "lane")
    errand = lane.run(lambda comm: None, "nothing")
    errand.wait("a test")
    assert errand._queued is errand._computed is None
    lane.close()


class LateMoment:
    """A moment of a device that has come at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 2


def test_who_has_waited_for_the_device_waits_no_longer() -> None:
    def work(comm: ThreadComm) -> object:
        channel = comm.channel("lane")
        errand = Lane(channel, "lane").run(lambda comm: None, "the end")
        errand.wait("the end")
        errand._computed = LateMoment()  # type: ignore[assignment]
        errand.finish("the end")
        return comm.hub.journals[comm.rank].wait

    assert run(2, work, timeout_s=10) == [None, None]
