"""Every codec at the ends of its numbers' range: huge, tiny, zero, not finite, half, complex.

The rule: what is finite stays finite on its way, and what is not is seen by all. A code of numbers
that are 2¹⁰⁰ times as large is that of the numbers, as far as its type holds them.
"""

from __future__ import annotations

import copy

import pytest
import torch
from one_process import Training, assert_same_bits, cluster_of, difference, sgd
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.codecs.carrier import CodedCarrier
from shoal.codecs.coded_exchange import read_codec, read_exchange
from shoal.codecs.runs import Runs
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.codec import Codec
from shoal.contracts.exchange import LiveBucket
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.registry import of
from shoal.front.session_start import using

CODECS = sorted(of(Codec))
NUMEL, ROUNDS = 700, 12
MOST, LEAST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
WIDE = {"1e39": 1e39, "1e200": 1e200, "1e300": 1e300, "1e-60": 1e-60}
SIZES = {"1e20": 1e20, "1e30": 1e30, "1e37": 1e37, "1e-31": 1e-31, "denormal": 1e-40, "zero": 0.0}


def numbers(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)


def kinds(dtype: torch.dtype) -> dict[str, Tensor]:
    """Finite numbers of every size that the type has."""
    sizes = SIZES | (WIDE if dtype == torch.float64 else {})
    most = torch.finfo(dtype).max
    found = {name: size * numbers() for name, size in sizes.items()}
    found["largest"] = most * numbers().sign()
    found["nearly largest"] = 0.99 * most * numbers().sign()
    for name, one in (("one of 1e30", 1e30), ("the largest among small ones", most)):
        found[name] = numbers()
        found[name][5] = one
    return {name: values.to(dtype) for name, values in found.items()}


class Way:
    """A code and what is read of it, round after round."""

    def __init__(self, name: str, keeps: bool, dtype: torch.dtype, numel: int = NUMEL) -> None:
        self._runs, self._state = Runs(read_codec(name)), dict[str, Tensor]()
        nbytes = self._runs.nbytes(numel, dtype.itemsize)
        self._code, self._back = (
            torch.empty(nbytes, dtype=torch.uint8),
            torch.empty(numel).to(dtype),
        )
        self.lost = torch.zeros_like(self._back) if keeps else None

    def read(self, values: Tensor) -> Tensor:
        self._runs.encode(values.clone(), self._code, self.lost, self._state)
        self._runs.decode(self._code, self._back)
        return self._back.clone()


@pytest.mark.parametrize("keeps", [True, False], ids=["lost is kept", "lost is not kept"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CODECS)
def test_what_is_finite_stays_finite(name: str, dtype: torch.dtype, keeps: bool) -> None:
    for kind, values in kinds(dtype).items():
        way = Way(name, keeps, dtype)
        if name == "bfloat16" and not keeps and dtype == torch.float32 and "largest" in kind:
            continue  # it is not looked at: see BFloat16
        for _ in range(ROUNDS):
            assert way.read(values).isfinite().all(), kind
            assert way.lost is None or way.lost.isfinite().all(), kind
        # and sound numbers behind them are as if nothing had been
        assert way.read(numbers(1, dtype)).isfinite().all(), kind


@pytest.mark.parametrize("power", [100, 60, -110])
@pytest.mark.parametrize("name", [name for name in CODECS if name != "float16"])
def test_numbers_that_are_larger_have_codes_that_are_larger(name: str, power: int) -> None:
    plain, scaled = (Way(name, True, torch.float32) for _ in range(2))
    for seed in range(ROUNDS):
        values, factor = numbers(seed, torch.float32), 2.0**power
        expected, got = plain.read(values), scaled.read(values * factor) / factor
        if name == "low_rank":  # whose products are rounded otherwise
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(got, expected)


@pytest.mark.parametrize("name", [name for name in CODECS if read_codec(name).feedback])
def test_what_was_sent_and_what_is_lost_are_the_truth_at_1e30(name: str) -> None:
    way, values = Way(name, True, torch.float32), (1e30 * numbers()).float()
    sent = sum(way.read(values).double() for _ in range(ROUNDS))
    assert way.lost is not None
    torch.testing.assert_close(
        (sent + way.lost.double()) / 1e30, ROUNDS * values.double() / 1e30, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_is_seen(name: str, dtype: torch.dtype, bad: float) -> None:
    for keeps in (True, False):
        way, values = Way(name, keeps, dtype), numbers(0, dtype)
        values[77] = bad
        assert not way.read(values).isfinite().all()
        assert way.read(numbers(1, dtype)).isfinite().all(), "in the round behind it"


def test_float64_beyond_float32_goes_as_the_largest_that_the_code_holds() -> None:
    values = torch.full((NUMEL,), 1e200, dtype=torch.float64)
    for name, most in (("bfloat16", 3.38e38), ("int8", 3.4e38), ("top_k", 3.38e38)):
        got = float(Way(name, True, torch.float64).read(values).max())
        assert 0.99 * most < got <= MOST, name


@pytest.mark.parametrize("exchange", ["direct", "ring", "hierarchical"])
@pytest.mark.parametrize("name", CODECS)
def test_half_precision_does_not_overflow_by_a_code(name: str, exchange: str) -> None:
    """A sum that float16 holds arrives so, though bfloat16 would round it to 65,536."""
    ranks, most = 3, torch.finfo(torch.float16).max

    def work(comm: ThreadComm) -> Tensor:
        bucket = LiveBucket.even(torch.zeros(NUMEL, dtype=torch.float16), {"only": NUMEL}, ranks)
        carrier = read_exchange(f"{exchange}+{name}").carrier(bucket)
        for _ in range(ROUNDS):
            bucket.flat.copy_(most * numbers().sign() if comm.rank == 0 else torch.zeros(NUMEL))
            carrier.reduce(comm)
            carrier.gather(comm)
        return bucket.flat

    first, *others = run(ranks, work, timeout_s=30)
    assert all(torch.equal(first, other) for other in others)
    assert first.isfinite().all()


@pytest.mark.parametrize("way", ["direct", "ring", "hierarchical", "allreduce", "tree"])
@pytest.mark.parametrize("size", [1e20, 1e30, 1e36])
@pytest.mark.parametrize("name", CODECS)
def test_huge_gradients_on_ranks_are_finite_and_alike(name: str, size: float, way: str) -> None:
    if way in ("allreduce", "tree") and name != "low_rank":
        return
    ranks, shape = 3, (35, NUMEL // 35)

    def work(comm: ThreadComm) -> list[Tensor]:
        bucket = LiveBucket.even(torch.zeros(NUMEL), {"only": NUMEL}, ranks, {"only": shape})
        carrier, flats = read_exchange(f"{way}+{name}").carrier(bucket), []
        for step in range(ROUNDS):
            bucket.flat.copy_(size * numbers(10 * step + comm.rank))
            carrier.reduce(comm)
            carrier.gather(comm)
            flats.append(bucket.flat.clone())
        return flats

    first, *others = run(ranks, work, timeout_s=30)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(flat.isfinite().all() for flat in first)


def test_terms_of_gradients_near_the_largest_are_finite() -> None:
    shape = (35, NUMEL // 35)

    def work(comm: ThreadComm) -> list[bool]:
        bucket = LiveBucket.even(torch.zeros(NUMEL), {"only": NUMEL}, 2, {"only": shape})
        carrier, found = read_exchange("allreduce+low_rank").carrier(bucket), []
        for size in (0.4 * MOST, 0.4 * MOST, 1.0):
            bucket.flat.copy_(size * numbers(comm.rank).sign())
            carrier.reduce(comm)
            found.append(bool(bucket.flat.isfinite().all() and bucket.flat.any()))
        return found

    assert run(2, work, timeout_s=30) == [[True] * 3] * 2


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_how_far_off_a_codec_is_is_known_at_any_size(size: float) -> None:
    """Else the bound on errors would never end a codec, as squares of 1e25 are beyond float32."""

    def work(comm: ThreadComm) -> float:
        bucket = LiveBucket.even(torch.zeros(NUMEL), {"only": NUMEL}, 2)
        carrier = read_exchange("direct+one_bit").carrier(bucket)
        assert isinstance(carrier, CodedCarrier)
        for _ in range(100):
            bucket.flat.copy_(size * numbers(comm.rank))
            carrier.reduce(comm)
            carrier.gather(comm)
        return carrier.ledger.mean_errors()["only"]

    for error in run(2, work, timeout_s=30):
        assert 0.001 < error < 0.7


class OfComplex(nn.Module):
    """A layer of complex numbers between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 24)
        self.c = nn.Linear(24, 24, dtype=torch.complex64)
        self.b = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.c(torch.tanh(self.a(x)).to(torch.complex64)).abs())
        return out


def of_complex() -> nn.Module:
    torch.manual_seed(0)
    return OfComplex()


BATCHES = [
    (torch.randn(12, 6, generator=torch.Generator().manual_seed(s)), torch.arange(12) % 3)
    for s in range(3)
]


@pytest.mark.parametrize(
    "way", ["replicate:direct", "replicate:ring", "sliced:direct", "replicate:allreduce"]
)
def test_complex_parameters_travel_exactly_beside_a_codec(way: str) -> None:
    """As biases do: a codec takes real numbers."""
    codec = "low_rank(rank=1)" if way.endswith("allreduce") else "int8"
    training = Training(model=of_complex(), batches=BATCHES, optimizer=sgd)
    states = training.on_ranks(2, f"{way}+{codec}", uneven=True)
    assert_same_bits(states)
    alone = training.alone()
    moved, error = difference(alone, training.model.state_dict()), difference(alone, states[0])
    assert 0 < error < moved / 4

    def gradients(pin: str) -> dict[str, Tensor]:
        copies = [copy.deepcopy(training.model) for _ in range(2)]

        def work(comm: ThreadComm) -> dict[str, Tensor]:
            model, (x, y) = copies[comm.rank], BATCHES[comm.rank]
            with using(comm, cluster_of(2)):
                _, loss_fn, _ = shoal.parallelize(
                    model, F.cross_entropy, sgd(model.parameters()), sample=(x, y), pins={"*": pin}
                )
                loss_fn(model(x), y).backward()
                return {
                    n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
                }

        return run(2, work, timeout_s=60)[0]

    coded, exact = gradients(f"{way}+{codec}"), gradients(way)
    for name, gradient in exact.items():
        is_exact = gradient.is_complex() or gradient.dim() == 1
        assert torch.equal(gradient, coded[name]) == is_exact, name


def test_codecs_are_planned_for_real_layers_beside_complex_ones() -> None:
    copies = [of_complex() for _ in range(2)]
    slow = Cluster(Topology(("a", "b")), Link(1e-4, 1e5), 1.0)

    def work(comm: ThreadComm) -> dict[str, str]:
        model, (x, y) = copies[comm.rank], BATCHES[0]
        with using(comm, slow):
            shoal.parallelize(
                model,
                F.cross_entropy,
                sgd(model.parameters()),
                sample=(x, y),
                codecs="all",
                strategies=["replicate"],
            )
            plan = shoal.plan_of(model)
            assert plan is not None
            return {choice.layer: choice.exchange for choice in plan.choices}

    ways, _ = run(2, work, timeout_s=60)
    assert "+" in ways["a"] and "+" not in ways["c"], ways
