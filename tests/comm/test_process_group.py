"""Ranks as processes: joining, or the error that says why not; and an end in silence."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from shoal.comm import process_group
from shoal.comm.process_group import ProcessGroupComm, join
from shoal.comm.rendezvous import seat
from shoal.comm.torch_calls import is_timeout
from shoal.comm.wait_places import Journal
from shoal.contracts.launcher import Job
from shoal.core.errors import MissingRank, UsageError
from shoal.core.facts import Topology
from shoal_tools.launch.local import Local

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")

CHANNELS = """
import os
import torch
from shoal.comm.process_group import join
from shoal.core.errors import RanksDiffer
from shoal.comm.rendezvous import seat

comm = join(seat(), timeout_s=60, start_timeout_s=60)
rank, lane, other = comm.rank, comm.channel("lane"), comm.channel("other")
lane.close()
try:
    comm.channel("mine" if rank == 1 else "ours")
except RanksDiffer as error:
    assert "'mine'" in str(error) and "'ours'" in str(error), error
else:
    raise AssertionError("ranks opened different channels")

import threading, time
if rank == 0:  # a thread of this rank still waits for a message that nobody sends
    threading.Thread(target=lambda: other.receive(torch.zeros(1), 1).wait(), daemon=True).start()
time.sleep(0.2 if rank == 0 else 1.0)
"""

# The script has its own process group already, and ends it before this library can.
GIVEN_GROUP = """
import torch
import torch.distributed as dist
from dataclasses import replace
from shoal.comm.process_group import has_joined, join
from shoal.comm.rendezvous import seat

dist.init_process_group("gloo")
group = dist.group.WORLD
assert has_joined()
place = replace(seat(has_joined=True), host=f"h{dist.get_rank()}")
comm = join(place, timeout_s=60, start_timeout_s=60)
assert comm.topology.hosts == ("h0", "h1")
assert comm.channel("lane").gather_objects(comm.rank, "test") == [0, 1]
assert dist.group.WORLD is group
dist.destroy_process_group()
"""

# What torch.distributed's own threads still hold when the interpreter ends aborts the process, now
# and then.
THREADS = """
import os, threading
import torch
from shoal.comm.process_group import join
from shoal.comm.rendezvous import seat

comm = join(seat(), timeout_s=60, start_timeout_s=60)
comm.channel("lane").gather_objects(1, "test")
comm.group(range(2)).all_reduce(torch.ones(1))
comm.leave(None)
ours = {str(thread.native_id) for thread in threading.enumerate()}
assert set(os.listdir("/proc/self/task")) <= ours
"""

# A rank that ends its program now closes no connection that another still makes.
SLOW = """
import os, time
import torch.distributed as dist
from shoal.comm.process_group import join
from shoal.comm.rendezvous import seat

made, connected = dist.init_process_group, []

def slowly(*args, **kwargs):
    made(*args, **kwargs)
    time.sleep(0.5 if os.environ["RANK"] == "0" else 0.0)
    connected.append(time.monotonic())

dist.init_process_group = slowly
comm = join(seat(), timeout_s=60, start_timeout_s=60)
moments = comm.gather_objects((*connected, time.monotonic()), "test")
assert min(joined for _, joined in moments) >= max(made for made, _ in moments), moments
"""


SCRIPTS = {
    "channels": (CHANNELS, 3),
    "given group": (GIVEN_GROUP, 2),
    "threads": (THREADS, 2),
    "slow": (SLOW, 2),
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """A launcher's store, and the variables of a rank 0 of 3 that lead there."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    values = ("0", "3", "127.0.0.1", str(store.port), "True")
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    yield store


def test_missing_ranks_are_named_within_the_time_and_a_late_one_hears_it_at_once(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    with pytest.raises(
        MissingRank, match=r"2 of 3 ranks did not start within 0\.4 s: rank 1, rank 2"
    ) as error:
        join(seat(), 60, 0.4)
    assert 0.3 < time.monotonic() - began < 2
    assert error.value.rank == 1
    monkeypatch.setenv("RANK", "2")
    began = time.monotonic()
    with pytest.raises(MissingRank, match="2 of 3 ranks"):
        join(seat(), 60, 30)
    assert time.monotonic() - began < 2


def test_a_missing_rank_0_is_named_within_the_time(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # it has ended by now
    free = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    for name, value in {
        "RANK": "1",
        "MASTER_PORT": str(free),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(
        MissingRank, match=f"rank 0 .* did not start within 0.5 s: no answer from 127.0.0.1:{free}"
    ):
        join(seat(), 60, 0.5)
    assert time.monotonic() - began < 2
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_said(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # so rank 0 holds the store itself
    with pytest.raises(UsageError, match=f"cannot listen at 127.0.0.1:{store.port}"):
        join(seat(), 60, 1)


def test_two_processes_with_one_rank_are_told(store: TCPStore) -> None:
    with ThreadPoolExecutor(2) as threads:
        errors = {
            type(each.exception())
            for each in [threads.submit(join, seat(), 60, 0.5) for _ in range(2)]
        }
    # the second one, and the first, which goes on waiting for the others
    assert errors == {UsageError, MissingRank}


@pytest.mark.parametrize(("servers", "tail"), [(0, 2), (1, 1)])
def test_a_tail_that_cannot_be_is_refused(store: TCPStore, servers: int, tail: int) -> None:
    with pytest.raises(UsageError, match="a tail needs two workers"):
        join(replace(seat(), servers=servers, tail=tail), 60, 5)


@pytest.mark.processes
@pytest.mark.parametrize(("script", "ranks"), list(SCRIPTS.values()), ids=list(SCRIPTS))
def test_ranks_exchange_and_end_in_silence(
    script: str, ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    result = Local().launch(Job((sys.executable, "-c", script), ranks))
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert result.exit_codes == (0,) * ranks


class Group:
    """As much of a process group as a comm asks for when it is made."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("given", [None, 300.0, 120.0, 900.0])
def test_a_limit_that_is_given_is_kept_to_whatever_is_predicted(
    given: float | None, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal()
    heartbeat: Any = SimpleNamespace(
        journal=journal, workers=1, channels={}, reached=lambda where: None
    )
    roster: Any = SimpleNamespace(
        interface=None, beside_store=(), topology=Topology(("h",)), values=None, rank=0, size=1
    )
    monkeypatch.setattr(process_group, "meet", lambda *_: roster)
    monkeypatch.setattr(process_group, "Heartbeat", lambda *_: heartbeat)
    monkeypatch.setattr(process_group, "_pulses", lambda *_: None)
    monkeypatch.setattr(process_group, "made", lambda *_: Group())
    monkeypatch.setattr(process_group.dist, "get_process_group_ranks", lambda _: [0])
    monkeypatch.setattr(process_group.dist, "get_world_size", lambda: 1)
    told = ProcessGroupComm, "gather_objects", lambda comm, value, purpose: [value]
    monkeypatch.setattr(*told)
    lane = join(seat(), given, 60).channel("lane")
    lane.journal.expects(7.0)
    lane.journal.begins("exchange")
    journal.waits(lane._record, None, "exchange")
    assert lane.timeout_s == (given or 1800.0)
    assert journal.limit_s() == (70.0 if given is None else None)


def test_a_channel_that_has_ended_can_be_freed_still() -> None:
    """As a thread of the heartbeat may do while its rank ends."""
    ProcessGroupComm.__new__(ProcessGroupComm).free()


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        ("Timed out waiting 300000ms for recv operation to complete", True),
        ("Read error [10.0.0.2]:4000: Connection timed out", False),
        ("Application timeout caused pair closure", False),
    ],
)
def test_a_limit_that_has_passed_is_told_from_a_network_that_gave_up(
    words: str, passed: bool
) -> None:
    assert is_timeout(RuntimeError(f"[gloo/transport/tcp/unbound_buffer.cc:81] {words}")) is passed
