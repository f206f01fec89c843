"""One small codec from its class to training: what to copy for a test of your own.

It has an option, a loss that is fed back and a memory of its own, all at once. Two threads are the
ranks. They share torch's random numbers, so the model is built beforehand and copied.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from one_process import (
    State,
    Training,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    mlp,
    plain,
    rows_of,
    state,
)
from test_strategy import COUNTS_BYTES
from torch import Tensor
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts import codec as contract
from shoal.contracts.codec import Codec
from shoal.contracts.exchange import StateDict
from shoal.core import registry
from shoal.core.plan import Plan
from shoal.front.session_start import using
from shoal_tools.testing.byte_counts import TracedComm

PIN = "replicate:direct+delay(ms=1)"
STEPS = 5
NETWORK = built(mlp, torch.float32)
BATCHES = [(x.float(), y) for x, y in features(7, 3, rows=12, steps=STEPS)]
OPTIMIZER = partial(torch.optim.SGD, lr=0.3)


@dataclass(frozen=True)
class Delay(Codec):
    """Values as bfloat16, some milliseconds late. It counts its rounds."""

    name: ClassVar[str] = "delay"
    ms: int = 0

    def nbytes(self, numel: int, itemsize: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, state: contract.State) -> Tensor:
        time.sleep(self.ms / 1000)
        state["rounds"] = state.get("rounds", torch.zeros_like(values)) + 1
        return values.bfloat16().view(torch.uint8)

    def decode(self, code: Tensor, into: Tensor) -> None:
        into.copy_(code.view(torch.bfloat16))


@dataclass(frozen=True)
class Trained:
    plan: Plan
    parameters: State
    remembered: StateDict
    control_bytes: int
    bytes_sent: int
    seconds: float


def trained(**options: Any) -> list[Trained]:
    """A small network after some steps, on each of two ranks."""

    def work(comm: ThreadComm) -> Trained:
        network, traced = copy.deepcopy(NETWORK), TracedComm(comm)
        own = [rows_of(batch, comm.rank, 2) for batch in BATCHES]
        with using(traced, cluster_of(2)) as session:
            optimizer = OPTIMIZER(network.parameters())
            _, loss_fn, _ = shoal.parallelize(
                network, F.cross_entropy, optimizer, sample=own[0], **options
            )
            plan, (transfer,) = shoal.plan_of(network), session.attached[network].engine.transfers
            assert plan is not None and transfer.carrier is not None
            sent, began = traced.counts.bytes_sent, time.perf_counter()
            plain(network, loss_fn, optimizer, own)
            parameters = state(network)
            sent, seconds = traced.counts.bytes_sent - sent, time.perf_counter() - began
            bucket = transfer.carrier.bucket
            control = sum(bucket.control(owner).nbytes for owner in range(2))
            remembered = transfer.carrier.state_dict()
            return Trained(plan, parameters, remembered, control, sent, seconds)

    return run(2, work, timeout_s=20)


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    with registry.registered(Delay):
        yield


@pytest.fixture(scope="module")
def pinned(known: None) -> list[Trained]:
    return trained(pins={"*": PIN})


def test_replicas_have_the_same_bits_near_those_of_one_process(pinned: list[Trained]) -> None:
    assert_same_bits([rank.parameters for rank in pinned])
    alone = Training(model=NETWORK, batches=BATCHES, optimizer=OPTIMIZER).alone()
    assert 1e-6 < difference(alone, pinned[0].parameters) < 0.01


def test_the_bytes_it_states_are_those_that_are_sent(pinned: list[Trained]) -> None:
    """A rank sends each value once a step, to its owner or back as its owner. Control goes with
    them.
    """
    values = sum(tensor.numel() for tensor in pinned[0].parameters.values())
    for rank in pinned:
        a_step = Delay().nbytes(values, 4) + rank.control_bytes
        assert rank.bytes_sent == STEPS * a_step + COUNTS_BYTES


def test_a_saved_plan_keeps_the_option(pinned: list[Trained], tmp_path: Path) -> None:
    """Whoever trains by the file has the same codec; with more milliseconds, the same bits later:
    it sleeps once on the way to the owner and once on the way back.
    """
    path = tmp_path / "plan.json"
    pinned[0].plan.save(path)
    assert Plan.load(path) == pinned[0].plan
    assert path.read_text().count('"direct+delay(ms=1)"') == 2
    path.write_text(path.read_text().replace("ms=1", "ms=20"))
    slower = trained(plan=path)
    assert_same_bits([rank.parameters for rank in (*pinned, *slower)])
    assert all(rank.seconds > STEPS * 2 * 0.02 for rank in slower)


def test_its_own_memory_is_kept_beside_what_was_lost(pinned: list[Trained]) -> None:
    for rank in pinned:
        lost = 0.0
        for name, kept in rank.remembered.items():
            none = torch.zeros_like(rank.parameters[name]).view(-1)
            rounds = kept.get("scatter.rounds", none) + kept.get("gather.rounds", none)
            assert torch.equal(rounds, torch.full_like(none, STEPS)), name
            lost += sum(float(kept[key].abs().sum()) for key in kept if key.endswith(".lost"))
        assert lost > 0
