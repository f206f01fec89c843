"""A feature of training that only this file knows: what Shoal promises of any, held against it.

It has an option, a refusal, an effect on the plan, state in checkpoints of any number of ranks, a
line in reports, and it ends with `unparallelize`. Nothing under src/ names it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from one_process import built, cluster_of, features, mlp, rows_of
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.cadence import Event
from shoal.contracts.feature import Attachment, Feature, PlanFacts, lines_of
from shoal.core import registry
from shoal.core.errors import PlanError, UsageError
from shoal.core.option import Flag, option
from shoal.core.plan import Plan
from shoal.front.session_start import using
from shoal.session.opening import Opening
from shoal.session.running import Running
from shoal.session.session import current


@dataclass(frozen=True)
class Toy(Feature[Opening]):
    """Every few steps the mean of all gradients' norms is noted; buckets are small meanwhile."""

    name: ClassVar[str] = "toy"
    every: int = option(1, keyword="toy_every", off=None, flag=Flag("Note norms.", read=int))

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError("a toy counts from 1", got=str(self.every), do="give 1")

    def plan(self, plan: Plan, facts: PlanFacts) -> Plan:
        return self.written(dataclasses.replace(plan, bucket_bytes=1 << 10))

    def refuses(self, plan: Plan, facts: PlanFacts) -> None:
        if any(choice.strategy == "factor" for choice in plan.choices):
            raise PlanError("a toy reads gradients, which factor has late", do="pin another")

    def attach(self, opening: Opening) -> Attachment[Running]:
        return Norms(self.every, opening)

    def line(self, plan: Plan) -> str:
        return f"norms are noted every {self.every} steps"


class Norms(Attachment[Running]):
    """The norms that were noted of one model."""

    def __init__(self, every: int, opening: Opening) -> None:
        self.every, self.comm = every, opening.comm
        self.parameters = [
            p for o in opening.optimizers for g in o.param_groups for p in g["params"]
        ]
        self.steps, self.noted, self.is_on = 0, torch.zeros(0, dtype=torch.float64), True

    def start(self, running: Running) -> None:
        running.engine.listen(Event.STEP_BEGUN, self.note_step)

    def note_step(self) -> None:
        self.steps += 1
        if self.is_on and self.steps % self.every == 0:
            norms = [p.grad.norm() for p in self.parameters if p.grad is not None]
            self.noted = torch.cat([self.noted, torch.stack(norms).mean().view(1)])

    def state(self) -> Any:
        own = {"steps": self.steps, "noted": self.noted}
        told = self.comm.gather_objects(own["steps"], "toy: how many steps")
        assert len(set(told)) == 1
        return own

    def load(self, state: Any) -> None:
        if state is not None:
            self.steps, self.noted = state["steps"], state["noted"].clone()

    def release(self, *, goes_on: bool) -> None:
        self.is_on = False


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registry.registered(Toy):
        yield


BATCHES = features(7, 3, steps=6)


def parallelized(comm: ThreadComm, model: nn.Module, ranks: int, **how: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    own = [rows_of(batch, comm.rank, ranks) for batch in BATCHES]
    pins = how.pop("pins", {"*": "replicate:direct"})
    parts = shoal.parallelize(model, F.cross_entropy, optimizer, sample=own[0], pins=pins, **how)
    return *parts, own


def train(model: nn.Module, loss_fn: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def noted_by(model: nn.Module) -> Tensor:
    kept = current().attached[model].running.attachments["toy"]
    assert isinstance(kept, Norms)
    return kept.noted


def on_ranks(ranks: int, work: Any) -> list[Any]:
    def each(comm: ThreadComm) -> Any:
        with using(comm, cluster_of(ranks)):
            return work(comm, built(mlp), ranks)

    return run(ranks, each, timeout_s=60)


def test_its_option_its_plan_and_its_line() -> None:
    def work(comm: ThreadComm, model: nn.Module, ranks: int) -> tuple[Plan, Tensor, str]:
        *parts, own = parallelized(comm, model, ranks, features=[Toy(3)])
        train(*parts, own)
        plan = shoal.plan_of(model)
        assert plan is not None
        return plan, noted_by(model), shoal.explain(model)

    for plan, noted, explained in on_ranks(2, work):
        assert plan.features == {"toy": {"every": 3}} and plan.bucket_bytes == 1 << 10
        assert len(noted) == 2, "of six steps"
        assert lines_of(plan) == ("norms are noted every 3 steps",)
        assert "norms are noted every 3 steps" in explained
        assert Plan.from_json(plan.to_json()) == plan


def test_it_is_asked_for_by_its_keyword_or_by_a_plan() -> None:
    def by_keyword(comm: ThreadComm, model: nn.Module, ranks: int) -> str:
        parallelized(comm, model, ranks, toy_every=2)
        plan = shoal.plan_of(model)
        assert plan is not None
        return plan.to_json()

    text = on_ranks(2, by_keyword)[0]
    assert json.loads(text)["features"] == {"toy": {"every": 2}}

    def by_plan(comm: ThreadComm, model: nn.Module, ranks: int) -> int:
        *parts, own = parallelized(comm, model, ranks, plan=Plan.from_json(text), pins=None)
        train(*parts, own)
        return len(noted_by(model))

    assert on_ranks(2, by_plan) == [3, 3]


def test_it_refuses_a_pin_before_anything_is_measured() -> None:
    def work(comm: ThreadComm, model: nn.Module, ranks: int) -> None:
        with pytest.raises(PlanError, match="a toy reads gradients"):
            parallelized(comm, model, ranks, pins={"0": "factor"}, features=[Toy()])
        with pytest.raises(UsageError, match="a toy counts from 1"):
            parallelized(comm, model, ranks, toy_every=0)
        assert not current().attached

    on_ranks(2, work)


def test_the_planner_leaves_out_what_it_refuses() -> None:
    def work(comm: ThreadComm, model: nn.Module, ranks: int) -> set[str]:
        how = {"pins": None, "strategies": ["factor", "replicate"], "features": [Toy()]}
        parallelized(comm, model, ranks, **how)
        plan = shoal.plan_of(model)
        assert plan is not None
        return {choice.strategy for choice in plan.choices}

    assert on_ranks(2, work) == [{"replicate"}, {"replicate"}]


def test_its_state_is_saved_on_two_ranks_and_loaded_on_three(tmp_path: Path) -> None:
    def first(comm: ThreadComm, model: nn.Module, ranks: int) -> Tensor:
        *parts, own = parallelized(comm, model, ranks, features=[Toy(3)])
        train(*parts, own[:4])
        shoal.save(tmp_path / "saved", model=model, optimizer=parts[2])
        return noted_by(model)

    def then(comm: ThreadComm, model: nn.Module, ranks: int) -> Tensor:
        *parts, own = parallelized(comm, model, ranks, features=[Toy(3)])
        shoal.load(tmp_path / "saved", model=model, optimizer=parts[2])
        train(*parts, own[4:])
        return noted_by(model)

    (before, _), after = on_ranks(2, first), on_ranks(3, then)

    def undisturbed(comm: ThreadComm, model: nn.Module, ranks: int) -> Tensor:
        *parts, own = parallelized(comm, model, ranks, features=[Toy(3)])
        train(*parts, own)
        return noted_by(model)

    whole = on_ranks(3, undisturbed)[0]
    assert len(before) == 1 and all(len(noted) == 2 for noted in after)
    for noted in after:
        torch.testing.assert_close(noted, whole, rtol=1e-10, atol=1e-10)


def test_a_checkpoint_that_has_it_loads_where_nobody_asks_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def first(comm: ThreadComm, model: nn.Module, ranks: int) -> None:
        parallelized(comm, model, ranks, features=[Toy(3)])
        shoal.save(tmp_path / "saved", model=model)

    def then(comm: ThreadComm, model: nn.Module, ranks: int) -> None:
        parallelized(comm, model, ranks)
        shoal.load(tmp_path / "saved", model=model)

    on_ranks(2, first)
    on_ranks(2, then)
    assert "the checkpoint has a state of toy, which is dropped" in caplog.text


def test_it_ends_with_unparallelize() -> None:
    def work(comm: ThreadComm, model: nn.Module, ranks: int) -> bool:
        parallelized(comm, model, ranks, features=[Toy()])
        kept = current().attached[model].running.attachments["toy"]
        shoal.unparallelize(model)
        assert isinstance(kept, Norms)
        return kept.is_on

    assert on_ranks(2, work) == [False, False]


def test_what_cannot_be_a_feature_is_refused() -> None:
    @dataclass(frozen=True)
    class Stranger(Feature[Opening]):
        name: ClassVar[str] = "stranger"

    def work(comm: ThreadComm, model: nn.Module, ranks: int) -> None:
        for wrong, says in (
            ([Stranger()], "not registered"),
            ([Toy(), Toy(2)], "given twice"),
            (["toy"], "list of features"),
            (3, "list of features"),
        ):
            with pytest.raises(PlanError, match=says):
                parallelized(comm, model, ranks, features=wrong)
        with pytest.raises(UsageError, match="toy is given twice"):
            parallelized(comm, model, ranks, features=[Toy()], toy_every=2)
        with pytest.raises(UsageError, match=r"no 'toy_evry'(.|\n)*did you mean 'toy_every'"):
            parallelized(comm, model, ranks, toy_evry=2)

    on_ranks(2, work)


@dataclass(frozen=True)
class Watcher(Feature[Opening]):
    """Adds nothing to a plan."""

    name: ClassVar[str] = "watcher"

    def attach(self, opening: Opening) -> Attachment[Running]:
        return Norms(1, opening)


def test_it_is_there_on_one_process() -> None:
    def work(comm: ThreadComm, model: nn.Module, ranks: int) -> int:
        *parts, own = parallelized(comm, model, ranks, features=[Watcher()])
        train(*parts, own)
        kept = current().attached[model].running.attachments["watcher"]
        assert isinstance(kept, Norms)
        return len(kept.noted)

    with registry.registered(Watcher):
        assert on_ranks(1, work) == [6]
