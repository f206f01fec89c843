"""Batch norm over the rows of all ranks: as in one process on the global batch."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from moving import on_ranks
from one_process import (
    Training,
    assert_same,
    built,
    cluster_of,
    features,
    integers,
    numbers,
    on_threads,
    plain,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.cost import total
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import ModelProfile
from shoal.front.session_start import using
from shoal.planner.timeline import Predictor
from shoal.profiling.layers import profile_model
from shoal.session.session import current
from shoal.strategies.sync_batchnorm import SyncNorms, alone, phases_of
from shoal.tensors.sync_norm import Synchronised
from shoal_tools.testing.byte_counts import TracedComm


class Block(nn.Module):
    """A residual block as ResNet has it, with a way round that has a norm, too."""

    def __init__(self, width: int, wide: int, norm: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, wide, 3, stride=2, padding=1, bias=False)
        self.norm1 = norm(wide)
        self.second = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norm2 = norm(wide)
        self.round = nn.Sequential(nn.Conv2d(width, wide, 1, stride=2, bias=False), norm(wide))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return torch.relu(inside + self.round(x))


class ResNet(nn.Module):
    def __init__(self, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), norm(4), nn.ReLU())
        self.blocks = nn.Sequential(Block(4, 4, norm), Block(4, 6, norm))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


BATCHES = [(numbers(12, 2, 8, 8, seed=60 + i), integers(3, 12, seed=80 + i)) for i in range(4)]
SYNC = {"sync_batchnorm": True}


@dataclass(frozen=True, kw_only=True)
class OfAllRanks(Training):
    """Trained with norms over all ranks."""

    def on_ranks(self, ranks: int, way: str = "replicate", *, uneven: bool = False) -> Any:
        copies = [copy.deepcopy(self.model) for _ in range(ranks)]
        pins = self.pins_of(way, ranks)

        def work(comm: ThreadComm) -> Any:
            mine = [rows_of(batch, comm.rank, ranks, uneven) for batch in self.batches]
            model = copies[comm.rank]
            with using(comm, cluster_of(ranks)):
                model, loss_fn, optimizer = shoal.parallelize(
                    model,
                    copy.deepcopy(self.loss_fn),
                    self.optimizer(model.parameters()),
                    sample=mine[0],
                    pins=pins,
                    count=self.count,
                    sync_batchnorm=True,
                )
                self.loop(model, loss_fn, optimizer, mine)
                return state(model)

        return on_threads(ranks, work)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_resnet_on_uneven_ranks(ranks: int) -> None:
    assert_same(OfAllRanks(model=built(ResNet), batches=BATCHES), ranks, uneven=True)


@pytest.mark.parametrize("way", ["sliced", "factor", "column"])
def test_beside_every_way_to_serve_layers(way: str) -> None:
    assert_same(OfAllRanks(model=built(ResNet), batches=BATCHES[:2]), 2, way, uneven=True)


def accumulated(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
    """Two backwards a step."""
    for (x, y), (other, its) in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        with optimizer.accumulate() if hasattr(optimizer, "accumulate") else nullcontext():
            loss_fn(model(x), y).backward()
        loss_fn(model(other), its).backward()
        optimizer.step()


def test_under_accumulation() -> None:
    model = built(ResNet)
    assert_same(OfAllRanks(model=model, batches=BATCHES, loop=accumulated), 3, uneven=True)


def test_with_a_count_of_terms() -> None:
    """Of some rows the loss knows nothing, on one rank of any."""
    ignoring = nn.CrossEntropyLoss(ignore_index=0)
    batches = [(x, torch.cat([y[:3] * 0, y[3:]])) for x, y in BATCHES]
    training = OfAllRanks(
        model=built(ResNet),
        batches=batches,
        loss_fn=ignoring,
        count=lambda output, y: (y != 0).sum(),
    )
    assert_same(training, 3)


def test_two_calls_in_one_backward() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            (loss_fn(model(x), y) + loss_fn(model(x.flip(3)), y)).backward()
            optimizer.step()

    assert_same(OfAllRanks(model=built(ResNet), batches=BATCHES, loop=loop), 3, uneven=True)


class Settings(nn.Module):
    """Norms of one, two and three dimensions, of no parameters, of all batches' mean."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Linear(7, 8),
            nn.BatchNorm1d(8, affine=False),
            nn.Unflatten(1, (2, 2, 2)),
            nn.BatchNorm2d(2, momentum=None),
            nn.Unflatten(1, (1, 2)),
            nn.BatchNorm3d(1, track_running_stats=False),
            nn.Flatten(),
            nn.SyncBatchNorm(8),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


def test_the_settings_of_a_norm() -> None:
    assert_same(OfAllRanks(model=built(Settings), batches=features(7, 3)), 3, uneven=True)


def test_the_users_own_sync_batch_norm_is_served_and_others_are_not() -> None:
    def mixed() -> nn.Module:
        return nn.Sequential(
            nn.Linear(7, 5), nn.SyncBatchNorm(5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        )

    def work(comm: ThreadComm) -> list[str]:
        model = models[comm.rank]
        with using(comm, cluster_of(2)):
            before = [type(module) for module in model.modules()]
            shoal.parallelize(
                model, F.cross_entropy, sgd(model.parameters()), sample=features(7, 3)[comm.rank]
            )
            names = [n for n, module in model.named_modules() if isinstance(module, Synchronised)]
            assert type(copy.deepcopy(model)[1]) is nn.SyncBatchNorm
            assert type(pickle.loads(pickle.dumps(model))[1]) is nn.SyncBatchNorm
            assert repr(model[1]).startswith("SyncBatchNorm(5")
            shoal.unparallelize(model)
            assert [type(module) for module in model.modules()] == before
            assert not any("shoal" in name for name in vars(model[1]))
            return names

    models = [built(mixed) for _ in range(2)]
    assert on_threads(2, work) == [["1"], ["1"]]


def test_a_rank_that_evaluates_alone_waits_for_nobody() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any, comm: Any) -> None:
        plain(model, loss_fn, optimizer, batches)
        if comm.rank == 0:
            model.eval()
            with torch.no_grad():
                model(batches[0][0])
            model.train()

    model = built(Settings)
    on_ranks(model, F.cross_entropy, features(7, 3), 2, loop=loop, **SYNC)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_sends_the_bytes_that_are_stated(ranks: int) -> None:
    def work(comm: ThreadComm) -> None:
        traced, model = TracedComm(comm), models[comm.rank]
        norms = SyncNorms(model, asked=True)
        norms.join(traced)
        x, y = rows_of(BATCHES[0], comm.rank, ranks)
        loss = F.cross_entropy(model(x), y)
        described = norms.describe(ModelProfile((), 0.0, 0.0, 0.0, ""))
        phases = phases_of(described, cluster_of(ranks))
        assert phases is not None and len(described) == 7
        forward, backward = (phase.traffic for phase in phases)
        assert traced.counts.bytes_sent == forward.sent[comm.rank] > 0
        assert traced.counts.bytes_received == forward.received[comm.rank]
        loss.backward()
        both = total([forward, backward])
        assert traced.counts.bytes_sent == both.sent[comm.rank]
        assert traced.counts.bytes_leaving == (both.leaving or both.sent)[comm.rank]
        assert traced.counts.messages_sent == both.rounds * (ranks - 1)
        assert sum(norm.nbytes for norm in described) * (ranks - 1) == both.sent[comm.rank]

    models = [built(ResNet) for _ in range(ranks)]
    hosts = cluster_of(ranks).topology.hosts
    run(ranks, work, timeout_s=20, hosts=hosts)


def test_the_plan_says_what_norms_send_and_how_long_they_take() -> None:
    def work(comm: ThreadComm) -> tuple[str, float, float]:
        model = models[comm.rank]
        with using(comm, cluster_of(2)):
            shoal.parallelize(
                model, F.cross_entropy, sgd(model.parameters()), sample=BATCHES[comm.rank], **SYNC
            )
            attached = current().attached[model]
            without = replace(attached.profile, norms=())
            predicted = [
                Predictor(profile, attached.cluster).as_is(attached.plan)
                for profile in (attached.profile, without)
            ]
            more_s = predicted[0].step_s - predicted[1].step_s
            assert predicted[0].sent_bytes - predicted[1].sent_bytes == sum(
                norm.nbytes for norm in attached.profile.norms
            )
            return shoal.explain(model), more_s, len(attached.profile.norms)

    models = [built(ResNet) for _ in range(2)]
    text, more_s, norms = on_threads(2, work)[0]
    assert "batch norm over all ranks: 7 layers" in text
    assert more_s > norms * cluster_of(2).link.latency_s


def test_layers_behind_a_norm_may_be_cut() -> None:
    """The norm looks at the number of rows, by which nobody decides what is called."""
    model = built(lambda: nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    with alone(model, True):
        profile = profile_model(model, F.cross_entropy, [], features(7, 3)[0], ThreadComm())
    assert {layer.name: layer.may_vary for layer in profile.layers} == {"0": "", "1": "", "2": ""}


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_what_is_refused() -> None:
    own = nn.Sequential(nn.Linear(7, 3), OwnNorm(3))
    with pytest.raises(UsageError, match="OwnNorm has a forward of its own"):
        on_ranks(own.double(), F.cross_entropy, features(7, 3), 2, **SYNC)
    with pytest.raises(UsageError, match="sync_batchnorm is True or False"):
        on_ranks(built(Settings), F.cross_entropy, features(7, 3), 2, sync_batchnorm="yes")
    with pytest.raises(PlanError, match="workers that run ahead of one another cannot normalise"):
        on_ranks(
            built(Settings),
            F.cross_entropy,
            features(7, 3),
            2,
            servers=1,
            staleness=1,
            buffers="local",
            **SYNC,
        )
    one_row = [(numbers(2, 7), integers(3, 2)), (numbers(1, 7), integers(3, 1))]
    with pytest.raises(UsageError, match="more than one value a channel"):
        on_ranks(built(Settings), F.cross_entropy, one_row, 2, **SYNC)
