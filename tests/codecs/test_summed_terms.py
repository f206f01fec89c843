"""Terms that an exchange adds on its way: bytes, bits, what they stand for, what is kept."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

from shoal.codecs.carrier_memory import Remembering
from shoal.codecs.coded_exchange import read_codec, read_exchange
from shoal.codecs.low_rank import LowRank
from shoal.codecs.summed_terms import turns_of
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.exchange import Bucket, LiveBucket
from shoal.core.errors import PlanError
from shoal.core.facts import Topology
from shoal_tools.testing.byte_counts import TracedComm

SHAPES = {"tall": (40, 30), "tiny": (7, 5), "conv": (16, 3, 5, 5), "other": (24, 60)}
NUMELS = {name: prod(shape) for name, shape in SHAPES.items()}
NUM_VALUES, CONTROL = sum(NUMELS.values()), 5
WAYS = ["allreduce+low_rank", "tree+low_rank(rank=2)"]


def numbers(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def bucket_of(ranks: int, dtype: torch.dtype = torch.float32) -> LiveBucket:
    flat = torch.zeros(NUM_VALUES + CONTROL, dtype=dtype)
    return LiveBucket.even(flat, NUMELS, ranks, SHAPES)


def carried(way: str, bucket: LiveBucket) -> Remembering:
    carrier = read_exchange(way).carrier(bucket)
    assert isinstance(carrier, Remembering)
    return carrier


def owed(carrier: Remembering) -> Tensor:
    """What this rank owes of all values."""
    entries = carrier.residuals()
    return torch.cat([entries[name]["gradient"] for name in SHAPES])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hosts", ["ab", "abc", "aab"])
def test_replicas_have_the_same_bits_and_bytes_are_as_stated(way: str, hosts: str) -> None:
    ranks = len(hosts)

    def work(comm: ThreadComm) -> tuple[list[Tensor], int, int]:
        bucket, traced, flats = bucket_of(ranks), TracedComm(comm), []
        carrier = carried(way, bucket)
        for step in range(3):
            bucket.flat[:NUM_VALUES] = numbers(NUM_VALUES, 10 * step + comm.rank)
            bucket.flat[NUM_VALUES:] = torch.arange(CONTROL) + comm.rank
            carrier.reduce(traced)
            carrier.gather(traced)
            flats.append(bucket.flat.clone())
        return flats, traced.counts.bytes_sent, traced.counts.bytes_received

    outcomes = run(ranks, work, timeout_s=20, hosts=hosts)
    sizes = Bucket(
        NUM_VALUES + CONTROL, 4, control=(CONTROL,), shapes=tuple(SHAPES[name] for name in SHAPES)
    )
    stated = read_exchange(way).traffic(sizes, Topology(tuple(hosts)))
    assert max(stated.sent) < read_exchange("allreduce").traffic(sizes, Topology(tuple("ab"))).worst
    for rank, (flats, sent, received) in enumerate(outcomes):
        assert all(torch.equal(a, b) for a, b in zip(flats, outcomes[0][0], strict=True))
        assert (sent, received) == (3 * stated.sent[rank], 3 * stated.received[rank])
    counted = ranks * torch.arange(CONTROL) + sum(range(ranks))
    assert all(torch.equal(flat[NUM_VALUES:], counted.float()) for flat in outcomes[0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_was_sent_and_what_is_lost_are_the_truth_over_300_steps(dtype: torch.dtype) -> None:
    ranks, steps = 3, 300
    given = [numbers(NUM_VALUES, rank).to(dtype) for rank in range(ranks)]

    def work(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        bucket, applied = bucket_of(ranks, dtype), torch.zeros(NUM_VALUES, dtype=torch.float64)
        carrier = carried("allreduce+low_rank", bucket)
        for _ in range(steps):
            bucket.flat[:NUM_VALUES] = given[comm.rank]
            carrier.reduce(comm)
            applied += bucket.flat[:NUM_VALUES]
        return applied, owed(carrier).double()

    outcomes = run(ranks, work, timeout_s=60)
    truth = sum(own.double() for own in given)
    lost = sum(own for _, own in outcomes)
    assert isinstance(truth, Tensor) and isinstance(lost, Tensor)
    # a sum is rounded to the bucket's type in each step
    rounding = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-3}[dtype]
    off = (outcomes[0][0] + lost - steps * truth).norm() / (steps * truth).norm()
    assert off < rounding
    assert 0 < lost.norm() < 0.1 * (steps * truth).norm()


@pytest.mark.parametrize("turn", [0, 1])
def test_a_turn_is_a_product_with_the_common_basis(turn: int) -> None:
    """By hand: M · B · Bᵀ in even turns, B · Bᵀ · M in odd ones, and terms of sums are sums."""
    codec = LowRank(rank=3)
    matrices = [numbers(40 * 30, seed).view(40, 30) for seed in range(2)]
    states = [dict[str, Tensor](), dict[str, Tensor]()]
    terms = [codec.to_terms(m, s, turn) for m, s in zip(matrices, states, strict=True)]
    assert len(terms[0]) == codec.num_terms(40, 30, turn) == 3 * (30 if turn else 40)
    basis = states[0]["basis"]
    torch.testing.assert_close(basis @ basis.T, torch.eye(3), rtol=0, atol=1e-5)
    projector = basis.T @ basis
    expected = [projector @ m if turn else m @ projector for m in matrices]
    left = matrices[0].clone()
    codec.subtract_terms(terms[0], left, states[0], turn)
    torch.testing.assert_close(left, matrices[0] - expected[0], rtol=0, atol=1e-5)
    got = torch.empty(40, 30)
    codec.from_sums(terms[0] + terms[1], got, states[1], turn)
    torch.testing.assert_close(got, expected[0] + expected[1], rtol=0, atol=1e-5)
    assert states[1]["basis"].shape == (3, 40 if turn == 0 else 30), "of the other side, next"


def test_a_gradient_of_that_rank_arrives_whole_after_a_turn() -> None:
    """One step of the power method finds the directions of a matrix of rank 4."""
    truth = numbers(40 * 4).view(40, 4) @ numbers(4 * 30, 1).view(4, 30)
    codec, state, got = LowRank(), dict[str, Tensor](), torch.empty(40, 30)
    for turn in range(2):
        codec.from_sums(codec.to_terms(truth, state, turn), got, state, turn)
    torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-4)


def test_directions_that_were_gone_come_again() -> None:
    codec, state, got = LowRank(), dict[str, Tensor](), torch.empty(40, 30)
    truth = numbers(40 * 4).view(40, 4) @ numbers(4 * 30, 1).view(4, 30)
    for turn in range(6):
        given = torch.zeros(40, 30) if turn < 3 else truth
        codec.from_sums(codec.to_terms(given, state, turn), got, state, turn)
    torch.testing.assert_close(got, truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_overflow_is_seen_by_all_and_not_kept(bad: float) -> None:
    def work(comm: ThreadComm) -> tuple[bool, bool, bool]:
        bucket = bucket_of(2)
        carrier = carried("allreduce+low_rank", bucket)
        bucket.flat[:NUM_VALUES] = numbers(NUM_VALUES, comm.rank)
        if comm.rank == 1:
            bucket.flat[3] = bad
        carrier.reduce(comm)
        seen = not bool(bucket.flat.isfinite().all())
        kept = bool(owed(carrier).isfinite().all())
        bucket.flat[:NUM_VALUES] = numbers(NUM_VALUES, comm.rank)
        carrier.reduce(comm)
        return seen, kept, bool(bucket.flat.isfinite().all())

    assert run(2, work, timeout_s=20) == [(True, True, True)] * 2


def test_what_all_owed_is_given_to_one_and_sent() -> None:
    ranks = 3
    owing = {name: {"gradient": numbers(numel, 5)} for name, numel in NUMELS.items()}

    def work(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        bucket, applied = bucket_of(ranks), torch.zeros(NUM_VALUES, dtype=torch.float64)
        carrier = carried("allreduce+low_rank", bucket)
        bucket.flat[:NUM_VALUES] = numbers(NUM_VALUES, comm.rank)
        carrier.reduce(comm)  # what it owes then is forgotten
        carrier.give(comm.rank, owing)
        for _ in range(4):
            bucket.flat.zero_()
            carrier.reduce(comm)
            applied += bucket.flat[:NUM_VALUES]
        left = torch.zeros(NUM_VALUES)
        for name, entries in carrier.residuals().items():
            start = sum(NUMELS[n] for n in list(NUMELS)[: list(NUMELS).index(name)])
            left[start : start + NUMELS[name]] = entries["gradient"]
        return applied, left.double()

    outcomes = run(ranks, work, timeout_s=20)
    whole = torch.cat([entries["gradient"] for entries in owing.values()]).double()
    assert outcomes[0][0].any()
    torch.testing.assert_close(
        outcomes[0][0] + sum(left for _, left in outcomes), whole, rtol=0, atol=1e-4
    )


def test_beyond_the_bound_all_that_was_lost_goes_with_the_next_sum() -> None:
    ranks, rounds = 2, 101
    given = [numbers(NUM_VALUES, rank) for rank in range(ranks)]

    def work(comm: ThreadComm) -> Tensor:
        bucket, applied = bucket_of(ranks), torch.zeros(NUM_VALUES, dtype=torch.float64)
        carrier = carried("allreduce+low_rank", bucket)
        carrier.most_error = 0.0
        for _ in range(rounds):
            bucket.flat[:NUM_VALUES] = given[comm.rank]
            carrier.reduce(comm)
            applied += bucket.flat[:NUM_VALUES]
        assert carrier.exact and carrier.given_up
        return applied

    for applied in run(ranks, work, timeout_s=60):
        truth = rounds * sum(own.double() for own in given)
        torch.testing.assert_close(applied, truth, rtol=1e-4, atol=1e-3)


def test_messages_are_of_one_length_and_hardly_longer_than_the_mean() -> None:
    codec = LowRank()
    shapes = [(384, 96), (96, 384), (288, 96), (288, 96), (96, 96)]
    begin, length = turns_of(codec, shapes)
    totals = [
        sum(
            codec.num_terms(*shape, first + turn)
            for shape, first in zip(shapes, begin, strict=True)
        )
        for turn in range(2)
    ]
    assert length == max(totals)
    assert sum(totals) == 4 * sum(rows + columns for rows, columns in shapes)
    assert length <= 1.02 * sum(totals) / 2


@pytest.mark.parametrize("text", ["allreduce+int8", "tree+one_bit", "nothing+low_rank"])
def test_what_cannot_be_added_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"takes no codec(.|\n)*direct"):
        read_exchange(text)


def test_its_name_is_as_it_is_written() -> None:
    assert str(read_exchange("allreduce+low_rank(rank=8)")) == "allreduce+low_rank(rank=8)"
    assert str(read_codec("low_rank")) == "low_rank"
