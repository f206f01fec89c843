"""Counting: every message of every channel, on the rank that moves it."""

from __future__ import annotations

import torch

from shoal.comm.threads import ThreadComm, run
from shoal_tools.testing.byte_counts import Counts, TracedComm


def test_counts_both_directions_over_all_channels() -> None:
    def work(comm: ThreadComm) -> Counts:
        traced = TracedComm(comm)
        lane = traced.channel("lane").channel("within")
        if comm.rank == 0:
            traced.send(torch.empty(3, dtype=torch.float64), to=1).wait()
            lane.send(torch.empty(5, dtype=torch.int8), to=1).wait()
        else:
            traced.receive(torch.empty(3, dtype=torch.float64), source=0).wait()
            lane.receive(torch.empty(5, dtype=torch.int8), source=0).wait()
        return traced.counts

    assert run(2, work) == [Counts(29, 0, 2, 0, bytes_leaving=29), Counts(0, 29, 0, 2)]
    assert run(2, work, hosts="aa") == [Counts(29, 0, 2, 0), Counts(0, 29, 0, 2)]


def test_collectives_are_counted_and_set_up_is_not() -> None:
    def work(comm: ThreadComm) -> Counts:
        traced = TracedComm(comm)
        traced.gather_objects("set-up", "set-up")
        tensor = torch.ones(4)
        traced.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 4
        traced.broadcast(tensor, root=0)
        return traced.counts

    assert run(2, work) == [Counts(32, 16, 3, 2, 32), Counts(16, 32, 2, 3, 16)]


def test_a_wrapper_has_the_journal_of_the_comm_inside() -> None:
    """So the main thread is found to wait in vain, whatever is around its comm."""
    inner = ThreadComm()
    assert TracedComm(inner).journal is inner.journal
    TracedComm(inner).journal.begins("exchange")
    assert inner.journal.record.purpose == "exchange"
    assert not TracedComm(inner).journal.is_waiting()
