"""`outcome`: a step's terms, by any rank alone, or the slowest rank's, on all of them."""

from __future__ import annotations

from typing import Any

import pytest
from one_process import Batch, built, cluster_of, features, mlp, on_threads, plain, rows_of, sgd
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.explanation import PredictedStep
from shoal.core.outcome import Outcome
from shoal.front.outcomes import outcome_of_ranks
from shoal.front.session_start import using
from shoal.planner.explain import explain
from shoal.session.session import current

RANKS = 2
BATCHES = features(7, 3, steps=12)


def trained(comm: ThreadComm, model: nn.Module, steps: int, **how: Any) -> nn.Module:
    own: list[Batch] = [rows_of(batch, comm.rank, RANKS) for batch in BATCHES[:steps]]
    optimizer = sgd(model.parameters())
    shoal.parallelize(model, F.cross_entropy, optimizer, sample=own[0], **how)
    plain(model, F.cross_entropy, optimizer, own)
    return model


@pytest.mark.parametrize("pin", ["replicate", "sliced", "column"])
def test_the_terms_of_measured_steps_add_up(pin: str) -> None:
    models = [built(mlp) for _ in range(RANKS)]

    def work(comm: ThreadComm) -> tuple[Outcome | None, Outcome | None, str, PredictedStep]:
        with using(comm, cluster_of(RANKS)):
            model = trained(comm, models[comm.rank], 12, pins={"*": "replicate", "0": pin})
            own = shoal.outcome(model) if comm.rank == 1 else None  # by itself
            attached = current().attached[model]
            explained = explain(attached.plan, attached.profile, attached.cluster)
            return own, outcome_of_ranks(model), shoal.explain(model), explained.step

    (_, of_all, text, step), (own, same, _, _) = on_threads(RANKS, work)
    assert own is not None and of_all is not None
    assert of_all == same and of_all.steps == 11
    for found in (own, of_all):
        assert sum(term.predicted_s for term in found.terms) == pytest.approx(found.predicted_s)
        times = {term.name: term.measured_s for term in found.terms}
        assert sum(times.values()) == pytest.approx(found.measured_s + times["between steps"])
        assert times["compute"] > 0 and times["exchanges"] > 0 and times["optimizer"] > 0
    # the plan's table and the outcome's say the same of the same step
    predicted = {term.name: term.predicted_s for term in of_all.terms}
    assert step.forward_s + step.backward_s == pytest.approx(predicted["compute"])
    assert step.exposed_s == pytest.approx(predicted["exchanges"])
    assert step.total_s == pytest.approx(of_all.predicted_s)
    assert "off most: " in text and max(map(len, text.splitlines())) <= 100


def test_before_two_steps_and_alone_there_is_none() -> None:
    models = [built(mlp) for _ in range(RANKS)]

    def work(comm: ThreadComm) -> list[Outcome | None]:
        with using(comm, cluster_of(RANKS)):
            model = trained(comm, models[comm.rank], 1)
            return [shoal.outcome(model), outcome_of_ranks(model)]

    assert on_threads(RANKS, work) == [[None, None]] * RANKS
    with using(ThreadComm()):
        model = built(mlp)
        shoal.parallelize(model, F.cross_entropy, sgd(model.parameters()))
        assert shoal.outcome(model) is None and outcome_of_ranks(model) is None


def test_optimizers_are_ordinary_again_afterwards() -> None:
    models = [built(mlp) for _ in range(RANKS)]

    def work(comm: ThreadComm) -> None:
        with using(comm, cluster_of(RANKS)):
            model = models[comm.rank]
            optimizer = sgd(model.parameters())
            own = rows_of(BATCHES[0], comm.rank, RANKS)
            shoal.parallelize(model, F.cross_entropy, optimizer, sample=own)
            shoal.unparallelize(model)
            assert not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]

    on_threads(RANKS, work)
