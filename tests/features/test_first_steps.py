"""First steps of a run with codecs: exact, or by a nearer codec; then the codecs of the plan.

once     one call of parallelize, with `first`
apart    two calls: exact, or by the nearer codec, and then the plan's codec
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    State,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    plain,
    rows_of,
    state,
)
from one_process import mlp as make
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PlanError, UsageError
from shoal.features.first_steps import FirstSteps
from shoal.features.local_steps import LocalSteps
from shoal.features.residuals import residuals
from shoal.front.options import Options
from shoal.front.session_start import using

FIRST, STEPS = 3, 7
BATCHES = features(7, 3, rows=12, steps=STEPS)
WAYS = [
    "sliced:direct+int4(block=8)",
    "replicate:ring+one_bit(block=8)",
    "replicate:allreduce+low_rank(rank=1)",
]


def trained(comm: ThreadComm, pin: str, batches: list[Batch], **how: Any) -> State:
    """Train from the start or from `loads`, by a pin `then` after FIRST steps; the weights."""
    loads, saves, then = (how.pop(name, None) for name in ("loads", "saves", "then"))
    network, ranks = built(make), comm.size
    own = [rows_of(batch, comm.rank, ranks) for batch in batches]
    with using(comm, cluster_of(ranks)):
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)

        def call(pin: str, **how: Any) -> Any:
            given = network, F.cross_entropy, optimizer
            return shoal.parallelize(*given, sample=own[0], pins={"*": pin}, **how)[1]

        loss_fn = call(pin, **how)
        if loads:
            shoal.load(loads, model=network, optimizer=optimizer)
        plain(network, loss_fn, optimizer, own[:FIRST] if then else own)
        if then:
            shoal.unparallelize(network)
            plain(network, call(then), optimizer, own[FIRST:])
        if saves:
            shoal.save(saves, model=network, optimizer=optimizer)
        return state(network)


def on(ranks: int, pin: str, batches: list[Batch] = BATCHES, **how: Any) -> State:
    ends = run(ranks, lambda comm: trained(comm, pin, batches, **how), timeout_s=60)
    assert_same_bits(ends)
    return ends[0]


@pytest.mark.parametrize("pin", WAYS)
def test_exact_steps_come_first(pin: str) -> None:
    exact = pin.partition("+")[0]
    first = shoal.Lossy(first=FIRST)
    assert difference(on(2, pin, BATCHES[:FIRST], lossy=first), on(2, exact, BATCHES[:FIRST])) == 0
    once, apart = on(2, pin, lossy=first), on(2, exact, then=pin)
    assert difference(once, apart) <= 1e-10
    assert difference(once, on(2, exact)) > 1e-6, "codes never began"


def test_a_nearer_codec_comes_first_and_what_it_lost_stays() -> None:
    """Gradients that stay as they are: all that codes have not sent is what is owed."""
    nearer, pin = "replicate:direct+int8(block=8)", "replicate:direct+top_k(share=0.2)"
    first = shoal.Lossy(first=shoal.Beginning(FIRST, codec="int8(block=8)"))
    some = BATCHES[:FIRST]
    assert difference(on(2, pin, some, lossy=first), on(2, nearer, some)) == 0

    def work(comm: ThreadComm) -> tuple[Tensor, dict[str, Tensor]]:
        network = nn.Linear(7, 5, bias=False, dtype=torch.float64)
        network.load_state_dict(start)
        with using(comm, cluster_of(2)):
            optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(comm.rank)).double()
            _, loss_fn, _ = shoal.parallelize(
                network,
                lambda y, _: y.mean(),
                optimizer,
                sample=(x, None),
                pins={"*": pin},
                lossy=first,
            )
            plain(network, loss_fn, optimizer, [(x, None)] * STEPS)
            gradients = x.mean(0).expand(5, 7) / 5
            (owed,) = residuals(network).values()
            moved = start["weight"] - network.weight.detach()
            return moved.view(-1), {"owed": owed["gradient"], "own": gradients.reshape(-1)}

    start = nn.Linear(7, 5, bias=False, dtype=torch.float64).state_dict()
    seen = run(2, work, timeout_s=60)
    whole = STEPS * sum(rank["own"] for _, rank in seen) / 2
    owed = sum(rank["owed"] for _, rank in seen)
    assert owed.abs().max() > 1e-3
    for moved, _ in seen:
        torch.testing.assert_close(moved + owed, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("nearer", "codec"),
    [("low_rank(rank=1)", "top_k(share=0.2)"), ("low_rank(rank=2)", "low_rank(rank=1)")],
)
def test_hints_of_the_first_codec_end_with_it(nearer: str, codec: str, tmp_path: Path) -> None:
    """A basis of low_rank is nothing to another codec, nor to a checkpoint."""
    pin, early = f"sliced:direct+{codec}", tmp_path / "early"
    first = shoal.Lossy(first=shoal.Beginning(FIRST, codec=nearer))
    on(2, pin, BATCHES[:1], lossy=first, saves=early)
    on(3, pin, BATCHES[1:], lossy=first, loads=early)
    on(2, pin, lossy=first, saves=tmp_path / "late")


@pytest.mark.parametrize(
    ("pin", "made"),
    [(WAYS[0], 2), (WAYS[2], 2), pytest.param(WAYS[1], FIRST, marks=pytest.mark.slow)],
)
def test_goes_on_with_other_ranks(pin: str, made: int, tmp_path: Path) -> None:
    """Saved within the first steps: three ranks make those that are left, exactly."""
    first, saved = shoal.Lossy(first=FIRST), tmp_path / "saved"
    on(2, pin, BATCHES[:made], lossy=first, saves=saved)
    exact = pin.partition("+")[0]
    left, exactly = BATCHES[made:FIRST], on(2, exact, BATCHES[:FIRST])
    if left:
        assert difference(on(3, pin, left, lossy=first, loads=saved), exactly) <= 1e-10
    more = on(3, pin, BATCHES[made : FIRST + 1], lossy=first, loads=saved)
    assert difference(more, on(2, exact, BATCHES[: FIRST + 1])) > 1e-7, "codes never began"


def test_layers_that_are_updated_seldom_make_as_many_first_steps(tmp_path: Path) -> None:
    """Four exact steps are two exchanges of a layer that is updated every second step."""
    pin, saved = WAYS[0], tmp_path / "saved"
    exact = pin.partition("+")[0]
    seldom: dict[str, Any] = {"update_every": {"2": 2}}
    first = {**seldom, "lossy": shoal.Lossy(first=4)}
    exactly, longer = (on(2, exact, BATCHES[:steps], **seldom) for steps in (4, 6))
    assert difference(on(2, pin, BATCHES[:4], **first), exactly) <= 1e-10
    sixth = on(2, pin, BATCHES[:6], **first)
    assert difference({"": sixth["2.weight"]}, {"": longer["2.weight"]}) > 1e-7
    on(2, pin, BATCHES[:3], **first, saves=saved)
    assert difference(on(3, pin, BATCHES[3:4], **first, loads=saved), exactly) <= 1e-10


@pytest.mark.parametrize(
    ("first", "line"),
    [
        (FIRST, "begins with 3 exact steps; codecs follow"),
        (shoal.Beginning(1, codec="int8"), "begins with 1 step by int8; the plan's codecs follow"),
    ],
)
def test_the_plan_says_how_a_run_begins(first: Any, line: str, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"

    def planned(comm: ThreadComm, **how: Any) -> tuple[shoal.Plan, str]:
        with using(comm, cluster_of(comm.size)):
            given = built(make), F.cross_entropy
            optimizer = torch.optim.AdamW(given[0].parameters(), lr=0.05)
            sample = rows_of(BATCHES[0], comm.rank, comm.size)
            shoal.parallelize(*given, optimizer, sample=sample, **how)
            plan = shoal.plan_of(given[0])
            return plan, shoal.explain(given[0]) if plan is not None else ""

    def planned_on(ranks: int, **how: Any) -> tuple[shoal.Plan, str]:
        return run(ranks, lambda comm: planned(comm, **how), timeout_s=60)[0]

    coded, exact = ({"*": way} for way in (WAYS[0], "sliced:direct"))
    plan, said = planned_on(2, pins=coded, first=first)
    assert line in said
    plan.save(written)
    again, said = planned_on(2, plan=written)
    assert again.features == plan.features and line in said
    assert planned_on(2, plan=written, first=first)[0].features == plan.features
    with pytest.raises(PlanError, match="there are both a plan and nearer_first"):
        planned_on(2, plan=written, first=50)
    bare = replace(plan, features={})
    assert planned_on(2, plan=bare, first=first)[0].features == plan.features
    assert planned_on(2, pins=exact, first=first)[0].features == {}
    for wrong in ({"steps": -1}, {"steps": 3, "codec": "int9"}, {"step": 3}):
        with pytest.raises(PlanError, match="first steps do not fit"):
            FirstSteps.of_plan(plan.with_feature("nearer_first", wrong))


def test_with_local_steps_first_is_the_warmup() -> None:
    lossy = shoal.Lossy(local_steps=4, first=shoal.Beginning(3, grows=True))
    outer = shoal.Outer(warmup_steps=3, grows=True)
    assert Options.of({}, lossy).features == (LocalSteps(4, outer),)
    with pytest.raises(UsageError, match="there are first steps, and warm-up steps"):
        shoal.Lossy(local_steps=4, outer=outer, first=3).asked()
    with pytest.raises(UsageError, match="before local steps the first steps are exact"):
        shoal.Lossy(local_steps=4, first=shoal.Beginning(3, codec="int8")).asked()


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (-1, "first is a number of steps"),
        ("a", "first is a number of steps"),
        (True, "first is a number of steps"),
    ],
)
def test_first_is_a_number_of_steps(first: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Options.of({"first": first})


def test_a_first_has_a_codec_that_there_is() -> None:
    with pytest.raises(PlanError, match="int9"):
        Options.of({"first": shoal.Beginning(3, codec="int9")})
    with pytest.raises(UsageError, match="grows is True or False"):
        shoal.Beginning(3, grows=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the codec of first steps is a name"):
        shoal.Beginning(3, codec=8)  # type: ignore[arg-type]


def test_local_steps_refuse_first_as_a_keyword() -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, cluster_of(2)), pytest.raises(PlanError, match="make local steps"):
            trained_with(comm, local_steps=4, first=2)

    def trained_with(comm: ThreadComm, **how: Any) -> None:
        network = built(make)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        sample = rows_of(BATCHES[0], comm.rank, 2)
        shoal.parallelize(network, F.cross_entropy, optimizer, sample=sample, **how)

    run(2, work, timeout_s=60)
