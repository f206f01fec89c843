"""Training with codecs on ranks: near one process, replicas alike, small parameters exact."""

from __future__ import annotations

import copy
from typing import Any

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
    rows_of,
    sgd,
    state,
)
from test_strategy import assert_stated
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PlanError, RanksDiffer
from shoal.front.session_start import using

WAYS = [
    "replicate:direct",
    "replicate:hierarchical",
    pytest.param("replicate:ring", marks=pytest.mark.slow),
    pytest.param("sliced:direct", marks=pytest.mark.slow),
    "sliced:ring",
]
BATCHES = [(x.float(), y) for x, y in features(7, 3, rows=12, steps=8)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("codec", ["int8(block=16)", "int4(block=16)"])
def test_replicas_stay_equal_and_near_one_process(way: str, codec: str) -> None:
    training = Training(model=built(mlp, torch.float32), batches=BATCHES, optimizer=sgd)
    states = training.on_ranks(3, f"{way}+{codec}", uneven=True)
    assert_same_bits(states)
    alone = training.alone()
    moved, error = difference(state(training.model), alone), difference(alone, states[0])
    assert 0 < error < moved / 8, f"{error:.2g} off, of {moved:.2g} that training moved"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_a_step_sends_the_bytes_that_are_stated(way: str, hosts: str) -> None:
    assert_stated(f"{way}+int8(block=16)", hosts)


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_and_so_it_does_of_what_is_added_on_its_way(hosts: str) -> None:
    assert_stated("replicate:allreduce+low_rank(rank=1)", hosts)


def test_replicas_of_what_is_added_on_its_way_stay_equal_and_come_near() -> None:
    training = Training(model=built(mlp, torch.float32), batches=BATCHES, optimizer=sgd)
    states = training.on_ranks(3, "replicate:allreduce+low_rank(rank=1)", uneven=True)
    assert_same_bits(states)
    alone = training.alone()
    moved, error = difference(state(training.model), alone), difference(alone, states[0])
    assert 0 < error < moved, f"{error:.2g} off, of {moved:.2g} that training moved"


def first_gradients(pin: str, ranks: int = 2) -> list[State]:
    """Each rank's gradients of the first backward, as they are after it."""
    x, y = BATCHES[0]

    def work(comm: ThreadComm) -> State:
        network = copy.deepcopy(network_of)
        own = rows_of((x, y), comm.rank, ranks)
        with using(comm, cluster_of(ranks)):
            _, loss_fn, _ = shoal.parallelize(
                network, F.cross_entropy, sgd(network.parameters()), sample=own, pins={"*": pin}
            )
            loss_fn(network(own[0]), own[1]).backward()
            return {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}

    network_of = built(mlp, torch.float32)
    return run(ranks, work, timeout_s=60)


@pytest.mark.parametrize("way", ["replicate:direct", "sliced:direct", "replicate:allreduce"])
def test_parameters_of_one_dimension_are_exact(way: str) -> None:
    codec = "low_rank(rank=1)" if way.endswith("allreduce") else "int8"
    exact, coded = first_gradients(way), first_gradients(f"{way}+{codec}")
    for name, gradient in exact[0].items():
        assert torch.equal(gradient, coded[0][name]) == (gradient.dim() == 1), name


@pytest.mark.parametrize("way", ["replicate:direct", "sliced:ring"])
def test_a_layer_of_vectors_alone_trains_exactly(way: str) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.norm(x)
            return out

    training = Training(model=built(Scale, torch.float32), batches=BATCHES, optimizer=sgd)
    assert_same_bits([training.on_ranks(2, way)[0], training.on_ranks(2, f"{way}+int8")[0]])


def asked(**options: Any) -> list[shoal.Plan | None]:
    def work(comm: ThreadComm) -> shoal.Plan | None:
        network, own = built(mlp, torch.float32), rows_of(BATCHES[0], comm.rank, 2)
        given = {
            name: value[comm.rank] if isinstance(value, tuple) else value
            for name, value in options.items()
        }
        with using(comm, cluster_of(2)):
            shoal.parallelize(
                network, F.cross_entropy, sgd(network.parameters()), sample=own, **given
            )
            return shoal.plan_of(network)

    return run(2, work, timeout_s=60)


def test_all_may_be_allowed() -> None:
    plan, other = asked(codecs="all")
    assert plan is not None and plan == other


@pytest.mark.parametrize(
    ("codecs", "said"),
    [
        (["int9"], "no codec called 'int9'(.|\n)*did you mean 'int8'"),
        ("int8", r'codecs is a list(.|\n)*codecs=\["bfloat16", "int8"\]'),
        ([3], "codecs is a list"),
        (["direct+int8"], "more than one codec"),
    ],
)
def test_what_is_no_codec_is_refused(codecs: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        asked(codecs=codecs)


def test_ranks_allow_the_same() -> None:
    with pytest.raises(RanksDiffer, match=r"differently: codecs(.|\n)*int8"):
        asked(codecs=(["int8"], ["bfloat16"]))


def test_a_plan_says_its_codecs_itself() -> None:
    (plan, _) = asked(pins={"*": "sliced:direct+int8"})
    assert plan is not None and {c.exchange for c in plan.choices} == {"direct+int8"}
    with pytest.raises(PlanError, match="both a plan and codecs"):
        asked(plan=plan, codecs=["int8"])
    assert asked(plan=plan)[0] is not None


def test_what_takes_no_exchange_takes_no_codec() -> None:
    with pytest.raises(PlanError, match="factor takes no exchange"):
        asked(pins={"*": "factor:direct+int8"})
