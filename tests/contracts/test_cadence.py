"""A transfer that only this file knows: it goes every third optimizer step, beside ordinary ones.

Ranks step by themselves. Every so many steps they send what their parameters are, and go on from
the mean, at once or some steps later ("local steps").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from one_process import cluster_of
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.cadence import Cadence, Event
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Carrier, Exchange, LiveBucket
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Round, Transfer
from shoal.core import registry
from shoal.core.cost import Cost, Phase
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, LayerProfile
from shoal.core.plan import Plan
from shoal.core.role import Role
from shoal.engine.engine import Engine
from shoal.exchange.direct import Direct
from shoal.front.session_start import using
from shoal.planner.timeline import Predictor
from shoal.profiling.identity import trainable_layers
from shoal.rewrite.apply import sites
from shoal_tools.testing.byte_counts import TracedComm
from shoal_tools.testing.planned_faults import FaultyComm, RandomDelay

RANKS, STEPS = 2, 8
THIRD = Cadence(Event.STEP_ENDED, every=3)
CADENCES = {
    "every third": THIRD,
    "published two steps later": Cadence(Event.STEP_ENDED, every=3, lag=2),
    "published as it goes again": Cadence(Event.STEP_ENDED, every=3, lag=3),
    "from the second on": Cadence(Event.STEP_ENDED, every=3, phase=1),
}
COUNTS_BYTES = 40  # the first forward's row count, to every other rank


class Meeting(Transfer):
    """The mean of parameters: what it changes since they were sent is added to them."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        exchange: Exchange,
        ranks: int,
        label: str,
        cadence: Cadence,
    ) -> None:
        self.label, self.cadence = label, cadence
        self._parameters, self._ranks = list(parameters.values()), ranks
        self._flat = torch.cat([p.detach().view(-1) for p in self._parameters])
        self._before = self._flat.clone()
        numels = {name: p.numel() for name, p in parameters.items()}
        self.carrier: Carrier = exchange.carrier(LiveBucket.even(self._flat, numels, ranks))

    def pack(self, backward: Round) -> None:
        self._before = torch.cat([p.detach().view(-1) for p in self._parameters])
        torch.div(self._before, self._ranks, out=self._flat)

    def run(self, comm: Comm) -> None:
        self.carrier.reduce(comm)
        self.carrier.gather(comm)

    def publish(self) -> None:
        change = self._flat - self._before
        numels = [p.numel() for p in self._parameters]
        with torch.no_grad():
            for parameter, part in zip(self._parameters, change.split(numels), strict=True):
                parameter.add_(part.view_as(parameter))

    def kept(self) -> Sequence[Tensor]:
        return [self._flat, self._before]

    def release(self) -> None:
        """It has no hooks."""


class Meet(Strategy):
    """Ranks train a layer by themselves, and meet now and then."""

    name = "meet"
    role = Role.BUCKET
    cadence = THIRD

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        return None

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        assert exchange is not None
        parameters = [p for layer in layers for p in layer.parameters]
        bucket = Bucket(sum(p.numel for p in parameters), parameters[0].itemsize)
        traffic = exchange.traffic(bucket, cluster.topology)
        pace = cluster.pace(str(exchange))
        return Cost(after_step=Phase(traffic, pace, every=self.cadence.every))

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        assert exchange is not None
        parameters = dict(place.parameters)
        return [Meeting(parameters, exchange, place.ranks, label, self.cadence)]


def meeting(cadence: Cadence) -> type[Strategy]:
    """The strategy at another cadence."""
    return type("Meet", (Meet,), {"name": "meet", "cadence": cadence})


def model() -> nn.Sequential:
    """The same on every rank, whose threads share one random state."""
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).double()
    draw = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.4, generator=draw)
    return net


def rows_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(STEPS, 4, 6, generator=draw, dtype=torch.float64)
    return [(rows, torch.arange(4) % 5) for rows in x]


def by_hand(cadence: Cadence, together: Sequence[int]) -> list[list[Tensor]]:
    """Parameters of each rank, trained one after the other; some layers' gradients are averaged."""
    nets = [model() for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    due: dict[int, list[list[Tensor]]] = {}  # what is added, by step and rank
    alone = [layer for layer in (0, 2) if layer not in together]
    for step in range(STEPS):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            x, y = rows_of(rank)[step]
            F.cross_entropy(net(x), y).backward()
        for layer in together:
            for same in zip(*(net[layer].parameters() for net in nets), strict=True):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for parameter in same:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        ours = [[p for layer in alone for p in net[layer].parameters()] for net in nets]

        def publish(step: int = step, ours: list[list[nn.Parameter]] = ours) -> None:
            for parameters, changes in zip(ours, due.pop(step, []), strict=False):
                for parameter, change in zip(parameters, changes, strict=True):
                    parameter.data.add_(change)

        publish()
        if (step - cadence.phase) % cadence.every == cadence.every - 1 and step >= cadence.phase:
            means = [
                torch.stack([p.detach() for p in same]).mean(0) for same in zip(*ours, strict=True)
            ]
            due[step + cadence.lag] = [
                [mean - p.detach() for mean, p in zip(means, own, strict=True)] for own in ours
            ]
        publish()
    return [[p.detach() for p in net.parameters()] for net in nets]


def trained(
    comm: Comm, pins: dict[str, str], plan: Plan | None = None
) -> tuple[list[Tensor], Plan, float]:
    """A rank's parameters at the end, its plan, and what it states to send in a step."""
    net, rows = model(), rows_of(comm.rank)
    with using(comm, cluster_of(RANKS)) as session:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        chosen = {"plan": plan} if plan else {"pins": pins}
        shoal.parallelize(net, F.cross_entropy, optimizer, sample=rows[0], **chosen)
        attached = session.attached[net]
        if isinstance(comm, TracedComm):
            comm.counts.bytes_sent = 0
        for x, y in rows:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        predictor = Predictor(attached.profile, attached.cluster)
        layers = {layer.name: layer for layer in trainable_layers(net)}
        costs = [predictor.cost(site).mean for site in sites(attached.plan, layers)]
    stated = sum(cost.traffic.sent[comm.rank] for cost in costs)
    return [p.detach() for p in net.parameters()], attached.plan, stated


def close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("case", CADENCES)
def test_ranks_meet_as_the_cadence_says(case: str) -> None:
    cadence = CADENCES[case]
    with registry.registered(meeting(cadence)):
        results = run(RANKS, lambda comm: trained(comm, {"*": "meet:direct"}))
    expected = by_hand(cadence, together=())
    for (parameters, _, _), own in zip(results, expected, strict=True):
        assert close(parameters, own)
    assert not close(expected[0], by_hand(THIRD, (0, 2))[0]), "exact training differs"


def test_bytes_are_sent_every_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # ranks tell how long steps take after so many
    monkeypatch.setattr("shoal.engine.stragglers._WINDOW", (STEPS + 1, 500))
    # and compare what they have in common now and then
    monkeypatch.setattr("shoal.engine.common_state.NowAndThen.on_backward_end", lambda self: None)
    counts: dict[int, int] = {}

    def work(comm: ThreadComm) -> float:
        traced = TracedComm(comm)
        _, _, stated = trained(traced, {"*": "meet:direct"})
        counts[comm.rank] = traced.counts.bytes_sent - COUNTS_BYTES * (RANKS - 1)
        return stated

    with registry.registered(Meet):
        stated = run(RANKS, work)
    numel = sum(p.numel() for p in model().parameters())
    bucket = Bucket(numel, 8)
    once = Direct().traffic(bucket, cluster_of(RANKS).topology).sent
    assert [counts[rank] for rank in range(RANKS)] == [2 * sent for sent in once]
    assert stated == pytest.approx([sent / 3 for sent in once])


@pytest.mark.parametrize("case", CADENCES)
def test_in_a_lane_all_go_in_the_same_order_whatever_is_late(case: str) -> None:
    """Gradients of a replicated layer are sent on the same lane."""
    pins = {"0": "meet:direct", "2": "replicate:direct"}
    cadence = CADENCES[case]
    with registry.registered(meeting(cadence)):
        plan = replace(run(RANKS, lambda comm: trained(comm, pins)[1])[0], lanes=1)

        def late(comm: ThreadComm) -> list[Tensor]:
            slow = FaultyComm(comm, [RandomDelay(0.004, seed=comm.rank)])
            return trained(slow, pins, plan)[0]

        results = run(RANKS, late)
    for parameters, own in zip(results, by_hand(cadence, together=[2]), strict=True):
        assert close(parameters, own)


class Noting(Transfer):
    """Notes what the engine does with it."""

    def __init__(self, label: str, cadence: Cadence, log: list[str]) -> None:
        self.label, self.cadence, self._log = label, cadence, log

    def pack(self, backward: Round) -> None:
        self._log.append(f"pack {self.label}")

    def run(self, comm: Comm) -> None:
        self._log.append(f"run {self.label}")

    def publish(self) -> None:
        self._log.append(f"publish {self.label}")

    def kept(self) -> Sequence[Tensor]:
        return []

    def release(self) -> None:
        """It has no hooks."""


@pytest.mark.parametrize(
    "event", [Event.FORWARD_ENTERED, Event.BACKWARD_ENDED, Event.STEP_BEGUN, Event.STEP_ENDED]
)
def test_each_event_is_told_and_then_gone_on_in_the_plans_order(event: Event) -> None:
    log: list[str] = []
    cadence = Cadence(event, every=2)
    engine = Engine([Noting("a", cadence, log), Noting("b", cadence, log)], [ThreadComm()])
    engine.listen(event, lambda: log.append("told"))
    for other in Event:
        engine.on_event(other)
    assert log == ["told"]
    engine.on_event(event)
    engine.close()
    assert [entry for entry in log if "run" in entry] == ["run a", "run b"]
    on_main = ["told", "told", "pack a", "pack b", "publish a", "publish b"]
    assert [entry for entry in log if "run" not in entry] == on_main


def test_those_with_other_phases_take_turns() -> None:
    log: list[str] = []
    turns = [Cadence(Event.STEP_ENDED, every=3, phase=phase) for phase in range(3)]
    transfers = [Noting(str(phase), turn, log) for phase, turn in enumerate(turns)]
    engine = Engine(transfers, [ThreadComm()])
    for _ in range(7):
        engine.on_event(Event.STEP_ENDED)
    engine.close()
    assert [entry[-1] for entry in log if "pack" in entry] == list("01201")


def test_an_error_on_a_lane_is_told_at_the_event_that_waits_and_at_those_after_it() -> None:
    transfer = Noting("a", Cadence(Event.STEP_ENDED, every=2, lag=1), [])

    def fails(comm: Comm) -> None:
        raise RuntimeError("the wire is cut")

    transfer.run = fails  # type: ignore[method-assign]
    engine = Engine([transfer], [ThreadComm()])
    engine.on_event(Event.STEP_ENDED)
    engine.on_event(Event.STEP_ENDED)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the wire is cut"):
            engine.on_event(Event.STEP_ENDED)
    engine.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cadence(Event.STEP_ENDED, every=0),
        lambda: Cadence(Event.STEP_ENDED, every=3, lag=4),
        lambda: Cadence(Event.STEP_ENDED, phase=-1),
        lambda: Cadence(Event.BACKWARD_ENTERED),
        lambda: Cadence(Event.GRADIENTS_LANDED, every=2),
    ],
)
def test_a_cadence_that_cannot_be_kept_is_refused(make: Callable[[], Cadence]) -> None:
    with pytest.raises(UsageError, match="do this"):
        make()
