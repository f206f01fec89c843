"""What every Comm promises, as cases that each rank runs. As a script: one rank of a process group.

python comm_cases.py OUT CASE …     writes what failed here to OUT/RANK, as {case: error}
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.comm.process_group import join
from shoal.comm.rendezvous import seat
from shoal.contracts.comm import Comm
from shoal.core.cost import Pace, Price
from shoal.core.errors import DeadlinePassed, PeerLost, RanksDiffer, WorldError
from shoal_tools.testing.byte_counts import TracedComm

HOSTS = "aab"
RANKS = len(HOSTS)


def values(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What a rank brings: whole numbers, of which every sum is exact."""
    return (torch.arange(numel) + 10 * rank).to(dtype)


def neighbours(comm: Comm) -> tuple[int, int]:
    """The rank before this one, and the rank after it."""
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def receives_match_sends_in_the_order_they_were_posted(comm: Comm) -> None:
    """Whatever the order in which they are waited for."""
    before, after = neighbours(comm)
    landed = [torch.zeros(2) for _ in range(3)]
    receives = [comm.receive(tensor, before) for tensor in landed]
    sent = [torch.full((2,), 10.0 * comm.rank + number) for number in range(3)]
    sends = [comm.send(tensor, after) for tensor in sent]
    for pending in (*reversed(receives), *reversed(sends)):
        pending.wait()
    assert [int(tensor[0]) for tensor in landed] == [10 * before + number for number in range(3)]


def reduce_scatter_sums_each_slice_at_its_owner(comm: Comm) -> None:
    """Also slices of unlike sizes, and one that is empty."""
    sizes = [3, 0, 5]
    slices = [values(comm.rank, size) for size in sizes]
    comm.reduce_scatter(slices)
    expected = sum(values(rank, sizes[comm.rank]) for rank in range(comm.size))
    assert torch.equal(slices[comm.rank], expected)


def collectives_take_tensors_of_the_host(comm: Comm) -> None:
    assert comm.carries(torch.device("cpu"))
    assert not comm.carries(torch.device("meta"))


def a_tensor_may_be_changed_when_its_send_has_been_waited_for(comm: Comm) -> None:
    before, after = neighbours(comm)
    sent, landed = values(comm.rank, 1000), torch.empty(1000, dtype=torch.float64)
    receiving = comm.receive(landed, before)
    comm.send(sent, after).wait()
    sent.fill_(-1)
    receiving.wait()
    assert torch.equal(landed, values(before, 1000))


def every_type_of_number_travels(comm: Comm) -> None:
    before, after = neighbours(comm)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32):
        landed = torch.empty(5, dtype=dtype)
        receiving = comm.receive(landed, before)
        comm.send(values(comm.rank, 5, dtype), after).wait()
        receiving.wait()
        assert torch.equal(landed, values(before, 5, dtype)), dtype


def channels_do_not_mix_even_under_one_name(comm: Comm) -> None:
    before, after = neighbours(comm)
    first, second = comm.channel("lane"), comm.channel("lane")
    landed = torch.zeros(2, 1)
    receives = [lane.receive(landed[i], before) for i, lane in enumerate((first, second))]
    sends = [
        lane.send(torch.tensor([number]), after) for lane, number in ((second, 2.0), (first, 1.0))
    ]
    for pending in (*receives, *sends):
        pending.wait()
    assert landed.flatten().tolist() == [1.0, 2.0]
    for lane in (first, second, second):  # closing twice is closing once
        lane.close()


def threads_may_each_use_a_channel_of_their_own(comm: Comm) -> None:
    lanes, sums = [comm.channel(f"lane{i}") for i in range(3)], torch.zeros(3)

    def exchange(number: int) -> None:
        for _ in range(10):
            one = torch.ones(1)
            lanes[number].all_reduce(one)
            sums[number] += one[0]

    threads = [threading.Thread(target=exchange, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums.tolist() == [10.0 * comm.size] * 3


def all_reduce_gives_the_sum_and_the_same_bits(comm: Comm) -> None:
    for numel in (1, 2, 7, 1000):
        for dtype in (torch.float64, torch.float32, torch.int64):
            total = values(comm.rank, numel, dtype)
            comm.all_reduce(total)
            expected = sum(values(rank, numel, dtype) for rank in range(comm.size))
            assert torch.equal(total, expected), (numel, dtype)
    uneven = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))
    comm.all_reduce(uneven)
    bits = uneven.numpy().tobytes()
    assert comm.gather_objects(bits, "set-up") == [bits] * comm.size


def all_gather_and_all_to_all_take_tensors_of_any_sizes(comm: Comm) -> None:
    gathered = [torch.empty(2 * rank, dtype=torch.float64) for rank in range(comm.size)]
    comm.all_gather(gathered, values(comm.rank, 2 * comm.rank))
    for rank, tensor in enumerate(gathered):
        assert torch.equal(tensor, values(rank, 2 * rank))
    given = [values(10 * comm.rank + to, to) for to in range(comm.size)]
    got = [torch.empty(comm.rank, dtype=torch.float64) for _ in range(comm.size)]
    finish = comm.start_all_to_all(got, given)
    finish()
    for rank, tensor in enumerate(got):
        assert torch.equal(tensor, values(10 * rank + comm.rank, comm.rank))


def broadcast_copies_any_roots_tensor(comm: Comm) -> None:
    for root in range(comm.size):
        tensor = values(comm.rank, 5)
        comm.broadcast(tensor, root)
        assert torch.equal(tensor, values(root, 5))


def gathered_objects_are_copies_in_rank_order(comm: Comm) -> None:
    own = [comm.rank]
    everyone = comm.gather_objects(own, "set-up")
    own.append(-1)
    assert everyone == [[rank] for rank in range(comm.size)]


def gathered_objects_may_be_long_on_some_ranks_and_hold_tensors(comm: Comm) -> None:
    for length in (1, 900, 1000, 1016, 1017, 5000):
        texts = ["x" * (length if rank == comm.size - 1 else 0) for rank in range(comm.size)]
        assert comm.gather_objects(texts[comm.rank], "set-up") == texts
    own = {"step": torch.tensor(float(comm.rank)), "sums": [values(comm.rank, 1000)]}
    for rank, state in enumerate(comm.gather_objects(own, "set-up")):
        assert state["step"].item() == rank
        assert torch.equal(state["sums"][0], values(rank, 1000))


def gathered_dataclasses_are_those_that_a_rank_names(comm: Comm) -> None:
    own = Pace(Price(0.5, 1.0), Price(0.25, 0.0)) if comm.rank == 0 else None
    assert comm.gather_objects(own, "set-up", Pace)[0] == Pace(Price(0.5, 1.0), Price(0.25, 0.0))
    assert comm.gather_objects(comm.rank, "set-up") == list(range(comm.size))


def numbers_are_told_and_who_does_something_else_is_named(comm: Comm) -> None:
    told = comm.numbers([10 * comm.rank + to for to in range(comm.size)], "rows of layer head")
    assert told == [10 * rank + comm.rank for rank in range(comm.size)]
    with pytest.raises(RanksDiffer, match=r"rank \d does something else than rank \d") as differ:
        comm.numbers([0] * comm.size, "step 2" if comm.rank == 1 else "step 1")
    assert "step 1" in str(differ.value) and "step 2" in str(differ.value)


def empty_tensors_cross(comm: Comm) -> None:
    before, after = neighbours(comm)
    empty = torch.empty(0)
    receiving = comm.receive(torch.empty(0), before)
    comm.send(empty, after).wait()
    receiving.wait()
    comm.all_reduce(empty)
    comm.broadcast(empty, 0)
    comm.all_gather([torch.empty(0) for _ in range(comm.size)], empty)


def groups_count_their_ranks_from_0(comm: Comm) -> None:
    """Only those that are in one make it, who have made as many before."""
    for ranks in (range(2), range(2, 3), range(comm.size), (0, 2)):
        if comm.rank in ranks:
            part = comm.group(ranks)
            assert (part.rank, part.size) == (ranks.index(comm.rank), len(ranks))
            assert part.topology.hosts == tuple(comm.topology.hosts[rank] for rank in ranks)
            assert part.gather_objects(comm.rank, "set-up") == list(ranks)
            total = torch.ones(1)
            part.channel("lane").all_reduce(total)
            assert total.item() == len(ranks)


def ranks_know_each_others_hosts_on_every_channel(comm: Comm) -> None:
    wrapped = TracedComm(comm)
    for each in (comm, comm.channel("a"), wrapped, wrapped.channel("b")):
        assert each.topology.hosts == tuple(HOSTS)
        assert each.workers == comm.size
        assert sorted([each.rank, *each.others]) == list(range(comm.size))


def counted_bytes_are_those_of_the_messages(comm: Comm) -> None:
    traced = TracedComm(comm)

    def sent_by(step: Callable[[], object]) -> tuple[int, int, int]:
        sent, received, leaving = (
            traced.counts.bytes_sent,
            traced.counts.bytes_received,
            traced.counts.bytes_leaving,
        )
        step()
        counts = traced.counts
        return (
            counts.bytes_sent - sent,
            counts.bytes_received - received,
            counts.bytes_leaving - leaving,
        )

    apart = sum(host != HOSTS[comm.rank] for host in HOSTS)
    eight = torch.ones(1, dtype=torch.float64)
    outputs = [torch.empty_like(eight) for _ in range(comm.size)]
    others = comm.size - 1
    assert sent_by(lambda: traced.all_gather(outputs, eight)) == (8 * others, 8 * others, 8 * apart)
    assert sent_by(lambda: traced.numbers([1] * comm.size, "")) == (
        80 * others,
        80 * others,
        80 * apart,
    )
    twelve = torch.ones(12, dtype=torch.float64)
    sent, received, _ = sent_by(lambda: traced.channel("lane").all_reduce(twelve))
    assert sent == received == 2 * 12 * 8 * others // comm.size
    assert sent_by(lambda: traced.group(range(comm.size)).gather_objects("set-up", "set-up")) == (
        0,
        0,
        0,
    )


def what_is_well_is_not_an_error(comm: Comm) -> None:
    comm.reached("step 3")
    comm.check("step 3")
    own = KeyError("of its own")
    assert comm.diagnose(own, "step 3") is own


def an_idle_channel_has_no_deadline_and_any_other_names_who_is_absent(comm: Comm) -> None:
    lane, idle = comm.channel("lane"), comm.channel("idle", idle=True)
    assert lane.timeout_s is not None
    if comm.rank == 0:
        late = torch.zeros(1)
        idle.receive(late, 1).wait()
        assert late.item() == 1.0
        with pytest.raises(DeadlinePassed) as passed:
            lane.receive(torch.empty(1), 1).wait()
        named = comm.diagnose(passed.value, "step 3, bucket 1")
        assert isinstance(named, DeadlinePassed)
        assert "step 3, bucket 1" in str(named)
        comm.leave(named)
        return
    if comm.rank == 1:
        time.sleep(1.5 * lane.timeout_s)
        idle.send(torch.ones(1), 0).wait()
    with pytest.raises(WorldError):  # blocked, and woken
        idle.receive(torch.empty(1), 0).wait()


def who_leaves_for_an_error_is_named_to_all_that_wait(comm: Comm) -> None:
    if comm.rank == 2:
        comm.leave(ZeroDivisionError("of its own"))
        return
    with pytest.raises(PeerLost, match="ZeroDivisionError") as lost:
        comm.receive(torch.empty(1), 1 - comm.rank).wait()
    assert lost.value.rank == 2
    with pytest.raises(PeerLost, match="step 4"):
        comm.check("step 4")


PEACEFUL = {
    case.__name__: case
    for case in (
        receives_match_sends_in_the_order_they_were_posted,
        a_tensor_may_be_changed_when_its_send_has_been_waited_for,
        every_type_of_number_travels,
        channels_do_not_mix_even_under_one_name,
        threads_may_each_use_a_channel_of_their_own,
        all_reduce_gives_the_sum_and_the_same_bits,
        reduce_scatter_sums_each_slice_at_its_owner,
        collectives_take_tensors_of_the_host,
        all_gather_and_all_to_all_take_tensors_of_any_sizes,
        broadcast_copies_any_roots_tensor,
        gathered_objects_are_copies_in_rank_order,
        gathered_objects_may_be_long_on_some_ranks_and_hold_tensors,
        gathered_dataclasses_are_those_that_a_rank_names,
        numbers_are_told_and_who_does_something_else_is_named,
        empty_tensors_cross,
        groups_count_their_ranks_from_0,
        ranks_know_each_others_hosts_on_every_channel,
        counted_bytes_are_those_of_the_messages,
        what_is_well_is_not_an_error,
    )
}
ENDING = {  # after these a world is of no more use
    case.__name__: case
    for case in (
        an_idle_channel_has_no_deadline_and_any_other_names_who_is_absent,
        who_leaves_for_an_error_is_named_to_all_that_wait,
    )
}


def time_out_of(case: str) -> float:
    """Short where a deadline is to pass."""
    return 2.0 if case in ENDING else 60.0


def main(out: str, *cases: str) -> None:
    """Run cases as a rank of a process group, in turn."""
    rank = int(os.environ["RANK"])
    os.environ["SHOAL_HOST"] = HOSTS[rank]
    comm, errors = join(seat(), time_out_of(cases[0]), 60.0), dict[str, str]()
    for case in cases:
        try:
            (PEACEFUL | ENDING)[case](comm)
        except BaseException:
            errors[case] = traceback.format_exc()
    Path(out, str(rank)).write_text(json.dumps(errors))
    comm.leave(None)


if __name__ == "__main__":
    main(*sys.argv[1:])
