"""Codecs that only this file knows: what Shoal promises of any codec, held against these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from made_up import cluster, layer, model
from one_process import (
    Batch,
    State,
    Training,
    adamw,
    assert_same,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    mlp,
    plain,
    rows_of,
    sgd,
    state,
)
from test_strategy import assert_stated
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.codecs.coded_exchange import Coded, read_exchange
from shoal.comm.threads import ThreadComm, run
from shoal.contracts import codec as contract
from shoal.contracts.codec import Codec
from shoal.contracts.exchange import Bucket, Carrier, LiveBucket, Span, StateDict
from shoal.core import registry
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import Topology
from shoal.exchange.direct import Direct
from shoal.front.session_start import using
from shoal.planner.search import search
from shoal.planner.search_options import Constraints
from shoal_tools.testing.byte_counts import TracedComm


@dataclass(frozen=True)
class Toy(Codec):
    """Each value as one of a few levels of the largest in its block."""

    name: ClassVar[str] = "toy"
    block: int = 8
    levels: int = 2

    def nbytes(self, numel: int, itemsize: int) -> int:
        blocks = -(-numel // self.block)
        return numel + blocks * itemsize

    def encode(self, values: Tensor, state: contract.State) -> Tensor:
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

    def nbytes(self, numel: int, itemsize: int) -> int:
        return numel * itemsize

    def encode(self, values: Tensor, state: contract.State) -> Tensor:
        return values.view(torch.uint8)

    def decode(self, code: Tensor, into: Tensor) -> None:
        into.copy_(code.view(into.dtype))


@dataclass(frozen=True)
class Late(Codec):
    """What it was given in the round before; it keeps that itself, so nothing is lost."""

    name: ClassVar[str] = "late"
    feedback: ClassVar[bool] = False

    def nbytes(self, numel: int, itemsize: int) -> int:
        return numel * itemsize

    def encode(self, values: Tensor, state: contract.State) -> Tensor:
        before = state.get("held", torch.zeros_like(values))
        state["held"] = values.clone()
        return before.view(torch.uint8)

    def decode(self, code: Tensor, into: Tensor) -> None:
        into.copy_(code.view(into.dtype))


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registry.registered(Toy, Whole, Late):
        yield


NUMELS = {"first": 37, "second": 1, "third": 20}
NUM_VALUES, NUM_CONTROL = sum(NUMELS.values()), 5
CODECS = ["toy", "toy(block=3, levels=1)", "whole", "late"]


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
    ranks, exchange = len(hosts), read_exchange(f"direct+{codec}")

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
        coded, bare = layout(3), layout(3)
        for bucket, exchange in ((coded, "direct+whole"), (bare, "direct")):
            fill(bucket, values_of(comm.rank), comm.rank)
            carrier = read_exchange(exchange).carrier(bucket)
            carrier.reduce(comm)
            carrier.gather(comm)
            assert carrier.exact and not carrier.state_dict()
        return coded.flat, bare.flat

    for coded, bare in run(3, work, timeout_s=20):
        assert torch.equal(coded, bare)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_constant_gradient_telescopes(layout: Layout) -> None:
    """What is lost comes later: the mean of what was applied goes to the truth as 1/N."""
    truth = sum(values_of(rank) for rank in range(3))

    def work(comm: ThreadComm) -> list[float]:
        bucket = layout(3)
        carrier = read_exchange("direct+toy(levels=1)").carrier(bucket)
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
        carrier = read_exchange("direct+late").carrier(bucket)
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


@pytest.mark.parametrize("codec", ["toy(levels=1)", "late"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_saved_and_restored_by_parameter_name(layout: Layout, codec: str) -> None:
    def rounds(comm: ThreadComm, carrier: Carrier, bucket: LiveBucket, numbers: range) -> Tensor:
        for number in numbers:
            fill(bucket, values_of(comm.rank, number), comm.rank)
            carrier.reduce(comm)
            carrier.gather(comm)
        return bucket.flat.clone()

    def work(comm: ThreadComm) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Mapping[str, Tensor]]]:
        exchange = read_exchange(f"direct+{codec}")
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
        carrier = read_exchange("direct+whole").carrier(bucket)
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
        read_exchange("direct+toy").carrier(even_bucket(2, torch.complex64))


@pytest.mark.parametrize("exchange", ["allreduce", "tree", "nothing", "collective"])
def test_what_adds_up_on_the_way_takes_no_codec(exchange: str) -> None:
    with pytest.raises(PlanError, match=rf'takes no codec(.|\n)*"direct\+toy", or "{exchange}"'):
        read_exchange(f"{exchange}+toy")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("direct+toi", "no codec called 'toi'(.|\n)*did you mean 'toy'"),
        ("direct+toy(blok=3)", "did you mean 'block'"),
        ("direct+toy(block='3')", "wrong type"),
        ("direct+toy+whole", "more than one codec"),
        ("toy(block=3)", r"toy is a codec(.|\n)*write \"direct\+toy\(block=3\)\""),
    ],
)
def test_a_wrong_codec_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        read_exchange(text)


def test_it_is_written_as_it_is_read() -> None:
    coded = read_exchange("direct + toy(block = 3)")
    assert coded == Coded(Direct(), Toy(block=3))
    assert str(coded) == "direct+toy(block=3)" and read_exchange(str(coded)) == coded


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
    key: str = "all"
    kept: Any = None

    def encode(self, values: Tensor, state: contract.State) -> Tensor:
        state[self.key] = values.clone() if self.kept is None else self.kept
        return super().encode(values, state)


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (Liar(), "another code than it stated"),
        (Hoarder(kept=torch.zeros(3)), r"cannot be saved(.|\n)*got: a tensor of shape \(3,\)"),
        (Hoarder(kept=7), r"cannot be saved(.|\n)*got: 7(.|\n)*torch\.zeros_like\(values\)"),
        (Hoarder(key="lost"), "cannot be saved(.|\n)*another key than 'lost'"),
    ],
)
def test_a_codec_that_breaks_its_word_is_refused(codec: Codec, said: str) -> None:
    def work(comm: ThreadComm) -> None:
        Coded(Direct(), codec).carrier(even_bucket(2)).reduce(comm)

    with pytest.raises(UsageError, match=said):
        run(2, work, timeout_s=20)


# a codec in training: the way of a whole script


class Half(nn.Module):
    """A network of which a part has no gradient in some steps, on some ranks or on all."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 5)
        self.head = nn.Linear(5, 3)
        self.seldom = nn.Linear(5, 3)

    def forward(self, x: Tensor, seldom: bool = False) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.seldom(hidden) if seldom else self.head(hidden)


STRATEGIES = ["replicate", "sliced"]


@pytest.mark.parametrize("pin", [f"{name}:direct+toy(block=3)" for name in STRATEGIES])
@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_a_step_sends_the_bytes_that_are_stated(pin: str, hosts: str) -> None:
    assert_stated(pin, hosts)


@pytest.mark.parametrize("uneven", [False, True], ids=["even rows", "uneven rows"])
@pytest.mark.parametrize("way", STRATEGIES)
def test_with_an_exact_codec_training_equals_one_process(way: str, uneven: bool) -> None:
    """Flags, row counts and turns are exact, as values are."""
    training = Training(model=built(mlp), batches=features(7, 3, rows=12), optimizer=adamw)
    assert_same(training, 3, f"{way}:direct+whole", uneven=uneven)


@pytest.mark.parametrize("memory", ["", ", low"])
@pytest.mark.parametrize("uneven", [False, True], ids=["even rows", "uneven rows"])
@pytest.mark.parametrize("codec", ["toy(levels=7)", "toy(block=1, levels=1)"])
@pytest.mark.parametrize("way", STRATEGIES)
def test_with_a_lossy_codec_replicas_stay_equal_and_near(
    way: str, codec: str, uneven: bool, memory: str
) -> None:
    training = Training(
        model=built(mlp, torch.float32),
        batches=[(x.float(), y) for x, y in features(7, 3, rows=12, steps=12)],
    )
    states = training.on_ranks(3, f"{way}:direct+{codec}{memory}", uneven=uneven)
    assert_same_bits(states)
    alone = training.alone()
    moved, error = difference(state(training.model), alone), difference(alone, states[0])
    assert error < moved / 4, f"{error:.2g} off, of {moved:.2g} that training moved"
    # a block of one value is not changed by a code, but for rounding
    assert error > 1e-4 if codec == "toy(levels=7)" else error < 1e-5


@pytest.mark.parametrize("way", STRATEGIES)
def test_parameters_that_nobody_uses_stay_as_they_are(way: str) -> None:
    def work(comm: ThreadComm) -> tuple[list[bool], dict[str, Tensor]]:
        network, untouched = built(Half, torch.float32), []
        x, y = torch.randn(4, 7) + comm.rank, torch.arange(4) % 3
        with using(comm, cluster_of(3)):
            optimizer = sgd(network.parameters())
            _, loss_fn, _ = shoal.parallelize(
                network,
                F.cross_entropy,
                optimizer,
                sample=((x, True), y),
                pins={"*": f"{way}:direct+toy"},
            )
            for step in range(6):
                before = network.seldom.weight.detach().clone()
                optimizer.zero_grad()
                # all use it, one does, none does
                seldom = step % 3 == 0 or (step % 3 == 1 and comm.rank == 2)
                loss_fn(network(x, seldom), y).backward()
                optimizer.step()
                untouched.append(torch.equal(before, network.seldom.weight))
            return untouched, {k: v.clone() for k, v in network.state_dict().items()}

    results = run(3, work, timeout_s=60)
    for untouched, _ in results:
        assert not untouched[0] and not untouched[1]
    assert_same_bits([got for _, got in results])


@pytest.mark.parametrize("way", STRATEGIES)
def test_a_constant_gradient_moves_parameters_as_far_as_in_one_process(way: str) -> None:
    """Over many steps nothing is lost: with a linear loss and SGD, each step is the same."""

    def work(comm: ThreadComm) -> list[float]:
        network = nn.Linear(11, 4, bias=False)
        nn.init.zeros_(network.weight)
        x = torch.linspace(-1, 1, 33).view(3, 11) * (comm.rank + 1)
        truth = -sum(torch.linspace(-1, 1, 33).view(3, 11).mean(0) * (r + 1) for r in range(3)) / 3
        errors = []
        with using(comm, cluster_of(3)):
            optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
            _, loss_fn, _ = shoal.parallelize(
                network,
                lambda out, _: out.mean(0).sum(),
                optimizer,
                sample=(x, None),
                pins={"*": f"{way}:direct+toy(block=11, levels=1)"},
            )
            for step in range(1, 65):
                optimizer.zero_grad()
                loss_fn(network(x), None).backward()
                optimizer.step()
                errors.append(float((network.weight.detach() / step - truth).abs().max()))
        return errors

    for errors in run(3, work, timeout_s=60):
        assert errors[0] > 0.1
        assert errors[63] < errors[0] / 10 and errors[63] < errors[15] / 2


@pytest.mark.parametrize("way", STRATEGIES)
def test_what_transfers_remember_is_saved_and_restored_by_parameter_name(way: str) -> None:
    batches = [(x.float(), y) for x, y in features(7, 3, rows=12, steps=8)]

    def work(comm: ThreadComm) -> tuple[State, State, State]:
        own = [rows_of(batch, comm.rank, 2) for batch in batches]

        def trained(
            parameters: State, remembered: StateDict | None, steps: list[Batch]
        ) -> tuple[State, StateDict]:
            network = built(mlp, torch.float32)
            network.load_state_dict(parameters)
            with using(comm, cluster_of(2)) as session:
                optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
                _, loss_fn, _ = shoal.parallelize(
                    network,
                    F.cross_entropy,
                    optimizer,
                    sample=own[0],
                    pins={"*": f"{way}:direct+toy(levels=1)"},
                )
                (transfer,) = session.attached[network].engine.transfers
                assert transfer.carrier is not None
                if remembered is not None:
                    transfer.carrier.load_state_dict(remembered)
                plain(network, loss_fn, optimizer, steps)
                return state(network), transfer.carrier.state_dict()

        start = state(built(mlp, torch.float32))
        half, remembered = trained(start, None, own[:4])
        assert set(remembered) == set(start)
        whole, _ = trained(start, None, own)
        resumed, _ = trained(half, remembered, own[4:])
        forgot, _ = trained(half, None, own[4:])
        return whole, resumed, forgot

    for whole, resumed, forgot in run(2, work, timeout_s=60):
        assert_same_bits([whole, resumed])
        assert difference(whole, forgot) > 1e-3


def test_servers_take_it_with_the_exchange_that_they_take() -> None:
    net = model(layer("only", 0.5, 4000))
    plan = search(net, cluster_of(2, servers=1), Constraints(pins={"*": "server:direct+toy"}))
    assert [choice.way for choice in plan.choices] == ["server:direct+toy"]
    with pytest.raises(PlanError, match=r"ring\+toy cannot carry server(.|\n)*one of direct\n"):
        search(net, cluster_of(2, servers=1), Constraints(pins={"*": "server:ring+toy"}))


def test_no_codec_is_planned_unasked() -> None:
    net = model(layer("only", 0.5, 40_000_000))
    plan = search(net, cluster(4, 1e6), Constraints(strategies=["replicate", "sliced"]))
    assert not any("+" in choice.exchange for choice in plan.choices)
    pinned = search(
        net, cluster(4, 1e6), Constraints(pins={"*": "sliced:direct + toy( block = 64 )"})
    )
    assert {choice.exchange for choice in pinned.choices} == {"direct+toy(block=64)"}
    assert pinned.predicted_s < plan.predicted_s / 3  # a quarter of the bytes, and a little more
