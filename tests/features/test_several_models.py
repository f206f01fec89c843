"""Features of several models in one session: a checkpoint concerns those that it has."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from one_process import Batch, built, cluster_of, features, mlp, rows_of
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PlanError, RanksDiffer
from shoal.core.outer_step import Outer
from shoal.front.session_start import using
from shoal.session.session import current

BATCH = features(7, 3, steps=1)[0]


def on_two(work: Any) -> list[Any]:
    def each(comm: ThreadComm) -> Any:
        with using(comm, cluster_of(2)):
            return work(comm, rows_of(BATCH, comm.rank, 2))

    return run(2, each, timeout_s=60)


def spread(own: Batch, **how: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = built(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts: tuple[Any, Any, Any] = shoal.parallelize(
        model, F.cross_entropy, optimizer, sample=own, **how
    )
    return parts


def step(model: nn.Module, loss_fn: Any, optimizer: Any, own: Batch) -> None:
    optimizer.zero_grad()
    loss_fn(model(own[0]), own[1]).backward()
    optimizer.step()


def test_a_model_that_is_not_saved_takes_no_part(tmp_path: Path) -> None:
    """On one rank it may be gone already."""

    def work(comm: ThreadComm, own: Batch) -> list[str]:
        on_local_steps, *_ = spread(own, local_steps=4, outer=Outer(rule="average"))
        plain, *_ = spread(own, pins={"*": "replicate:direct"})
        kept = current().attached[on_local_steps].running.attachments["local_steps"]
        entered: list[str] = []
        saving = kept.saving
        kept.saving = lambda: (entered.append("saving"), saving())[1]  # type: ignore[method-assign]
        shoal.save(tmp_path / "saved", model=plain)
        return entered

    assert on_two(work) == [[], []]


def test_an_optimizer_that_is_saved_alone_has_the_mean_of_ranks(tmp_path: Path) -> None:
    def work(comm: ThreadComm, own: Batch) -> tuple[Tensor, Tensor]:
        parts = spread(own, local_steps=4, outer=Outer(rule="average"))
        step(*parts, own)
        state = parts[2].state[next(parts[0].parameters())]
        mine = state["momentum_buffer"].clone()
        shoal.save(tmp_path / "saved", optimizer=parts[2])
        assert torch.equal(mine, state["momentum_buffer"]), "a rank has its own state again"
        shoal.load(tmp_path / "saved", optimizer=parts[2])
        return mine, parts[2].state[next(parts[0].parameters())]["momentum_buffer"]

    (first, loaded), (second, _) = on_two(work)
    torch.testing.assert_close(loaded, (first + second) / 2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "change", [{"local_steps": 2}, {"update_every": {"0": 3}}, {"outer": Outer(rule="slowmo")}]
)
def test_given_plans_that_differ_between_ranks_are_refused(change: dict[str, Any]) -> None:
    how: dict[str, Any] = {"pins": {"*": "replicate:direct"}}
    if "update_every" in change:
        how["update_every"] = {"0": 2}
    else:
        how |= {"local_steps": 4, "outer": Outer(rule="average")}

    def made(comm: ThreadComm, own: Batch) -> str:
        model, *_ = spread(own, **how)
        plan = shoal.plan_of(model)
        assert plan is not None
        return plan.to_json()

    text = on_two(made)[0]

    def work(comm: ThreadComm, own: Batch) -> None:
        plan = shoal.Plan.from_json(text)
        with pytest.raises(RanksDiffer, match=next(iter(change))):
            spread(own, plan=replace(plan, **change) if comm.rank else plan)

    on_two(work)


def test_a_model_that_may_be_planned_anew_is_freed_with_its_name() -> None:
    """No cycle keeps it until the collector comes."""

    def work(comm: ThreadComm, own: Batch) -> bool:
        model, loss_fn, optimizer = spread(own, replan=True)
        alive = ref(model)
        del model, loss_fn, optimizer
        return alive() is None

    gc.disable()
    try:
        assert on_two(work) == [True, True]
    finally:
        gc.enable()


def test_a_feature_that_refuses_as_it_is_attached_leaves_nothing_open() -> None:
    """A fused SGD with a dampening cannot begin with some parameters later than with others."""

    def work(comm: ThreadComm, own: Batch) -> int:
        model = built(mlp)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, fused=True
        )
        with pytest.raises(PlanError, match="dampening"):
            shoal.parallelize(
                model,
                F.cross_entropy,
                optimizer,
                sample=own,
                pins={"*": "replicate:direct"},
                update_every={"0": 2},
            )
        return len(current().threads)

    before = threading.active_count()
    assert on_two(work) == [0, 0]
    assert threading.active_count() <= before


def test_an_object_may_be_called_features(tmp_path: Path) -> None:
    """States of features have a file of a name that no keyword can have."""

    def work(comm: ThreadComm, own: Batch) -> Tensor:
        parts = spread(own, local_steps=4, outer=Outer(rule="nesterov"))
        step(*parts, own)
        shoal.save(tmp_path / "saved", model=parts[0], features={"seen": torch.arange(3.0)})
        found = shoal.load(tmp_path / "saved", model=parts[0], features=None)["features"]["seen"]
        assert isinstance(found, Tensor)
        return found

    for seen in on_two(work):
        assert torch.equal(seen, torch.arange(3.0))
