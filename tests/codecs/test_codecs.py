"""Every codec of Shoal's own, held against what each must do: bytes, errors, feedback."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.codecs.carrier import CodedCarrier
from shoal.codecs.coded_exchange import Coded, read_codec, read_exchange
from shoal.codecs.runs import RUN, Runs
from shoal.codecs.top_k import threshold
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.codec import Codec
from shoal.contracts.exchange import Bucket, LiveBucket
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import Topology
from shoal.core.registry import of
from shoal_tools.testing.byte_counts import TracedComm

OWN = sorted(of(Codec))
FED_BACK = [name for name, kind in of(Codec).items() if kind.feedback]
# of normal numbers, by the codec's own arithmetic: half a step of the largest of 256 (about 2.8),
# of 8 and of 11 bits
# of a bit: sqrt(1 - 2/pi) = 0.603; of the largest hundredth: sqrt(1 - 0.085)
ERRORS = {
    "bfloat16": (1e-3, 2.3e-3),
    "float16": (1e-4, 3e-4),
    "int4": (0.09, 0.12),
    "int8": (4e-3, 9e-3),
    "low_rank": (0.97, 1.0),
    "one_bit": (0.59, 0.615),
    "sparse_bits": (0.9, 0.97),
    "top_k": (0.94, 0.97),
}
EXCHANGES = ["direct", "ring", "hierarchical"]


def numbers(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def coded(codec: Codec, values: Tensor) -> tuple[Tensor, Tensor]:
    """The code of values, and what it stands for."""
    runs = Runs(codec)
    code = torch.empty(runs.nbytes(len(values), values.itemsize), dtype=torch.uint8)
    runs.encode(values.clone(), code, None, {})
    back = torch.empty_like(values)
    runs.decode(code, back)
    return code, back


def test_there_are_tests_for_all() -> None:
    assert set(OWN) == set(ERRORS)


@pytest.mark.parametrize("numel", [1, 2, 255, 256, 1000, RUN, RUN + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OWN)
def test_all_ways_to_read_a_code_agree(name: str, dtype: torch.dtype, numel: int) -> None:
    codec, values = read_codec(name), numbers(numel, dtype=dtype)
    code, back = coded(codec, values)
    assert len(code) == Runs(codec).nbytes(numel, dtype.itemsize) < values.nbytes + 36
    assert torch.equal(coded(codec, values)[0], code), "one code for one input"
    added, subtracted = torch.ones_like(values), torch.ones_like(values)
    Runs(codec).decode_add(code, added)
    torch.testing.assert_close(added, 1 + back)
    run = RUN if codec.in_runs else numel
    for begin in range(0, numel, run):
        part, at = subtracted[begin : begin + run], begin // run * codec.nbytes(run, 4)
        codec.decode_subtract(code[at : at + codec.nbytes(len(part), 4)], part)
    torch.testing.assert_close(subtracted, 1 - back)


@pytest.mark.parametrize("name", OWN)
def test_the_error_of_one_code_is_as_by_its_arithmetic(name: str) -> None:
    values = numbers(131_072)
    _, back = coded(read_codec(name), values)
    least, most = ERRORS[name]
    assert least < float((values - back).norm() / values.norm()) < most


@pytest.mark.parametrize("name", OWN)
def test_zeros_stay_zeros(name: str) -> None:
    _, back = coded(read_codec(name), torch.zeros(700))
    assert not back.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", OWN)
def test_an_overflow_is_seen_and_not_kept(name: str, bad: float) -> None:
    """A loss scaler looks for it in the gradient; the round after must be sound again."""
    values = numbers(5000)
    values[77] = bad
    runs, lost = Runs(read_codec(name)), torch.zeros(5000)
    code, back = torch.empty(runs.nbytes(5000, 4), dtype=torch.uint8), torch.empty(5000)
    runs.encode(values, code, lost, {})
    runs.decode(code, back)
    assert not back.isfinite().all()
    assert lost.isfinite().all()
    runs.encode(numbers(5000), code, lost, {})
    runs.decode(code, back)
    assert back.isfinite().all()


@pytest.mark.parametrize("columns", [64, 384, 512, 2048])
def test_a_sample_of_top_k_sees_all_columns_of_a_matrix(columns: int) -> None:
    """Else there are too few candidates, or too many, and all values are sorted."""
    scales = torch.exp(2 * numbers(columns, 1))
    sizes = (numbers(RUN // columns * columns).view(-1, columns) * scales).view(-1).abs()
    number = len(sizes) // 100
    candidates = int((sizes >= threshold(sizes, number, 1.5)).sum())
    assert number <= candidates < 3 * number


def test_float16_sends_what_is_too_large_later() -> None:
    values, lost = torch.tensor([1e5, -3.0]), torch.zeros(2)
    runs, code, back = (
        Runs(read_codec("float16")),
        torch.empty(4, dtype=torch.uint8),
        torch.empty(2),
    )
    runs.encode(values, code, lost, {})
    runs.decode(code, back)
    assert back.tolist() == [65504.0, -3.0]
    assert lost.tolist() == [1e5 - 65504, 0.0]


@pytest.mark.parametrize("name", FED_BACK)
def test_a_constant_gradient_telescopes_over_300_steps(name: str) -> None:
    """What was sent is the truth but for what is lost now, and that grows less than steps do."""
    truth, steps = numbers(600), 300
    runs, lost = Runs(read_codec(name)), torch.zeros(600)
    state: dict[str, Tensor] = {}
    code, sent = torch.empty(runs.nbytes(600, 4), dtype=torch.uint8), torch.zeros(600).double()
    norms, back = [], torch.empty(600)
    for _ in range(steps):
        runs.encode(truth, code, lost, state)
        runs.decode(code, back)
        sent += back
        norms.append(float(lost.norm()))
    torch.testing.assert_close((sent + lost).float(), steps * truth, rtol=1e-4, atol=1e-3)
    assert 0 < max(norms[150:]) < 1.6 * max(norms[:150]), "the mean is nearer after twice the steps"
    assert max(norms) < 80 * float(truth.norm()), "of 300: so the mean is off by less than a third"


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", FED_BACK)
def test_so_it_does_on_ranks_both_ways(name: str, exchange: str) -> None:
    """What was applied is the truth but for what is lost now: the mean goes to it as 1/N."""
    ranks, numel, steps = 3, 600, 300
    truth = sum(numbers(numel, rank).double() for rank in range(ranks))

    def work(comm: ThreadComm) -> list[float]:
        bucket = LiveBucket.even(torch.zeros(numel), {"only": numel}, ranks)
        carrier = read_exchange(f"{exchange}+{name}").carrier(bucket)
        applied, errors = torch.zeros(numel, dtype=torch.float64), []
        for step in range(1, steps + 1):
            bucket.flat.copy_(numbers(numel, comm.rank))
            carrier.reduce(comm)
            carrier.gather(comm)
            applied += bucket.flat
            errors.append(float((applied / step - truth).norm() / truth.norm()))
        return errors

    for errors in run(ranks, work, timeout_s=60):
        assert 0 < errors[-1] < max(errors[30:60]) / 3 + 1e-6


@pytest.mark.parametrize("hosts", ["ab", "abc", "aabb", "aab"])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", OWN)
def test_replicas_have_the_same_bits_and_bytes_are_as_stated(
    name: str, exchange: str, hosts: str
) -> None:
    ranks, numel, control = len(hosts), 1003, 7
    carried = read_exchange(f"{exchange}+{name}")

    def work(comm: ThreadComm) -> tuple[list[Tensor], int, int]:
        flat, flats = torch.zeros(numel + control), []
        bucket = LiveBucket.even(flat, {"one": 3, "other": numel - 3}, ranks)
        carrier, traced = carried.carrier(bucket), TracedComm(comm)
        for step in range(3):
            flat[:numel] = numbers(numel, 10 * step + comm.rank)
            flat[numel:] = torch.arange(control) + comm.rank
            carrier.reduce(traced)
            carrier.gather(traced)
            flats.append(flat.clone())
        return flats, traced.counts.bytes_sent, traced.counts.bytes_received

    outcomes = run(ranks, work, timeout_s=20, hosts=hosts)
    stated = carried.traffic(Bucket(numel + control, 4, control=(control,)), Topology(tuple(hosts)))
    first, _, _ = outcomes[0]
    for rank, (flats, sent, received) in enumerate(outcomes):
        assert all(torch.equal(own, other) for own, other in zip(flats, first, strict=True))
        assert (sent, received) == (3 * stated.sent[rank], 3 * stated.received[rank])
    counted = ranks * torch.arange(control) + sum(range(ranks))
    assert all(torch.equal(flat[numel:], counted.float()) for flat in first)
    truth = sum(numbers(numel, rank) for rank in range(ranks))
    worst = max(ERRORS[name][1], ERRORS[read_codec(name).there.name][1])
    assert float((first[0][:numel] - truth).norm() / truth.norm()) < 3 * worst * ranks**0.5


@pytest.mark.parametrize("exchange", ["direct", "ring"])
def test_an_exact_sum_of_what_codes_stand_for(exchange: str) -> None:
    """By hand, of one step on two ranks: the owner's part is exact, the other's a code of it."""
    codec = read_codec("int8(block=4)")
    values = [numbers(16, rank) for rank in range(2)]

    def work(comm: ThreadComm) -> Tensor:
        flat = values[comm.rank].clone()
        bucket = LiveBucket.even(flat, {"only": 16}, 2)
        Coded(read_exchange(exchange), codec).carrier(bucket).reduce(comm)  # type: ignore[arg-type]
        return bucket.values(comm.rank)

    for rank, got in enumerate(run(2, work, timeout_s=20)):
        own = slice(8 * rank, 8 * rank + 8)
        _, theirs = coded(codec, values[1 - rank][own])
        assert torch.equal(got, values[rank][own] + theirs)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_beyond_the_bound_all_that_was_lost_goes_with_the_next_sum(exchange: str) -> None:
    """What is gathered after it may be parameters: those come as their owner has them."""
    ranks, numel, rounds = 2, 64, 101
    parameters = numbers(numel, 7)
    truth = sum(numbers(numel, rank) for rank in range(ranks))

    def work(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        bucket = LiveBucket.even(torch.zeros(numel), {"only": numel}, ranks)
        carrier = read_exchange(f"{exchange}+one_bit(block=8)").carrier(bucket)
        assert isinstance(carrier, CodedCarrier)
        carrier.most_error, applied = 0.0, torch.zeros(numel // ranks)
        for number in range(rounds):
            bucket.flat.copy_(numbers(numel, comm.rank))
            carrier.reduce(comm)
            if number < rounds - 1:
                carrier.gather(comm)
            applied += bucket.values(comm.rank)
        assert carrier.exact
        bucket.flat.copy_(parameters)
        carrier.gather(comm)
        return applied, bucket.flat

    for rank, (applied, gathered) in enumerate(run(ranks, work, timeout_s=60)):
        own = truth[rank * numel // ranks :][: numel // ranks]
        torch.testing.assert_close(applied, rounds * own, rtol=1e-4, atol=1e-3)
        assert torch.equal(gathered, parameters)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("direct+int9", "no codec called 'int9'(.|\n)*did you mean 'int8'"),
        ("direct+bfloat", "did you mean 'bfloat16'"),
        ("ring+int8(blok=3)", "did you mean 'block'"),
        ("allreduce+int8", "allreduce takes no codec"),
    ],
)
def test_what_there_is_not_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        read_exchange(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int8(block=0)", "from 1 to 65,536"),
        ("int8(block=100000)", "from 1 to 65,536"),
        ("int4(block=3)", "even number"),
        ("one_bit(block=12)", "multiple of 8"),
        ("top_k(share=0.0)", "above 0, and at most 0.5"),
        ("top_k(share=0.9)", "above 0, and at most 0.5"),
        ("low_rank(rank=0)", "rank from 1 to 256"),
        ("low_rank(columns=-1)", "columns of 0 or more"),
    ],
)
def test_options_out_of_range_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_codec(text)


def test_sparse_bits_by_hand() -> None:
    """Of two chunks and a rest: 2 bits are thirds of each chunk's largest."""
    values = torch.zeros(2 * 4096 + 100, dtype=torch.float64)
    values[[5, 4096, 4097, 8191, 8200]] = torch.tensor([-3.0, 6.0, 2.5, -5.0, 0.5]).double()
    codec = read_codec("sparse_bits")
    code, back = coded(codec, values)
    assert len(code) == 2 * (4 + 64 * 12 // 8 + 64 * 2 // 8) + (4 + 16 * 12 // 8 + 16 * 2 // 8)
    assert back[[5, 4096, 4097, 8191, 8200]].tolist() == [-3.0, 6.0, 2.0, -6.0, 0.5]
    with pytest.raises(UsageError, match="2 or 4 bits a value"):
        read_codec("sparse_bits(bits=3)")


def test_sparse_bits_has_the_bytes_that_its_page_says() -> None:
    codec = read_codec("sparse_bits")
    assert round(4 * RUN / codec.nbytes(RUN, 4)) == 141
    four = read_codec("sparse_bits(bits=4)")
    assert 4 * RUN / four.nbytes(RUN, 4) == pytest.approx(124, abs=0.5)
