"""Codecs that only this file knows: what Shoal promises of any codec, held against these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from shoal.codecs.coded import Coded, exchange_named
from shoal.comm.threads import ThreadComm, run
from shoal.comm.traced import TracedComm
from shoal.contracts.codec import Codec, State
from shoal.contracts.exchange import Bucket, Carrier, LiveBucket, Span
from shoal.core import registry
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import Topology
from shoal.exchange.direct import Direct


@dataclass(frozen=True)
class Toy(Codec):
    """Each value as one of a few levels of the largest in its block."""

    name: ClassVar[str] = "toy"
    block: int = 8
    levels: int = 2

    def nbytes(self, numel: int, itemsize: int) -> int:
        blocks = -(-numel // self.block)
        return numel + blocks * itemsize

    def encode(self, values: Tensor, state: State) -> Tensor:
        padded = torch.nn.functional.pad(values, (0, -len(values) % self.block))
        blocks = padded.view(-1, self.block)
        largest = blocks.abs().amax(dim=1, keepdim=True)
        steps = (blocks / largest.clamp(min=1e-30) * self.levels).round().to(torch.int8)
        return torch.cat(
            [largest.view(-1).view(torch.uint8), steps.view(-1)[: len(values)].view(torch.uint8)]
        )

    def decode(self, code: Tensor, into: Tensor) -> None:
        blocks = -(-len(into) // self.block)
        largest = code[: blocks * into.itemsize].view(into.dtype)
        steps = code[blocks * into.itemsize :].view(torch.int8)
        scale = largest.repeat_interleave(self.block)[: len(into)]
        into.copy_(steps.to(into.dtype) * scale / self.levels)


@dataclass(frozen=True)
class Whole(Codec):
    """The values' own bytes."""

    name: ClassVar[str] = "whole"
    exact: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def nbytes(self, numel: int, itemsize: int) -> int:
        return numel * itemsize

    def encode(self, values: Tensor, state: State) -> Tensor:
        return values.view(torch.uint8)

    def decode(self, code: Tensor, into: Tensor) -> None:
        into.copy_(code.view(into.dtype))


@dataclass(frozen=True)
class Delay(Codec):
    """What it was given in the round before; it keeps that itself, so nothing is lost."""

    name: ClassVar[str] = "delay"
    feedback: ClassVar[bool] = False

    def nbytes(self, numel: int, itemsize: int) -> int:
        return numel * itemsize

    def encode(self, values: Tensor, state: State) -> Tensor:
        before = state.get("held", torch.zeros_like(values))
        state["held"] = values.clone()
        return before.view(torch.uint8)

    def decode(self, code: Tensor, into: Tensor) -> None:
        into.copy_(code.view(into.dtype))


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registry.registered(Toy, Whole, Delay):
        yield


NUMELS = {"first": 37, "second": 1, "third": 20}
NUM_VALUES, NUM_CONTROL = sum(NUMELS.values()), 5
CODECS = ["toy", "toy(block=3, levels=1)", "whole", "delay"]


def values_of(rank: int, number: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(NUM_VALUES, generator=random)


def even_bucket(ranks: int, dtype: torch.dtype = torch.float32) -> LiveBucket:
    """As `replicate` has it: control at the end of all."""
    flat = torch.zeros(NUM_VALUES + NUM_CONTROL, dtype=dtype)
    return LiveBucket.even(flat, NUMELS, ranks)


def sliced_bucket(ranks: int) -> LiveBucket:
    """As `sliced` has it: control at the end of each slice; the last rank owns nothing."""
    own = (NUM_VALUES // (ranks - 1), NUM_VALUES % (ranks - 1)) if ranks > 1 else (NUM_VALUES, 0)
    sizes = [own[0] + (r < own[1]) for r in range(ranks - 1)] + [0] if ranks > 1 else [NUM_VALUES]
    control = [NUM_CONTROL if size else 0 for size in sizes]
    flat = torch.zeros(sum(sizes) + sum(control))
    even = LiveBucket.even(torch.zeros(NUM_VALUES), NUMELS, 1)
    spans, begin = [], 0
    for size in sizes:
        spans.append(tuple(cut_out(even.spans[0], begin, begin + size)))
        begin += size
    widths = [size + behind for size, behind in zip(sizes, control, strict=True)]
    return LiveBucket(flat, tuple(flat.split(widths)), tuple(spans), NUMELS)


def cut_out(spans: tuple[Span, ...], begin: int, stop: int) -> Iterator[Span]:
    at = 0
    for name, first, last in spans:
        low, high = max(begin - at, first), min(stop - at, last)
        if low < high:
            yield Span(name, low, high)
        at += last - first


def fill(bucket: LiveBucket, values: Tensor, rank: int) -> None:
    """Values one behind the other; control counts, as flags do."""
    begin = 0
    for owner, numel in enumerate(bucket.num_values):
        bucket.values(owner).copy_(values[begin : begin + numel])
        bucket.control(owner).copy_(torch.arange(len(bucket.control(owner))) + 10.0 * rank)
        begin += numel


def values_in(bucket: LiveBucket) -> Tensor:
    return torch.cat([bucket.values(owner) for owner in range(len(bucket.slices))])


Layout = Callable[[int], LiveBucket]
LAYOUTS: list[Layout] = [even_bucket, sliced_bucket]


@pytest.mark.parametrize("hosts", ["a", "ab", "abc", "aabb", "abcde"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS)
def test_replicas_are_equal_control_is_exact_and_bytes_are_as_stated(
    codec: str, layout: Layout, hosts: str
) -> None:
    ranks, exchange = len(hosts), exchange_named(f"direct+{codec}")

    def work(comm: ThreadComm) -> tuple[LiveBucket, TracedComm]:
        bucket, traced = layout(ranks), TracedComm(comm)
        carrier = exchange.carrier(bucket)
        fill(bucket, values_of(comm.rank), comm.rank)
        carrier.reduce(traced)
        carrier.gather(traced)
        return bucket, traced

    outcomes = run(ranks, work, timeout_s=20, hosts=hosts)
    first, _ = outcomes[0]
    if layout is even_bucket:
        bucket = Bucket(len(first.flat), 4, control=(NUM_CONTROL,))
    else:
        widths = tuple(len(part) for part in first.slices)
        control = tuple(len(first.control(rank)) for rank in range(ranks))
        bucket = Bucket(sum(widths), 4, widths, control)
    assert bucket.slice_values(ranks) == list(first.num_values)
    stated = exchange.traffic(bucket, Topology(tuple(hosts)))
    assert stated.sent == tuple(traced.counts.bytes_sent for _, traced in outcomes)
    assert stated.received == tuple(traced.counts.bytes_received for _, traced in outcomes)
    assert (stated.leaving or stated.sent) == tuple(
        traced.counts.bytes_leaving for _, traced in outcomes
    )
    # one message a slice and peer, each way
    slices_owned = sum(bool(len(part)) for part in first.slices)
    assert sum(traced.counts.messages_sent for _, traced in outcomes) == 2 * slices_owned * (
        ranks - 1
    )
    for bucket_of_rank, _ in outcomes:
        assert bucket_of_rank.flat.numpy().tobytes() == first.flat.numpy().tobytes()
        for owner in range(ranks):
            counted = bucket_of_rank.control(owner)
            expected = torch.arange(len(counted)) * ranks + 10.0 * sum(range(ranks))
            assert torch.equal(counted, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exact_codec_gives_what_the_exchange_gives(layout: Layout) -> None:
    def work(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        coded, plain = layout(3), layout(3)
        for bucket, exchange in ((coded, "direct+whole"), (plain, "direct")):
            fill(bucket, values_of(comm.rank), comm.rank)
            carrier = exchange_named(exchange).carrier(bucket)
            carrier.reduce(comm)
            carrier.gather(comm)
            assert carrier.exact and not carrier.state_dict()
        return coded.flat, plain.flat

    for coded, plain in run(3, work, timeout_s=20):
        assert torch.equal(coded, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_constant_gradient_telescopes(layout: Layout) -> None:
    """What is lost comes later: the mean of what was applied goes to the truth as 1/N."""
    truth = sum(values_of(rank) for rank in range(3))

    def work(comm: ThreadComm) -> list[float]:
        bucket = layout(3)
        carrier = exchange_named("direct+toy(levels=1)").carrier(bucket)
        applied, errors = torch.zeros(NUM_VALUES), []
        for step in range(1, 129):
            fill(bucket, values_of(comm.rank), comm.rank)
            carrier.reduce(comm)
            carrier.gather(comm)
            applied += values_in(bucket)
            errors.append(float((applied / step - truth).abs().max()))
        return errors

    for errors in run(3, work, timeout_s=60):
        assert errors[0] > 0.2  # one step alone is far off
        assert errors[127] < errors[0] / 16
        assert errors[127] < errors[31] / 2


def test_without_feedback_a_codec_keeps_what_it_needs_itself() -> None:
    def work(comm: ThreadComm) -> list[Tensor]:
        bucket, seen = even_bucket(2), []
        carrier = exchange_named("direct+delay").carrier(bucket)
        for step in range(4):
            fill(bucket, values_of(comm.rank, step), comm.rank)
            carrier.reduce(comm)
            seen.append(torch.cat([bucket.values(0), bucket.values(1)]))
        return seen

    first, _ = run(2, work, timeout_s=20)
    own = len(even_bucket(2).values(0))
    for step in range(4):  # rank 0 adds its own part of now, and the other's of the step before
        before = values_of(1, step - 1) if step else torch.zeros(NUM_VALUES)
        expected = values_of(0, step) + before
        torch.testing.assert_close(first[step][:own], expected[:own])


@pytest.mark.parametrize("codec", ["toy(levels=1)", "delay"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_saved_and_restored_by_parameter_name(layout: Layout, codec: str) -> None:
    def rounds(comm: ThreadComm, carrier: Carrier, bucket: LiveBucket, numbers: range) -> Tensor:
        for number in numbers:
            fill(bucket, values_of(comm.rank, number), comm.rank)
            carrier.reduce(comm)
            carrier.gather(comm)
        return bucket.flat.clone()

    def work(comm: ThreadComm) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Mapping[str, Tensor]]]:
        exchange = exchange_named(f"direct+{codec}")
        bucket = layout(3)
        carrier = exchange.carrier(bucket)
        rounds(comm, carrier, bucket, range(5))
        saved = carrier.state_dict()
        went_on = rounds(comm, carrier, bucket, range(5, 7))
        again = layout(3)
        restored = exchange.carrier(again)
        restored.load_state_dict(saved)
        resumed = rounds(comm, restored, again, range(5, 7))
        fresh = layout(3)
        forgot = rounds(comm, exchange.carrier(fresh), fresh, range(5, 7))
        return went_on, resumed, forgot, saved

    for went_on, resumed, forgot, saved in run(3, work, timeout_s=30):
        assert torch.equal(went_on, resumed)
        assert not torch.equal(went_on, forgot)
        assert set(saved) == set(NUMELS)
        for name, entries in saved.items():
            assert all(numbers.shape == (NUMELS[name],) for numbers in entries.values())
            assert all(numbers.dtype == torch.float32 for numbers in entries.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_of_numbers_travel_too(dtype: torch.dtype) -> None:
    def work(comm: ThreadComm) -> Tensor:
        bucket = even_bucket(3, dtype)
        carrier = exchange_named("direct+whole").carrier(bucket)
        fill(bucket, values_of(comm.rank).to(dtype), comm.rank)
        carrier.reduce(comm)
        carrier.gather(comm)
        return values_in(bucket)

    expected = sum(values_of(rank).to(dtype).double() for rank in range(3))
    results = run(3, work, timeout_s=20)
    for result in results:
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=0.02)
        assert torch.equal(result, results[0])


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match=r"real numbers(.|\n)*first"):
        exchange_named("direct+toy").carrier(even_bucket(2, torch.complex64))


@pytest.mark.parametrize("exchange", ["allreduce", "tree", "nothing", "ring", "hierarchical"])
def test_what_adds_up_on_the_way_takes_no_codec(exchange: str) -> None:
    with pytest.raises(PlanError, match=rf'takes no codec(.|\n)*"direct\+toy", or "{exchange}"'):
        exchange_named(f"{exchange}+toy")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("direct+toi", "no codec called 'toi'(.|\n)*did you mean 'toy'"),
        ("direct+toy(blok=3)", "did you mean 'block'"),
        ("direct+toy(block='3')", "wrong type"),
        ("direct+toy+whole", "more than one codec"),
    ],
)
def test_a_wrong_codec_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        exchange_named(text)


def test_it_is_written_as_it_is_read() -> None:
    coded = exchange_named("direct + toy(block = 3)")
    assert coded == Coded(Direct(), Toy(block=3))
    assert str(coded) == "direct+toy(block=3)" and exchange_named(str(coded)) == coded


@dataclass(frozen=True)
class Liar(Whole):
    """States other bytes than it gives."""

    name: ClassVar[str] = "liar"

    def nbytes(self, numel: int, itemsize: int) -> int:
        return numel * itemsize + 1


@dataclass(frozen=True)
class Hoarder(Whole):
    """Keeps what no checkpoint could hold by parameter."""

    name: ClassVar[str] = "hoarder"

    def encode(self, values: Tensor, state: State) -> Tensor:
        state["all"] = torch.zeros(3)
        return super().encode(values, state)


@pytest.mark.parametrize(
    ("codec", "said"), [(Liar(), "another code than it stated"), (Hoarder(), "cannot be saved")]
)
def test_a_codec_that_breaks_its_word_is_refused(codec: Codec, said: str) -> None:
    def work(comm: ThreadComm) -> None:
        Coded(Direct(), codec).carrier(even_bucket(2)).reduce(comm)

    with pytest.raises(UsageError, match=said):
        run(2, work, timeout_s=20)
