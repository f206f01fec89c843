"""Servers that are sent codes and send them: near the exact run, replicas alike, nothing lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import adamw, assert_same_bits, difference, state
from test_strategy import assert_stated
from torch import Tensor, nn
from with_servers import steps, trained

import shoal
from shoal.codecs.carrier import CodedCarrier
from shoal.codecs.carrier_memory import coded_carriers
from shoal.codecs.coded_exchange import read_exchange
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.codec import Codec
from shoal.contracts.exchange import LiveBucket, Span, StateDict
from shoal.core.errors import PlanError
from shoal.core.registry import of
from shoal.features.residuals import residuals_of
from shoal.session.session import current

FED_BACK = [name for name, kind in of(Codec).items() if kind.feedback]
WAY = {"*": "server:direct+int8(block=16)"}


@pytest.mark.parametrize(
    ("codec", "workers", "servers"),
    [
        ("int8(block=16)", 3, 1),
        pytest.param("int8(block=16)", 2, 2, marks=pytest.mark.slow),
        pytest.param("int4(block=16)", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_replicas_stay_equal_and_near_the_exact_run(codec: str, workers: int, servers: int) -> None:
    def loop(model: nn.Module, *others: Any) -> dict[str, Tensor]:
        before = state(model)
        steps(6)(model, *others)
        return before

    exact, before, _ = trained(workers, servers, loop, optimizer=adamw, pins={"*": "server"})
    pins = {"*": f"server:direct+{codec}"}
    coded, _, _ = trained(workers, servers, loop, optimizer=adamw, pins=pins)
    assert_same_bits(coded)
    assert isinstance(before[0], dict)
    moved, error = difference(before[0], exact[0]), difference(exact[0], coded[0])
    assert 0 < error < moved / 8, f"{error:.2g} off, of {moved:.2g} that training moved"


@pytest.mark.parametrize("hosts", ["aab", pytest.param("ab", marks=pytest.mark.slow)])
def test_a_step_sends_the_bytes_that_are_stated(hosts: str) -> None:
    assert_stated("server:direct+int8(block=16)", hosts)


@pytest.mark.parametrize("name", FED_BACK)
def test_a_constant_gradient_telescopes_there(name: str) -> None:
    """What a server has summed is the truth but for what workers keep, and that stays small."""
    workers, numel, number = 3, 600, 100
    of_rank = [
        torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(workers)
    ]
    truth = sum(of_rank[1:], of_rank[0])

    def work(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        bucket = bucket_of(numel, workers)
        carrier = read_exchange(f"direct+{name}").carrier(bucket)
        assert isinstance(carrier, CodedCarrier)
        total = torch.zeros(numel, dtype=torch.float64)
        for _ in range(number):
            if comm.rank < workers:
                bucket.values(workers).copy_(of_rank[comm.rank])
            carrier.reduce(comm)
            total += bucket.values(workers) if comm.rank == workers else 0
        owed = carrier.residuals().get("only", {}).get("gradient", torch.zeros(numel))
        return total, owed

    *of_workers, (total, _) = run(workers + 1, work, timeout_s=60, servers=1)
    owed = sum((owed for _, owed in of_workers), torch.zeros(numel))
    torch.testing.assert_close((total + owed).float(), number * truth, rtol=1e-4, atol=1e-2)
    assert float(owed.norm()) < number / 2 * float(truth.norm())


def bucket_of(numel: int, workers: int) -> LiveBucket:
    """One parameter, all of it the server's, without control."""
    flat = torch.zeros(numel)
    slices = (*[flat[:0]] * workers, flat)
    return LiveBucket(flat, slices, (*[()] * workers, (Span("only", 0, numel),)), {"only": numel})


def test_every_worker_reads_the_same_gradient_near_the_sum() -> None:
    def loop(model: nn.Module, loss_fn: Callable[..., Tensor], _: object, batches: list) -> Any:
        x, y = batches[0]
        loss_fn(model(x), y).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    exact, coded = (
        trained(2, 2, loop, pins={"*": pin})[1] for pin in ("server", "server:direct+int8")
    )
    for name, gradient in exact[0].items():
        theirs = [gradients[name] for gradients in coded]
        assert torch.equal(*theirs)
        off = float((theirs[0] - gradient).norm() / gradient.norm())
        assert off == 0 if gradient.dim() == 1 else 0 < off < 0.02


def owed(model: nn.Module) -> StateDict:
    return {
        name: {what: numbers.clone() for what, numbers in entries.items()}
        for name, entries in residuals_of(model).sums().items()
    }


def kept_in(path: Path) -> Callable[..., StateDict]:
    """A loop that trains, saves, and says what all owe; or that loads, and says it."""

    def loop(model: nn.Module, loss_fn: object, optimizer: Any, batches: list) -> StateDict:
        if path.exists():
            shoal.load(path, model=model, optimizer=optimizer)
        else:
            steps(3)(model, loss_fn, optimizer, batches)  # type: ignore[arg-type]
            shoal.save(path, model=model, optimizer=optimizer)
        return owed(model)

    return loop


def test_a_checkpoint_keeps_what_workers_and_servers_owe(tmp_path: Path) -> None:
    """Two servers of two workers, then one of three, which own a share themselves."""
    loop = kept_in(tmp_path / "saved")
    (before, _) = trained(2, 2, loop, optimizer=adamw, pins=WAY)[1]
    assert isinstance(before, dict)
    assert set(before) == {"0.weight", "2.weight"}
    assert all(set(entries) == {"gradient", "parameter"} for entries in before.values())
    for after in trained(3, 1, loop, optimizer=adamw, pins=WAY)[1]:
        assert isinstance(after, dict) and set(after) == set(before)
        for name, entries in before.items():
            for what, numbers in entries.items():
                torch.testing.assert_close(after[name][what], numbers, rtol=1e-6, atol=1e-12)


def test_what_a_server_is_given_is_sent() -> None:
    """With a learning rate of 1, and no gradient but that which is owed."""
    numbers = {
        "0.weight": torch.linspace(-1, 1, 13 * 7, dtype=torch.float64),
        "2.weight": torch.linspace(1, 2, 3 * 13, dtype=torch.float64),
    }

    def loop(
        model: nn.Module, loss_fn: Callable[..., Tensor], optimizer: Any, batches: list
    ) -> dict[str, Tensor]:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        x, y = batches[0]
        sums = {name: {"gradient": owed} for name, owed in numbers.items()}
        residuals_of(model).give(sums, local=False)
        (0.0 * loss_fn(model(x), y)).backward()
        optimizer.step()
        return {name: before[name] - p.detach() for name, p in model.named_parameters()}

    def once(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    pins = {"*": "server:direct+bfloat16"}
    for moved in trained(2, 2, loop, optimizer=once, pins=pins)[1]:
        assert isinstance(moved, dict)
        for name, owed_numbers in numbers.items():
            torch.testing.assert_close(
                moved[name].view(-1).cpu(), owed_numbers, rtol=0.01, atol=1e-5
            )


@pytest.mark.slow
def test_beyond_the_bound_servers_and_workers_are_exact_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop(model: nn.Module, *others: Any) -> list[bool]:
        steps(102)(model, *others)
        carriers = coded_carriers(current().attached[model].engine.transfers)
        return [each.exact for each in carriers if each.bucket.numels]

    with caplog.at_level(logging.WARNING, logger="shoal"):
        states, exact, _ = trained(
            2, 2, loop, codecs=["int8"], max_error=1e-9, pins={"*": "server:direct+int8"}
        )
    assert exact[0] and all(all(each) for each in exact if isinstance(each, list))
    assert "is sent exactly from now on" in caplog.text
    assert_same_bits(states)


@pytest.mark.parametrize("staleness", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_with_a_staleness_there_are_no_codecs(staleness: int | None) -> None:
    with pytest.raises(PlanError, match="codecs need workers that keep step"):
        trained(2, 1, steps(1), staleness=staleness, pins=WAY)
    allowed = trained(2, 1, steps(1), staleness=staleness, codecs="all")
    assert len(allowed[0]) == 2, "and none is chosen"
