"""`accuracy="fast"`: local steps that the planner has chosen, on a link that is slow.

fast       parallelize(…, accuracy="fast"): rounds, their codec and their start are chosen
given      parallelize(…, lossy=…, pins=…): the same plan, as somebody else asks for it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_process import State as Values
from one_process import assert_same_bits, built, features, plain, rows_of, state
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.codec import Codec
from shoal.core.cost import CodingPace
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.plan import Plan
from shoal.core.registry import of
from shoal.front.options import Options
from shoal.front.session_start import using
from shoal.planner import local_prices, local_ways
from shoal.planner.local_prices import EXACT_FIRST, GROWS, LocalRun
from shoal.session.session import current

STEPS, LENGTH = 12, 4
BATCHES = features(7, 3, rows=12, steps=STEPS)
NEVER = CodingPace(1.0, 1.0, 1.0, 1.0)  # a second for each value
# 10 kbit/s, and one codec that takes no time
SLOW = Cluster(
    Topology(("a", "b")),
    Link(latency_s=1e-4, bytes_per_s=1250.0),
    codings={**dict.fromkeys(of(Codec), NEVER), "int8": CodingPace(1e-12, 1e-12)},
)
# layers of so few values would be cut over the ranks
FAST: dict[str, Any] = {"accuracy": "fast", "strategies": ["replicate"]}


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LocalRun]]:
    """A measured way that grows, in int8, in place of all others."""
    found = [LocalRun(LENGTH, "int8", GROWS, 1.25, "made up")]
    for module in (local_prices, local_ways):
        monkeypatch.setattr(module, "RUNS", found)
    monkeypatch.setattr(local_prices, "LAG_TIMES", 1.0)
    found.append(LocalRun(LENGTH, "", local_prices.NO_START, 100.0, "made up"))
    yield found


def net() -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(7, 60), nn.Tanh(), nn.Linear(60, 3)))


def trained(comm: ThreadComm, cluster: Cluster = SLOW, **how: Any) -> tuple[Plan, str, Values]:
    network = net()
    own = [rows_of(batch, comm.rank, comm.size) for batch in BATCHES]
    with using(comm, cluster):
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
        given = network, F.cross_entropy, optimizer
        _, loss_fn, _ = shoal.parallelize(*given, sample=own[0], **how)
        plain(network, loss_fn, optimizer, own)
        (attached,) = current().attached.values()
        return attached.plan, shoal.explain(network), state(network)


def on_two(**how: Any) -> tuple[Plan, str, Values]:
    ends = run(2, lambda comm: trained(comm, **how), timeout_s=60)
    (plan, page, _), values = ends[0], [end[2] for end in ends]
    if not plan.is_local:
        assert_same_bits(values)
    return plan, page, values[1]


def test_fast_trains_as_the_plan_that_it_chose() -> None:
    plan, page, values = on_two(**FAST, total_steps=1000)
    assert plan.outer is not None and plan.local_steps == LENGTH and plan.outer.grows
    assert {choice.way for choice in plan.choices} == {"replicate:direct+int8"}
    assert plan.outer.lag, "a slow link has a lag by default"
    lossy = shoal.Lossy(local_steps=LENGTH, outer=plan.outer)
    given, _, expected = on_two(lossy=lossy, pins={"*": "replicate:direct+int8"})
    assert given.choices == plan.choices and given.outer == plan.outer
    assert all(bool(torch.equal(values[name], expected[name])) for name in expected)
    words = " ".join(page.split())
    assert "4 local steps, nesterov" in words and "1.25 times the samples" in words
    assert "time to a loss" in words and "nothing sent" in words


@pytest.mark.parametrize(("total_steps", "first"), [(400, 100), (None, 112)])
def test_the_start_is_a_part_of_the_whole_run(
    total_steps: int | None, first: int, runs: list[LocalRun]
) -> None:
    """A quarter of steps of 4 s, and local ones of 1 s at most: less than exact steps alone."""
    runs[0] = LocalRun(LENGTH, "", EXACT_FIRST, 1.0, "made up")
    slow = replace(SLOW, codings=dict.fromkeys(of(Codec), NEVER))
    plan, _, _ = on_two(**FAST, total_steps=total_steps, cluster=slow)
    assert plan.outer is not None and plan.outer.warmup_steps == first


@pytest.mark.parametrize(
    "how",
    [
        {"accuracy": "near"},
        {"accuracy": "exact"},
        {"codecs": "all"},
        {"accuracy": "fast", "micro_batches": 1},
        {"accuracy": "fast", "update_every": {"0": 2}},
        {"accuracy": "fast", "first": 3},
        {"accuracy": "fast", "replan": True},
        {"accuracy": "fast", "pins": {"0": "sliced"}},
        {"accuracy": "fast", "strategies": ["sliced"]},
        {"accuracy": "fast", "memory_limit": 1e9},
        {"accuracy": "fast", "total_steps": 27},
    ],
    ids=str,
)
def test_nothing_else_takes_local_steps_by_itself(how: dict[str, Any]) -> None:
    model, sample = net(), BATCHES[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = model, F.cross_entropy, optimizer
    asked = {"strategies": ["replicate"], **how}
    assert not shoal.plan(*given, sample=sample, cluster=SLOW, **asked).is_local


def test_total_steps_are_for_fast() -> None:
    assert Options.of({"accuracy": "fast", "total_steps": 7}).accuracy.total_steps == 7
    for asked in ({"total_steps": 7}, {"accuracy": "near", "total_steps": 7}):
        with pytest.raises(UsageError, match='total_steps is for accuracy="fast"'):
            Options.of(asked)
    with pytest.raises(UsageError, match="total_steps is the number of steps of the whole run"):
        Options.of({"accuracy": "fast", "total_steps": 0})


def test_a_program_that_knows_its_length_says_it() -> None:
    """`shoal train` does. A number that is given stays, and other words need none."""
    fast = Options.of({"accuracy": "fast"})
    assert fast.for_steps(70) == Options.of({"accuracy": "fast", "total_steps": 70})
    assert fast.for_steps(70).for_steps(80) == fast.for_steps(70)
    for other in (Options(), Options.of({"accuracy": "near"})):
        assert other.for_steps(70) == other
