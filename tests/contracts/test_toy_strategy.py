"""A strategy that only this file knows, with a probe of its own: it is pinned, refuses, trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from one_process import Training, assert_same, cluster_of, plain
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.exchange import Exchange
from shoal.contracts.probe import Layer, Probe, Trial
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Transfer
from shoal.core import registry
from shoal.core.cost import Cost
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, Excerpt, Facts, LayerProfile, ModelProfile
from shoal.core.role import Role
from shoal.profiling.layers import ProfileOptions, profile_model
from shoal.strategies.replicate import Replicate


@dataclass(frozen=True)
class ZeroFacts(Facts):
    """What part of a layer's output is zero."""

    part: float = 0.0
    calls: int = 0


class ZeroProbe(Probe):
    """Counts zeros in the outputs of layers."""

    def __init__(self) -> None:
        self._zeros: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def called(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        assert layer.module.weight.abs().sum() > 0  # looked at, which is no use of it
        self._zeros[layer.name] += int((output == 0).sum())
        self._calls[layer.name] += 1

    def measure(self, layer: Layer, trial: Trial) -> ZeroFacts:
        elements = trial.step.layers[layer.name].output_elements
        return ZeroFacts(self._zeros[layer.name] / max(elements, 1), self._calls[layer.name])


class Quiet(Strategy):
    """`replicate`, for layers whose output is mostly zero."""

    name = "quiet"
    role = Role.BUCKET
    probes = (ZeroProbe,)

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        part = layer.measured(ZeroFacts).part
        return None if part >= 0.5 else f"its output is zero in {part:.0%} of places, not in half"

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        return Replicate().estimate(layers, exchange, cluster)

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        return Replicate().apply(place, exchange, label)


class Gate(nn.Linear):
    """A linear layer whose outputs are seldom anything but zero."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input) - 0.8)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Gate(8, 8), nn.Linear(8, 5)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, 12, 6, generator=draw, dtype=torch.float64)
    return [(rows, torch.arange(12) % 5) for rows in x]


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registry.registered(Quiet):
        yield


def profile(net: nn.Module, rows: int = 12, comm: ThreadComm | None = None) -> ModelProfile:
    x, y = batches()[0]
    return profile_model(net, F.cross_entropy, [], (x[:rows], y[:rows]), comm or ThreadComm())


def test_its_facts_are_in_the_profile_and_looking_is_no_use_of_a_weight() -> None:
    net = model()
    with torch.no_grad():
        counted = (net[1](net[0](batches()[0][0])) == 0).double().mean().item()
    found = profile(net)
    facts = {layer.name: layer.measured(ZeroFacts) for layer in found.layers}
    assert counted > 0.5
    assert facts == {
        "0": ZeroFacts(0.0, 1),
        "1": ZeroFacts(pytest.approx(counted), 1),
        "2": ZeroFacts(0.0, 1),
    }
    assert found.layer("0").outside_use == found.layer("2").outside_use == ""
    unasked = ProfileOptions(probes=[])
    without = profile_model(model(), F.cross_entropy, [], batches()[0], ThreadComm(), unasked)
    assert without.layer("1").measured(ZeroFacts) == ZeroFacts()


def test_ranks_have_the_most_of_any() -> None:
    def work(comm: ThreadComm) -> tuple[ZeroFacts, ZeroFacts]:
        rows = 2 + 4 * comm.rank
        alone = profile(model(), rows).layer("1").measured(ZeroFacts)
        return alone, profile(model(), rows, comm).layer("1").measured(ZeroFacts)

    (first, together), (second, same) = run(2, work)
    assert together == same == ZeroFacts(max(first.part, second.part), 1)
    assert first.part != second.part, "or the test would show nothing"


def test_facts_that_no_rule_makes_one_say_what_to_write() -> None:
    @dataclass(frozen=True)
    class Shapes(Facts):
        shape: tuple[int, ...] = ()

    with pytest.raises(TypeError, match=r"Shapes\.shape .* write Shapes\.of_ranks"):
        Shapes.of_ranks([Shapes((1,)), Shapes((2,))])


def test_facts_stay_where_tail_hosts_have_the_end_of_the_model() -> None:
    found = profile(model())
    end = found.excerpt(Excerpt(("1", "2"), rows=2.0))
    assert [layer.name for layer in end.layers] == ["2", "1"]
    assert end.layer("1").measured(ZeroFacts) == found.layer("1").measured(ZeroFacts)
    assert end.layer("1").rows == 2 * found.layer("1").rows


def test_a_pin_chooses_it_and_training_is_that_of_one_process() -> None:
    served: list[str] = []

    def loop(net: Any, loss_fn: Any, optimizer: Any, own: Any) -> None:
        plan = shoal.plan_of(net) if shoal.world().size > 1 else None
        for choice in plan.choices if plan else ():
            served.extend([choice.layer] * (choice.strategy == "quiet"))
        plain(net, loss_fn, optimizer, own)

    training = Training(model=model(), batches=batches(), loop=loop)
    assert_same(training, 2, "quiet")
    assert served == ["1", "1"], "on each rank the layer that is mostly zero"


def test_a_layer_that_it_refuses_cannot_be_pinned_to_it() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    given = {"sample": batches()[0], "cluster": cluster_of(2)}
    shoal.plan(net, F.cross_entropy, optimizer, pins={"1": "quiet"}, **given)
    with pytest.raises(PlanError, match=r"quiet cannot serve layer 0: its output is zero in 0%"):
        shoal.plan(net, F.cross_entropy, optimizer, pins={"0": "quiet"}, **given)
