"""A strategy that only this file knows, with two transfers a site.

Gradients of 1-D parameters (biases, scales) travel apart from the others. In a second variant each
rank trains these parameters by itself, and every second step their mean is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from one_process import (
    Training,
    assert_same,
    built,
    cluster_of,
    difference,
    features,
    numbers,
    plain,
    rows_of,
    state,
)
from ordinary import Ordinary
from test_strategy import assert_stated
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import run
from shoal.contracts.cadence import Cadence, Event
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Carrier, Exchange, LiveBucket
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Round, Transfer
from shoal.core import registry
from shoal.core.cost import Cost, Phase, total
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, LayerProfile
from shoal.core.role import Role
from shoal.front.session_start import using
from shoal.strategies.replicate import Replicate

RANKS = 2


def of_dims(layers: Sequence[LayerProfile], *, one: bool) -> list[LayerProfile]:
    """The layers with their 1-D parameters only, or with the others; those that have any."""
    parts = [
        replace(layer, parameters=tuple(p for p in layer.parameters if (len(p.shape) == 1) is one))
        for layer in layers
    ]
    return [part for part in parts if part.parameters]


def part_of(place: Place, *, one: bool) -> Place:
    """The place with the 1-D parameters only, or with the others."""
    parameters = {name: p for name, p in place.parameters.items() if (p.dim() == 1) is one}
    return replace(place, parameters=parameters)


class BiasesApart(Strategy):
    """`replicate`, with the gradients of 1-D parameters in a transfer of their own."""

    name = "biases_apart"
    role = Role.BUCKET

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        return None if of_dims([layer], one=True) else "it has no 1-D parameter to send apart"

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        parts = [of_dims(layers, one=False), of_dims(layers, one=True)]
        costs = [Replicate().estimate(part, exchange, cluster) for part in parts if part]
        phase = costs[0].in_backward
        assert phase is not None
        return Cost(
            in_backward=replace(phase, traffic=total(cost.traffic for cost in costs)),
            backward_s=sum(cost.backward_s for cost in costs),
            memory_bytes=sum(cost.memory_bytes for cost in costs),
        )

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        matrices, biases = part_of(place, one=False), part_of(place, one=True)
        return [
            *Replicate().apply(matrices, exchange, f"{label}, matrices"),
            *Replicate().apply(biases, exchange, f"{label}, biases"),
        ]


EVERY_SECOND = Cadence(Event.STEP_ENDED, every=2)


class Mean(Transfer):
    """The ranks' mean of some parameters, every second step."""

    cadence = EVERY_SECOND

    def __init__(
        self, parameters: dict[str, nn.Parameter], exchange: Exchange, ranks: int, label: str
    ) -> None:
        self.label = label
        self._parameters, self._ranks = list(parameters.values()), ranks
        numels = {name: p.numel() for name, p in parameters.items()}
        self._flat = self._parameters[0].new_zeros(sum(numels.values())).detach()
        self.carrier: Carrier = exchange.carrier(LiveBucket.even(self._flat, numels, ranks))

    def pack(self, backward: Round) -> None:
        torch.cat([p.detach().view(-1) for p in self._parameters], out=self._flat)
        self._flat.div_(self._ranks)

    def run(self, comm: Comm) -> None:
        self.carrier.reduce(comm)
        self.carrier.gather(comm)

    def publish(self) -> None:
        parts = self._flat.split([p.numel() for p in self._parameters])
        with torch.no_grad():
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))

    def kept(self) -> Sequence[Tensor]:
        return [self._flat, *self.carrier.tensors()]

    def release(self) -> None:
        """It has no hooks."""


class BiasesSeldom(BiasesApart):
    """Each rank trains 1-D parameters by itself; every second step their mean is taken."""

    name = "biases_seldom"

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        assert exchange is not None
        matrices, biases = of_dims(layers, one=False), of_dims(layers, one=True)
        cost = Replicate().estimate(matrices, exchange, cluster) if matrices else Cost()
        parameters = [p for layer in biases for p in layer.parameters]
        bucket = Bucket(sum(p.numel for p in parameters), parameters[0].itemsize)
        traffic, pace = exchange.traffic(bucket, cluster.topology), cluster.pace(str(exchange))
        return replace(
            cost,
            after_step=Phase(traffic, pace, every=EVERY_SECOND.every),
            memory_bytes=cost.memory_bytes + bucket.nbytes,
        )

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        assert exchange is not None
        matrices, biases = part_of(place, one=False), part_of(place, one=True)
        return [
            *Replicate().apply(matrices, exchange, f"{label}, matrices"),
            Mean(dict(biases.parameters), exchange, place.ranks, f"{label}, biases"),
        ]


def model() -> nn.Sequential:
    """The same each time; to be called on the main thread, as threads share one random state."""
    return built(
        lambda: nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 5))
    )


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """Known here only."""
    with registry.registered(BiasesApart, BiasesSeldom):
        yield


def test_training_is_that_of_one_process() -> None:
    training = Training(model=model(), batches=features(7, 5))
    assert_same(training, RANKS, "biases_apart", uneven=True)


def trained(way: str) -> list[tuple[nn.Module, Ordinary]]:
    """Each rank's model, trained and given back, and what it was like before."""
    nets = [model() for _ in range(RANKS)]

    def work(comm: Comm) -> tuple[nn.Module, Ordinary]:
        net = nets[comm.rank]
        rows = [rows_of(batch, comm.rank, RANKS, uneven=True) for batch in features(7, 5)]
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        before = Ordinary.of(net, optimizer)
        with using(comm, cluster_of(RANKS)):
            shoal.parallelize(net, F.cross_entropy, optimizer, sample=rows[0], pins={"*": way})
            plain(net, F.cross_entropy, optimizer, rows)
            shoal.unparallelize(net)
        return net, before

    return run(RANKS, work)


def by_hand() -> Sequence[nn.Module]:
    """One after the other, each rank on its own rows: matrices' gradients are averaged by rows."""
    nets = [model() for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    for step, batch in enumerate(features(7, 5)):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            x, y = rows_of(batch, rank, RANKS, uneven=True)
            F.cross_entropy(net(x), y).backward()
        parameters = list(zip(*(net.parameters() for net in nets), strict=True))
        for one, two in parameters:
            if one.dim() != 1:
                one.grad = two.grad = (one.grad + 2 * two.grad) / 3
        for optimizer in optimizers:
            optimizer.step()
        if step % 2:
            for one, two in parameters:
                if one.dim() == 1:
                    one.data = (one.data + two.data) / 2
                    two.data = one.data.clone()
    return nets


def test_biases_meet_every_second_step_and_all_is_undone() -> None:
    for (net, before), expected in zip(trained("biases_seldom"), by_hand(), strict=True):
        assert difference(state(expected), state(net)) < 1e-10
        before.assert_again()


def test_a_step_sends_what_is_stated() -> None:
    assert_stated("biases_apart:direct", "ab", model=model(), inputs=numbers(4, 7))


def test_a_layer_without_biases_is_refused() -> None:
    net = nn.Sequential(nn.Linear(7, 5, bias=False)).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sample = features(7, 5)[0]
    with pytest.raises(PlanError, match="cannot serve layer 0: it has no 1-D parameter"):
        shoal.plan(
            net,
            F.cross_entropy,
            optimizer,
            sample=sample,
            cluster=cluster_of(2),
            pins={"*": "biases_apart"},
        )
