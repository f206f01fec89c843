"""Ranks as threads: messages, collectives, and how failures spread."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor

from shoal.comm.threads import ThreadComm, run
from shoal.contracts.comm import Comm
from shoal.core.errors import DeadlinePassed, PeerLost, RanksDiffer
from shoal.core.facts import Topology
from shoal_tools.testing.byte_counts import TracedComm
from shoal_tools.testing.planned_faults import FaultyComm

SESSION: ContextVar[str] = ContextVar("SESSION", default="none")


def nobody_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_message_arrives_as_it_was_when_sent() -> None:
    def work(comm: Comm) -> list[float]:
        tensor = torch.full((3,), float(comm.rank))
        if comm.rank == 0:
            comm.send(tensor, to=1).wait()
            tensor.fill_(9)
        else:
            comm.receive(tensor, source=0).wait()
        return tensor.tolist()

    assert run(2, work) == [[9.0] * 3, [0.0] * 3]
    assert nobody_left()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_collectives(ranks: int) -> None:
    def work(comm: Comm) -> tuple[Tensor, list[Tensor], Tensor]:
        mine = torch.arange(7, dtype=torch.float64) + comm.rank
        summed = mine.clone()
        comm.all_reduce(summed)
        outputs = [torch.empty(r + 1) for r in range(comm.size)]
        comm.all_gather(outputs, torch.full((comm.rank + 1,), float(comm.rank)))
        comm.broadcast(mine, root=comm.size - 1)
        return summed, outputs, mine

    for summed, outputs, broadcast in run(ranks, work):
        base = torch.arange(7, dtype=torch.float64)
        assert torch.equal(summed, ranks * base + sum(range(ranks)))
        assert [output.tolist() for output in outputs] == [
            [float(r)] * (r + 1) for r in range(ranks)
        ]
        assert torch.equal(broadcast, base + ranks - 1)


def test_alone_everything_is_at_hand() -> None:
    comm, tensor = ThreadComm(), torch.ones(3)
    comm.check("step 3")
    comm.all_reduce(tensor)
    comm.broadcast(tensor, root=0)
    comm.channel("lane").all_reduce(tensor)
    assert (comm.rank, comm.size, tensor.tolist()) == (0, 1, [1.0] * 3)
    assert comm.gather_objects("alone", "set-up") == ["alone"]


def test_ranks_have_contexts_of_their_own() -> None:
    def work(comm: Comm) -> str:
        inherited = SESSION.get()
        SESSION.set(f"rank {comm.rank}")
        comm.gather_objects(None, "set-up")  # all have set theirs
        return f"{inherited}, {SESSION.get()}"

    token = SESSION.set("the caller's")
    try:
        assert run(2, work) == ["none, rank 0", "none, rank 1"]
        assert SESSION.get() == "the caller's"
    finally:
        SESSION.reset(token)


def test_the_cause_is_raised_even_if_an_error_that_names_it_comes_first() -> None:
    named = threading.Event()

    def work(comm: Comm) -> None:
        if comm.rank == 1:
            try:
                raise RanksDiffer("rank 0 cannot go on: of its own", rank=0)
            finally:
                named.set()
        named.wait(10)
        time.sleep(0.05)  # until the error of rank 1 has come
        raise ZeroDivisionError("of its own")

    with pytest.raises(ZeroDivisionError, match="of its own") as raised:
        run(2, work)
    assert raised.value.__notes__ == ["on rank 0 of 2"]


def test_the_first_failure_is_raised_and_the_others_hear_at_once() -> None:
    heard: dict[int, PeerLost] = {}

    def work(comm: Comm) -> None:
        if comm.rank == 2:
            time.sleep(0.05)  # until the others wait
            raise ZeroDivisionError("of its own")
        with pytest.raises(PeerLost) as caught:
            comm.receive(torch.empty(1), source=1 - comm.rank).wait()
        heard[comm.rank] = caught.value
        with pytest.raises(PeerLost):
            comm.send(torch.empty(1), to=2)  # and from now on
        with pytest.raises(PeerLost, match="where: step 3"):
            comm.check("step 3")
        raise caught.value

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="of its own") as raised:
        run(3, work, timeout_s=30)
    assert time.monotonic() - start < 5
    assert raised.value.__notes__ == ["on rank 2 of 3"]
    assert [heard[rank].rank for rank in (0, 1)] == [2, 2]
    assert "rank 2 was lost: ZeroDivisionError" in str(heard[0])
    assert nobody_left()


def test_a_deadline_names_the_absent_rank_and_the_channel() -> None:
    def work(comm: Comm) -> None:
        lane = comm.channel("lane")
        if comm.rank == 0:
            lane.receive(torch.empty(1), source=1).wait()

    with pytest.raises(
        DeadlinePassed, match=r"rank 1 sent nothing to rank 0 within 0.1 s\n.*channel world/lane"
    ) as late:
        run(2, work, timeout_s=0.1)
    assert late.value.rank == 1
    assert nobody_left()


def test_a_rank_that_never_ends_does_not_hold_up_the_failure() -> None:
    release = threading.Event()

    def work(comm: Comm) -> None:
        if comm.rank == 0:
            raise ValueError("of its own")
        release.wait(30)

    with pytest.raises(ValueError) as raised:
        run(2, work, timeout_s=0.1)
    assert raised.value.__notes__[0] == "ranks [1] had not ended 0.1 s later"
    release.set()


def test_tensors_that_do_not_match_are_named() -> None:
    def work(comm: Comm) -> None:
        if comm.rank == 0:
            comm.send(torch.empty(3), to=1).wait()
        else:
            comm.receive(torch.empty(4), source=0).wait()

    with pytest.raises(RanksDiffer, match=r"got: 3 × torch.float32\n  expected: 4 × torch.float32"):
        run(2, work)


def test_diagnose_says_where_the_world_broke_and_leaves_the_rest() -> None:
    def work(comm: Comm) -> BaseException | None:
        if comm.rank == 0:
            return None
        try:
            comm.receive(torch.empty(1), source=0).wait()
        except DeadlinePassed as error:
            return comm.diagnose(error, "step 3, bucket 1")
        return None

    named = run(2, work, timeout_s=0.05)[1]
    assert isinstance(named, DeadlinePassed)
    assert named.rank == 0
    assert "where: step 3, bucket 1 (rank 1, channel world)" in str(named)
    own = KeyError("of its own")
    assert ThreadComm().diagnose(own, "step 3") is own


def test_close_drops_what_was_not_fetched() -> None:
    def work(comm: ThreadComm) -> int:
        lane = comm.channel("lane")
        lane.send(torch.empty(1), to=1 - comm.rank).wait()
        comm.gather_objects(None, "set-up")  # both have sent
        lane.close()
        comm.gather_objects(None, "set-up")  # both have closed
        return sum(channel == lane.name for channel, _, _ in comm.hub._boxes)

    assert run(2, work) == [0, 0]


def test_ranks_know_each_others_hosts_on_every_channel() -> None:
    def work(comm: ThreadComm) -> set[Topology]:
        wrapped = TracedComm(FaultyComm(comm, []))
        return {each.topology for each in (comm, comm.channel("a"), wrapped, wrapped.channel("b"))}

    assert run(3, work, hosts="aba") == [{Topology(("a", "b", "a"))}] * 3
    assert run(2, work) == [{Topology(("thread0", "thread1"))}] * 2


def test_who_is_alone_goes_on_after_it_has_left_for_an_error() -> None:
    comm = ThreadComm()
    comm.leave(ValueError("of the command before"))
    comm.check("the next command")
    assert comm.gather_objects(1, "set-up") == [1]


def test_a_message_is_taken_also_from_a_rank_that_has_left_since() -> None:
    def work(comm: ThreadComm) -> int:
        heard = comm.gather_objects(comm.rank, "set-up")
        comm.leave(ValueError("after the last word")) if comm.rank == 0 else None
        return sum(heard)

    assert run(3, work) == [3, 3, 3]
