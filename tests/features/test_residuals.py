"""What codecs owe is told and given back: over any number of ranks the sum stays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from one_process import Batch, State, assert_same_bits, built, cluster_of, features, plain, rows_of
from one_process import mlp as make
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.codecs.carrier_memory import coded_carriers
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.exchange import StateDict
from shoal.features.residuals import residuals, residuals_of
from shoal.front.session_start import using
from shoal.session.session import current

BATCHES = [(x.float(), y) for x, y in features(7, 3, rows=12, steps=6)]
WAYS = [
    "replicate:direct+int8(block=8)",
    "sliced:ring+one_bit(block=8)",
    "replicate:allreduce+low_rank(rank=1)",
]


def total(ranks: list[StateDict]) -> StateDict:
    sums: StateDict = {}
    for owed in ranks:
        for name, entries in owed.items():
            for what, numbers in entries.items():
                before = sums.setdefault(name, {}).get(what, torch.zeros_like(numbers))
                sums[name][what] = before + numbers
    return sums


def started(
    comm: ThreadComm, ranks: int, pin: str, work: Callable[[nn.Module, list[Batch], object], None]
) -> tuple[State, StateDict]:
    network = built(make, torch.float32)
    own = [rows_of(batch, comm.rank, ranks) for batch in BATCHES]
    with using(comm, cluster_of(ranks)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
        _, loss_fn, _ = shoal.parallelize(
            network, F.cross_entropy, optimizer, sample=own[0], pins={"*": pin}
        )
        work(network, own, lambda steps: plain(network, loss_fn, optimizer, steps))
        return {k: v.clone() for k, v in network.state_dict().items()}, residuals(network)


@pytest.mark.parametrize("pin", WAYS)
def test_two_ranks_three_and_two_again_keep_the_sum(pin: str) -> None:
    def trained(network: nn.Module, own: list[Batch], train: Callable[[list[Batch]], None]) -> None:
        train(own)

    owed = total([o for _, o in run(2, lambda comm: started(comm, 2, pin, trained), timeout_s=60)])
    assert any(numbers.any() for entries in owed.values() for numbers in entries.values())
    assert set(owed) == {n for n, p in built(make).named_parameters() if p.dim() > 1}
    for ranks in (3, 2):
        again = total(owed_after_giving(ranks, pin, owed))
        for name, entries in owed.items():
            for what, numbers in entries.items():
                torch.testing.assert_close(again[name][what], numbers, rtol=1e-6, atol=1e-9)
        owed = again


def owed_after_giving(ranks: int, pin: str, owed: StateDict) -> list[StateDict]:
    """What each rank owes when it was given what all owed."""

    def take(network: nn.Module, own: list[Batch], train: object) -> None:
        residuals_of(network).give(owed, local=False)

    return [o for _, o in run(ranks, lambda comm: started(comm, ranks, pin, take), timeout_s=60)]


@pytest.mark.parametrize("pin", WAYS[:2])  # of terms: tests/codecs/test_summed_terms.py
def test_what_is_given_is_sent(pin: str) -> None:
    """With a learning rate of 1 and no gradient of its own, a step moves parameters by it."""
    owed_by_name = {"0.weight": torch.linspace(-1, 1, 7 * 5)}

    def work(comm: ThreadComm) -> tuple[State, State]:
        network = nn.Sequential(nn.Linear(7, 5))
        network.load_state_dict(start)
        with using(comm, cluster_of(2)):
            optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
            x = torch.full((2, 7), 1.0 + comm.rank)
            _, loss_fn, _ = shoal.parallelize(
                network,
                lambda out, _: 0.0 * out.mean(),
                optimizer,
                sample=(x, None),
                pins={"*": pin.partition("+")[0] + "+bfloat16"},
            )
            sums = {"0.weight": {"gradient": owed_by_name["0.weight"]}}
            residuals_of(network).give(sums, local=False)
            loss_fn(network(x), None).backward()
            optimizer.step()
            return start, {k: v.clone() for k, v in network.state_dict().items()}

    start = {k: v.clone() for k, v in nn.Sequential(nn.Linear(7, 5)).state_dict().items()}
    outcomes = run(2, work, timeout_s=60)
    assert_same_bits([end for _, end in outcomes])
    for before, end in outcomes:
        moved: Tensor = before["0.weight"] - end["0.weight"]
        torch.testing.assert_close(moved.view(-1), owed_by_name["0.weight"], rtol=0.01, atol=1e-5)


def test_residuals_of_another_model_are_dropped_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    owed = {
        "elsewhere": {"gradient": torch.ones(3)},
        "0.weight": {"gradient": torch.ones(2)},
    }

    with caplog.at_level(logging.WARNING, logger="shoal"):
        outcomes = owed_after_giving(2, WAYS[0], owed)
    assert not any(numbers.any() for o in outcomes for e in o.values() for numbers in e.values())
    assert "what codecs had lost of elsewhere, 0.weight is dropped" in caplog.text


@pytest.mark.parametrize("pin", [*WAYS, "sliced:ring"])
def test_unparallelize_says_what_it_drops(pin: str, caplog: pytest.LogCaptureFixture) -> None:
    def work(network: nn.Module, own: list[Batch], train: Callable[[list[Batch]], None]) -> None:
        train(own[:2])
        shoal.unparallelize(network)

    with caplog.at_level(logging.WARNING, logger="shoal"):
        outcomes_of(2, pin, work)
    dropped = "is dropped: nobody sends it after unparallelize"
    assert caplog.text.count(dropped) == ("+" in pin), "rank 0 says it once"
    assert ("0.weight" in caplog.text) == ("+" in pin)


def test_residuals_of_a_bucket_that_is_exact_again_are_dropped_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(network: nn.Module, own: list[Batch], train: Callable[[list[Batch]], None]) -> None:
        for carrier in coded_carriers(current().attached[network].engine.transfers):
            carrier.given_up, carrier.exact = ["0.weight"], True
        numel = dict(network.named_parameters())["0.weight"].numel()
        sums = {"0.weight": {"parameter": torch.ones(numel)}}
        residuals_of(network).give(sums, local=False)

    with caplog.at_level(logging.WARNING, logger="shoal"):
        owed = outcomes_of(2, WAYS[1], work)
    assert owed == [{}, {}]
    assert "what codecs had lost of 0.weight is dropped" in caplog.text


def test_a_checkpoint_keeps_their_sum(tmp_path: Path) -> None:
    """Two ranks save, three load, train nothing, and save: the sum is what it was."""

    def saving(path: Path, source: Path | None) -> Callable[..., None]:
        def work(
            network: nn.Module, own: list[Batch], train: Callable[[list[Batch]], None]
        ) -> None:
            if source is None:
                train(own)
            else:
                shoal.load(source, model=network)
            shoal.save(path, model=network)

        return work

    first, second = tmp_path / "two", tmp_path / "three"
    owed = total(outcomes_of(2, WAYS[0], saving(first, None)))
    again = total(outcomes_of(3, WAYS[1].replace("one_bit", "int8"), saving(second, first)))
    assert any(entries["gradient"].any() for entries in owed.values())
    for name, entries in owed.items():
        torch.testing.assert_close(again[name]["gradient"], entries["gradient"])
    assert list(second.glob("feature-states*"))


def outcomes_of(ranks: int, pin: str, work: Callable[..., None]) -> list[StateDict]:
    return [o for _, o in run(ranks, lambda comm: started(comm, ranks, pin, work), timeout_s=60)]
