"""The heartbeat among threads over a store in memory: who is named, by whom, and who is woken."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore, Store

from shoal.comm import heartbeat
from shoal.comm.beats import Beat, Verdict
from shoal.comm.heartbeat import Heartbeat, StoreHolder
from shoal.comm.pulse import PulseAddress
from shoal.contracts.store_values import Values
from shoal.core.errors import DeadlinePassed, PeerLost, UsageError, WorldError
from shoal.core.facts import Topology
from shoal.core.side_threads import side_threads


class MemoryStore:
    """A store that can go away, or stop answering."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.gone = False
        self.answers = threading.Event()
        self.answers.set()

    def clone(self) -> MemoryStore:
        return self

    def set_timeout(self, timeout: Any) -> None:
        pass

    def set(self, key: str, value: bytes) -> None:
        with self._reached():
            self.values[key] = value

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        expected, value = (v if isinstance(v, bytes) else v.encode() for v in (expected, value))
        with self._reached():
            if self.values.get(key, b"") == expected:
                self.values[key] = value
            return self.values.get(key, expected)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        self.answers.wait()
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        with self.lock:
            yield


def values(store: MemoryStore) -> Values:
    return Values(cast(Store, store), "secret")


LAUNCHER = StoreHolder()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "_BEAT_S": 0.02,
        "_DEAD_S": 0.2,
        "_SILENT_S": 0.6,
        "_FAREWELL_S": 0.5,
    }.items():
        monkeypatch.setattr(heartbeat, name, seconds)


@pytest.fixture
def jumped(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """By how much the clock that all ranks read has jumped, as it does for processes that are
    stopped.
    """
    jump = SimpleNamespace(seconds=0.0)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + jump.seconds, sleep=time.sleep)
    monkeypatch.setattr(heartbeat, "time", clock)
    return jump


@dataclass
class Freed:
    """A channel that nobody sends over, and what is done when its threads are freed."""

    free: Callable[[], object]

    def end(self) -> None:
        pass


class Ranks:
    """Heartbeats of some ranks; `woken` are those who were freed from an exchange. A dead rank beat
    once.
    """

    def __init__(
        self, size: int, dead: tuple[int, ...] = (), holder: StoreHolder = LAUNCHER
    ) -> None:
        self.store = MemoryStore()
        self.woken: set[int] = set()
        self.beating: dict[int, Heartbeat] = {}
        for rank in range(size):
            if rank in dead:
                values(self.store).write(f"beat/{rank}", Beat(1, "forward 3", f"h{rank}"))
            else:
                self.beating[rank] = Heartbeat(
                    values(self.store), rank, Topology(tuple(f"h{r}" for r in range(size))), holder
                )
                self.beating[rank].channels[0] = Freed(partial(self.woken.add, rank))

    def told(self, rank: int, within_s: float = 5.0) -> WorldError:
        """What the rank hears, as it waits somewhere."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            try:
                self.beating[rank].check("forward 5")
            except WorldError as error:
                return error
            time.sleep(0.01)
        raise AssertionError(f"rank {rank} heard nothing in {within_s} s")

    def end(self) -> None:
        self.store.answers.set()
        for beating in self.beating.values():
            beating.leave(None)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(*getattr(request, "param", (3,)))
    yield made
    made.end()


dead_rank_1 = pytest.mark.parametrize("ranks", [(3, (1,))], indirect=True)
beside_the_store = pytest.mark.parametrize(
    "ranks", [(3, (), StoreHolder(beside=(0, 1)))], indirect=True
)
rank_0_holds = pytest.mark.parametrize("ranks", [(3, (), StoreHolder(0))], indirect=True)


def test_nothing_is_told_while_all_live(ranks: Ranks) -> None:
    until = time.monotonic() + 1.0  # more than the silent limit
    while time.monotonic() < until:
        for rank in range(3):
            ranks.beating[rank].check("forward 5")
        time.sleep(0.05)
    assert ranks.woken == set()


def test_a_rank_waits_where_its_own_thread_does(ranks: Ranks) -> None:
    """A side thread says nothing of that, and hears of a lost rank as its own thread does."""
    own, journal = ranks.beating[0], ranks.beating[0].journal
    of_side = journal.note_opening("values", (0, 1, 2), numbered=True)
    of_side.begin("comparing values")
    with side_threads(1, "values") as pool:
        pool.submit(own.check, "comparing values", of_side).result()
        assert journal.wait is None and own.at != "comparing values"
        plan = journal.note_opening("world", (0, 1, 2), numbered=True)
        plan.begin("plan of rank 0")
        own.check("plan of rank 0", plan)
        pool.submit(own.reached, "comparing values").result()
        assert journal.wait is not None and journal.wait.at == own.at == "plan of rank 0"
        ranks.beating[1].leave(KeyError("boom"))
        assert pool.submit(ranks.told, 0).result().rank == 1


@dead_rank_1
def test_a_broken_exchange_names_the_rank_that_stopped_beating_and_all_agree(ranks: Ranks) -> None:
    began = time.monotonic()
    error = ranks.beating[2].judge("Connection closed by peer", None)
    assert time.monotonic() - began < 0.6  # before silence alone would have told
    assert isinstance(error, PeerLost)
    assert error.rank == 1
    assert "rank 1 (host h1) gives no sign of life, last seen at: forward 3" in str(error)
    assert ranks.told(0).what == error.what
    assert ranks.woken == {0, 2}


@dead_rank_1
def test_a_rank_is_looked_at_also_when_the_one_before_it_has_ended(ranks: Ranks) -> None:
    ranks.beating[0].leave(None)
    assert ranks.told(2).rank == 1


@dead_rank_1
def test_who_has_done_its_work_is_not_blamed_for_one_that_died(ranks: Ranks) -> None:
    ranks.beating[0].leave(None)  # as it may: rank 2 needs rank 1 only
    error = ranks.beating[2].judge("Connection closed by peer", None)
    assert error.rank == 1
    assert "rank 1 (host h1) gives no sign of life" in str(error)


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_a_rank_that_is_awaited_is_missed_though_no_exchange_breaks(ranks: Ranks, how: str) -> None:
    began = time.monotonic()
    with ranks.beating[0].awaiting(range(3)):  # rank 2 is not the one that rank 0 looks at else
        ranks.beating[2].leave(None if how == "leaves" else KeyError("boom"))
        error = ranks.told(0)
    assert error.rank == 2
    assert time.monotonic() - began < 2


@dead_rank_1
def test_silence_is_noticed_by_the_rank_before_and_told_to_those_who_only_wait(
    ranks: Ranks,
) -> None:
    began = time.monotonic()
    errors = [ranks.told(rank) for rank in (0, 2)]
    assert time.monotonic() - began > 0.5
    assert [error.rank for error in errors] == [1, 1]
    assert ranks.woken == {0, 2}


def test_who_ends_with_an_error_says_which(ranks: Ranks) -> None:
    ranks.beating[1].leave(KeyError("boom"))
    ranks.beating[2].leave(UsageError("followed from it", do="nothing"))
    error = ranks.told(0)
    assert error.rank == 1
    assert "rank 1 (host h1) failed: KeyError: 'boom'" in error.what


def test_who_is_done_is_missed_only_by_those_who_need_it(ranks: Ranks) -> None:
    ranks.beating[1].reached("after backward 9")
    time.sleep(0.1)
    ranks.beating[1].leave(None)
    time.sleep(1.0)  # more than the silent limit
    ranks.beating[0].check("forward 10")
    error = ranks.beating[0].judge("Connection closed by peer", None)
    assert "rank 1 (host h1) has ended its program, last at: after backward 9" in str(error)


def test_a_deadline_names_who_does_not_wait(ranks: Ranks) -> None:
    ranks.beating[0].check("forward 5")
    ranks.beating[2].check("forward 5, site 1")
    ranks.beating[1].reached("after backward 4")
    time.sleep(0.1)
    error = ranks.beating[0].judge("Timed out", 7.0)
    assert isinstance(error, DeadlinePassed)
    assert error.rank == 1
    assert "within 7 s: rank 0 waited at: forward 5" in error.what
    assert error.got == "absent: rank 1 (last at: after backward 4)"
    assert isinstance(ranks.told(1), DeadlinePassed)  # it hears that itself was missed


def test_a_deadline_on_which_all_wait_names_who_waits_elsewhere(ranks: Ranks) -> None:
    for rank, where in enumerate(["forward 5", "forward 5", "backward 4"]):
        ranks.beating[rank].check(where)
    time.sleep(0.1)
    assert ranks.beating[0].judge("Timed out", 7.0).got == "absent: rank 2 (last at: backward 4)"


def test_an_exchange_may_break_though_all_live(ranks: Ranks) -> None:
    error = ranks.beating[0].judge("Broken pipe", None)
    assert error.rank is None
    assert error.got == "Broken pipe"


@rank_0_holds
@pytest.mark.parametrize("how", ["gone", "stopped"])
def test_a_lost_store_is_the_loss_of_the_rank_that_holds_it(ranks: Ranks, how: str) -> None:
    time.sleep(0.1)
    if how == "gone":
        ranks.store.gone = True
    else:
        ranks.store.answers.clear()
    error = ranks.beating[1].judge("Connection closed by peer", None)
    assert error.rank == 0
    assert "rank 0 (host h0), which held the store" in error.what
    assert ranks.told(2).rank == 0


def test_a_lost_store_of_a_launcher_is_no_ranks_fault(ranks: Ranks) -> None:
    ranks.store.gone = True
    assert "the launcher, which holds the store" in ranks.told(1).what


@beside_the_store
def test_a_lost_store_of_a_launcher_that_ends_with_its_ranks_is_the_loss_of_these(
    ranks: Ranks,
) -> None:
    ranks.store.gone = True
    error = ranks.told(2)
    assert "rank 0, rank 1 (host h0) is gone, with the launcher there" in error.what
    assert error.rank == 0
    assert "the launcher, which holds the store" in ranks.told(0).what  # they know themselves alive


@beside_the_store
def test_a_rank_beside_such_a_store_ends_when_the_others_have_heard_why(ranks: Ranks) -> None:
    ranks.beating[1].leave(KeyError("boom"))
    ranks.store.gone = True  # in the next moment
    assert "rank 1 (host h1) failed: KeyError: 'boom'" in ranks.told(2).what


@rank_0_holds
def test_the_holder_waits_until_the_others_let_go_of_its_store(ranks: Ranks) -> None:
    ranks.beating[0].leave(None)
    ranks.store.gone = True  # its process ends
    time.sleep(1.0)
    ranks.beating[1].check("evaluation")  # nobody is lost as long as nobody needs it
    assert (
        "rank 0 (host h0), which held the store, has ended"
        in ranks.beating[1].judge("Broken pipe", None).what
    )


def test_leaving_frees_threads_that_are_inside_an_exchange(ranks: Ranks) -> None:
    mine = ranks.beating[0]
    mine.busy.add(7)
    mine.channels[0] = Freed(partial(mine.busy.discard, 7))
    mine.leave(None)
    assert not mine.busy


def test_a_verdict_is_heard_in_each_step_and_but_once_beside_training(ranks: Ranks) -> None:
    own = ranks.beating[0]
    own.hear()
    ranks.beating[1].leave(KeyError("boom"))
    assert own._case.closed.wait(5)
    for again in (False, True, True):
        with pytest.raises(PeerLost, match="KeyError: 'boom'"):
            own.hear(again=again)
    own.hear(again=False)


def test_a_verdict_that_the_program_does_not_hear_is_a_line_of_the_log(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "_UNTOLD_S", 0.1)
    ranks.beating[1].leave(KeyError("boom"))
    assert ranks.told(2).rank == 1  # this one hears it
    ranks.beating[0]._server.join(5)
    assert "rank 1 (host h1) failed: KeyError: 'boom'. This rank ends" in caplog.text
    assert len(caplog.records) == 1


@dead_rank_1
def test_a_process_that_has_ended_is_lost_before_silence_alone_tells(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host refuses the connection to its pulse; nothing is exchanged meanwhile."""
    for beating in ranks.beating.values():
        monkeypatch.setattr(beating._judge, "silent_s", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as port:
        address = PulseAddress("127.0.0.1", port.getsockname()[1])
    values(ranks.store).write("pulse/1", address)
    error = ranks.told(2)
    assert error.rank == 1
    assert "gives no sign of life: its process has ended" in str(error)


@dataclass
class SlowToFree:
    """A channel whose threads take a while to free."""

    done: list[str]

    def free(self) -> None:
        time.sleep(0.3)
        self.done.append("freed")

    def end(self) -> None:
        self.done.append("ended")


def test_a_channel_is_not_taken_away_while_the_guard_frees_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.1)  # leaving waits for a thread twice as long
    done: list[str] = []
    ranks.beating[0].channels[0] = SlowToFree(done)
    ranks.store.answers.clear()  # the guard sees it, and the server is stuck
    assert ranks.beating[0]._case.closed.wait(5)
    ranks.beating[0].leave(None)
    assert done == ["freed", "ended"]


def test_all_that_were_stopped_together_blame_nobody(jumped: SimpleNamespace, ranks: Ranks) -> None:
    """As after Ctrl-Z and fg, or when a laptop wakes: no beat is new, yet no rank is lost."""
    for _ in range(3):
        jumped.seconds += 100
        time.sleep(0.1)
    for rank in range(3):
        ranks.beating[rank].check("forward 5")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_rank_has_nobody_to_look_at() -> None:
    alone = Heartbeat(Values(HashStore()), 0, Topology(("h0",)))
    time.sleep(1.2)
    alone.check("forward 5")
    alone.leave(None)


BAD = (b"", b"?", b"\xff" * 100, b'{"count": 10}', b"[" * 100_000, pickle.dumps(Beat(99)))


def write_over(store: MemoryStore, keys: list[str], times: int) -> None:
    """What a stranger does who reaches the store's port: bad values, and copies of sound ones."""
    copies = [value for key, value in store.values.items() if key.startswith("shoal/beat/")]
    for number in range(times):
        for key in keys:
            bad = (*BAD, *copies, b"%d" % number)
            store.set(f"shoal/{key}", bad[number % len(bad)])


KEYS = ["beat/0", "beat/1", "beat/2", "verdict"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_bad_values_in_every_key_end_nothing(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    for beating in ranks.beating.values():  # a hundred beats, of which some are read in time
        monkeypatch.setattr(beating._judge, "silent_s", 2.0)
    until = time.monotonic() + 3.0  # more than that limit
    while time.monotonic() < until:
        write_over(ranks.store, KEYS, 10)
        for rank in range(3):
            ranks.beating[rank].check("forward 5")
    assert ranks.woken == set()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("when", ["before", "behind"])
@dead_rank_1
def test_bad_values_hide_no_lost_rank(ranks: Ranks, when: str) -> None:
    write_over(ranks.store, KEYS, 1000)
    if when == "before":
        time.sleep(0.1)
    error = ranks.beating[2].judge("Connection closed by peer", None)
    assert error.rank == 1
    assert "rank 1 (host h1) gives no sign of life" in str(error)
    write_over(ranks.store, KEYS, 10)
    assert ranks.told(0).rank == 1


@dead_rank_1
def test_who_is_written_over_without_end_is_found_when_an_exchange_breaks(ranks: Ranks) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.001):
            write_over(ranks.store, ["beat/1"], 1)
            ranks.store.set("shoal/beat/1", str(time.monotonic()).encode())

    stranger = threading.Thread(target=write)
    stranger.start()
    try:
        time.sleep(1.0)  # more than the silent limit: it may live
        ranks.beating[0].check("forward 5")
        error = ranks.beating[2].judge("Connection closed by peer", None)
        assert error.rank == 1
    finally:
        stop.set()
        stranger.join()


def test_a_verdict_that_was_written_over_is_put_back_by_who_leaves(ranks: Ranks) -> None:
    ranks.beating[1].leave(KeyError("boom"))
    assert ranks.told(0).rank == 1
    write_over(ranks.store, ["verdict"], 20)
    ranks.beating[0].leave(None)
    assert values(ranks.store).read("verdict", Verdict) is not None
