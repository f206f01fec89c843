"""The roll call: who is missing, who is there twice or unlike, and starts that come again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore

from shoal.comm.roll_call import Arrival, RollCall
from shoal.contracts.launcher import Seat
from shoal.contracts.store_values import Values
from shoal.core.errors import MissingRank, RanksDiffer, UsageError

pytestmark = pytest.mark.quick

Outcome = tuple[str, tuple[Arrival, ...]] | Exception


def here(rank: int, size: int, **changed: Any) -> Arrival:
    return replace(Arrival.at(Seat(f"h{rank}"), rank, size), **changed)


class Ranks:
    """Ranks as threads that call the roll in one store, which outlives them."""

    def __init__(self, *, restarts: bool = False) -> None:
        self.values = Values(HashStore())
        self._restarts = restarts
        self._threads = ThreadPoolExecutor(16)

    def come(self, *all_of_them: Arrival, timeout_s: float = 20.0) -> list[Future[Any]]:
        return [
            self._threads.submit(
                RollCall(self.values, each, timeout_s, restarts=self._restarts).take
            )
            for each in all_of_them
        ]

    def die_at(self, turn: int, *some: Arrival) -> None:
        """Ranks come, and are killed after some turns of theirs, one after another in each."""
        rolls = [RollCall(self.values, each, 1.0, restarts=self._restarts) for each in some]
        for each in some:
            self.values.write(f"here/{each.rank}", each)
        for _ in range(turn):
            for roll in rolls:
                roll._turn()


def outcomes(futures: Sequence[Future[Any]]) -> list[Outcome]:
    return [future.exception(30) or future.result() for future in futures]  # type: ignore[misc]


def same_start(futures: Sequence[Future[Any]], ranks: Sequence[Arrival]) -> str:
    """The start that all of them have agreed on, with these ranks and no others."""
    (start, everyone), *others = [future.result(30) for future in futures]
    assert everyone == tuple(ranks)
    assert all(other == (start, everyone) for other in others)
    return str(start)


def test_all_hear_of_all() -> None:
    ranks = [here(rank, 5) for rank in range(5)]
    same_start(Ranks().come(*ranks), ranks)


def test_it_takes_milliseconds_where_all_are_there() -> None:
    took_s = []
    for _ in range(5):  # what else the machine does adds to it, but not always
        began = time.monotonic()
        same_start(
            Ranks().come(*(all_of_them := [here(rank, 4) for rank in range(4)])), all_of_them
        )
        took_s.append(time.monotonic() - began)
        if took_s[-1] < 0.5:
            return
    raise AssertionError(took_s)


@pytest.mark.parametrize("restarts", [False, True])
def test_missing_ranks_are_named_on_all_by_whoever_gives_up_first(restarts: bool) -> None:
    ranks, soon = Ranks(restarts=restarts), 0.3
    waiting = ranks.come(here(0, 4))
    waiting += ranks.come(here(2, 4), timeout_s=soon)
    for error in outcomes(waiting):
        assert isinstance(error, MissingRank)
        assert "2 of 4 ranks did not start within" in str(error)
        assert ": rank 1, rank 3" in str(error)
        assert error.rank == 1


def test_a_missing_rank_0_is_named() -> None:
    (error,) = outcomes(Ranks().come(here(1, 2), timeout_s=0.2))
    assert isinstance(error, MissingRank)
    assert "1 of 2 ranks did not start within 0.2 s: rank 0" in str(error)


def test_who_comes_when_the_others_have_given_up_hears_it_at_once() -> None:
    ranks = Ranks()
    outcomes(ranks.come(here(0, 3), timeout_s=0.1))
    began = time.monotonic()
    (error,) = outcomes(ranks.come(here(1, 3)))
    assert isinstance(error, MissingRank)
    assert time.monotonic() - began < 15, "it waits 20 s for ranks that do not come"


def test_but_not_where_the_launcher_starts_ranks_again() -> None:
    ranks = Ranks(restarts=True)
    outcomes(ranks.come(here(0, 2), timeout_s=0.1))
    again = [here(1, 2), here(0, 2)]
    first = ranks.come(again[0])
    time.sleep(0.3)
    same_start([*first, *ranks.come(again[1])], again[::-1])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"size": 7}, "was started with another WORLD_SIZE"),
        ({"servers": 1}, "was started with another SHOAL_SERVERS"),
        ({"tail": 1}, "was started with another SHOAL_TAIL"),
        ({"problem": "no such interface"}, "cannot take part: no such interface"),
        ({"torch": "2.8.0+cpu"}, "has another version of torch"),
        ({"shoal": "0.0.1"}, "has another version of shoal"),
    ],
    ids=str,
)
@pytest.mark.parametrize("missing", [False, True], ids=["all are there", "one is missing"])
def test_a_rank_that_is_unlike_is_named_at_once_on_all(
    changed: dict[str, Any], said: str, missing: bool
) -> None:
    ranks = [here(rank, 3 + missing) for rank in range(3)]
    if changed.keys() & vars(ranks[2].versions).keys():
        changed = {"versions": replace(ranks[2].versions, **changed)}
    ranks[2] = replace(ranks[2], **changed)
    began = time.monotonic()
    *others, unlike = outcomes(Ranks().come(*ranks))
    assert time.monotonic() - began < 15, "they wait 20 s for ranks that do not come"
    for error in others:
        assert isinstance(error, RanksDiffer)
        assert f"rank 2 (host h2) {said}" in str(error)
        assert error.rank == 2
    assert isinstance(unlike, RanksDiffer)


@pytest.mark.parametrize("restarts", [False, True])
def test_who_comes_when_the_others_have_refused_a_rank_hears_which(restarts: bool) -> None:
    ranks = Ranks(restarts=restarts)
    outcomes(ranks.come(here(0, 3), here(2, 3, problem="no such interface")))
    began = time.monotonic()
    waits_s = 1.0 if restarts else 20.0  # with restarts an earlier start may be meant
    (error,) = outcomes(ranks.come(here(1, 3), timeout_s=waits_s))
    assert "rank 2 (host h2) cannot take part: no such interface" in str(error)
    assert error.rank == 2  # type: ignore[union-attr]
    assert restarts or time.monotonic() - began < 15


def test_how_torch_was_built_does_not_matter() -> None:
    ranks = [here(0, 2), here(1, 2)]
    versions = replace(ranks[1].versions, torch=ranks[1].versions.torch.partition("+")[0] + "+cu1")
    ranks[1] = replace(ranks[1], versions=versions)
    same_start(Ranks().come(*ranks), ranks)


def test_a_rank_that_the_others_do_not_count_is_told() -> None:
    ranks = Ranks()
    same_start(ranks.come(*(two := [here(0, 2), here(1, 2)])), two)
    (error,) = outcomes(ranks.come(here(2, 3)))
    assert isinstance(error, RanksDiffer)
    assert "another WORLD_SIZE" in str(error)


def test_of_two_processes_with_one_rank_the_newer_stays() -> None:
    ranks = Ranks()
    older = ranks.come(here(1, 3))
    time.sleep(0.1)
    newer = here(1, 3, pid=4711)
    waiting = ranks.come(newer)
    (error,) = outcomes(older)
    assert isinstance(error, UsageError)
    assert "there is a rank 1 already" in str(error)
    assert "process 4711 on host h1, which came at " in str(error)
    others = [here(0, 3), here(2, 3)]
    same_start([*waiting, *ranks.come(*others)], [others[0], newer, others[1]])


def test_a_second_process_of_a_rank_is_told_when_the_job_runs() -> None:
    ranks = Ranks()
    same_start(ranks.come(*(two := [here(0, 2), here(1, 2, pid=4711)])), two)
    (error,) = outcomes(ranks.come(here(1, 2)))
    assert isinstance(error, UsageError)
    assert "there is a rank 1 already" in str(error)
    assert "process 4711" in str(error)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("earlier", [(0, 1, 2), (0, 1), (1, 2), (0,), (2,)], ids=str)
@pytest.mark.parametrize("turn", [0, 1, 2, 3])
def test_ranks_that_come_again_start_together_whatever_an_earlier_start_has_left(
    order: tuple[int, ...], earlier: tuple[int, ...], turn: int
) -> None:
    ranks = Ranks(restarts=True)
    ranks.die_at(turn, *(here(rank, 3) for rank in earlier))
    again = [here(rank, 3) for rank in range(3)]
    waiting = []
    for rank in order:
        waiting += ranks.come(again[rank])
        time.sleep(0.05)
    same_start(waiting, again)


def test_a_start_is_another_each_time() -> None:
    ranks = Ranks(restarts=True)
    starts = {
        same_start(ranks.come(*some), some)
        for some in ([here(rank, 2) for rank in range(2)] for _ in range(4))
    }
    assert len(starts) == 4


def test_more_or_fewer_ranks_may_come_again() -> None:
    ranks = Ranks(restarts=True)
    for size in (3, 2, 4):
        some = [here(rank, size) for rank in range(size)]
        first = ranks.come(*some[::-1][:1])  # the last rank, before rank 0
        time.sleep(0.05)
        futures = ranks.come(*some[:-1])
        same_start([*futures, *first], some)


def test_values_of_a_stranger_are_written_over_or_told_of() -> None:
    ranks = Ranks()
    ranks.values.store.set("shoal/here/0", "?")
    ranks.values.store.set("shoal/here/1", b"\x80\x04\x95")
    ranks.values.store.set("shoal/call", "[")
    ranks.values.store.set("shoal/go", "go")
    ranks.values.store.set("shoal/over", '{"missing": 1}')
    (error,) = outcomes(ranks.come(here(0, 2), timeout_s=0.2))
    assert isinstance(error, MissingRank)
    assert "a stranger's, in place of ranks 1" in str(error)
