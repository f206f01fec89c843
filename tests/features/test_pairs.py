"""Every two features: they go together, or the later one says why not.

The later one is later in the order of `shoal.contracts.feature.in_order`. So a rule about two
features stands in one place, and nobody has to look for it in both. A feature that is new needs a
row here beside each of the others that have options.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest
from one_process import (
    Batch,
    State,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    on_threads,
    plain,
    rows_of,
    sgd,
    state,
)
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.codecs.carrier_memory import coded_carriers
from shoal.comm.threads import ThreadComm
from shoal.contracts.feature import Feature, PlanFacts, in_order
from shoal.core.errors import PlanError
from shoal.core.option import options_of
from shoal.core.plan import Plan
from shoal.core.registry import of
from shoal.features.max_error import MaxError
from shoal.front.options import Options
from shoal.front.request import request_of
from shoal.front.session_start import using
from shoal.session.replan_record import kept
from shoal.session.session import current

pytestmark = pytest.mark.quick

ORDER = [feature.name for feature in in_order(kind() for kind in of(Feature).values())]
WITH_OPTIONS = [name for name in ORDER if list(options_of(of(Feature)[name]))]
Pair = tuple[str, str]

TOGETHER = "they go together"
# ranks that do not keep step have other bits on purpose, so there is nothing to compare
IDLE = "they go together, and check_every compares nothing"
TABLE: dict[Pair, str] = {
    ("accuracy_word", "check_every"): TOGETHER,
    ("accuracy_word", "local_steps"): TOGETHER,
    ("accuracy_word", "max_error"): TOGETHER,
    ("accuracy_word", "nearer_first"): TOGETHER,
    ("accuracy_word", "pipeline_schedule"): TOGETHER,
    ("accuracy_word", "staleness"): TOGETHER,
    ("accuracy_word", "sync_batchnorm"): TOGETHER,
    ("accuracy_word", "update_every"): TOGETHER,
    ("accuracy_word", "replan"): TOGETHER,
    ("check_every", "local_steps"): IDLE,
    ("check_every", "max_error"): TOGETHER,
    ("check_every", "nearer_first"): TOGETHER,
    ("check_every", "pipeline_schedule"): TOGETHER,
    ("check_every", "staleness"): IDLE,
    ("check_every", "sync_batchnorm"): TOGETHER,
    ("check_every", "update_every"): TOGETHER,
    ("check_every", "replan"): TOGETHER,
    ("local_steps", "max_error"): TOGETHER,
    ("local_steps", "nearer_first"): "first is about codecs here, and ranks make local steps",
    ("local_steps", "pipeline_schedule"): TOGETHER,
    ("local_steps", "staleness"): TOGETHER,
    (
        "local_steps",
        "sync_batchnorm",
    ): "ranks that step by themselves cannot normalise by the rows of all",
    ("local_steps", "update_every"): "update_every and local_steps do not go together",
    (
        "local_steps",
        "replan",
    ): "a plan is made anew only where ranks update all in each step, together",
    ("max_error", "nearer_first"): TOGETHER,
    ("max_error", "pipeline_schedule"): TOGETHER,
    ("max_error", "staleness"): "codecs need workers that keep step",
    ("max_error", "sync_batchnorm"): TOGETHER,
    ("max_error", "update_every"): TOGETHER,
    ("max_error", "replan"): TOGETHER,
    ("nearer_first", "pipeline_schedule"): TOGETHER,
    ("nearer_first", "staleness"): TOGETHER,
    ("nearer_first", "sync_batchnorm"): TOGETHER,
    ("nearer_first", "update_every"): TOGETHER,
    ("nearer_first", "replan"): TOGETHER,
    ("pipeline_schedule", "staleness"): TOGETHER,
    ("pipeline_schedule", "sync_batchnorm"): TOGETHER,
    ("pipeline_schedule", "update_every"): TOGETHER,
    ("pipeline_schedule", "replan"): TOGETHER,
    (
        "staleness",
        "sync_batchnorm",
    ): "workers that run ahead of one another cannot normalise by the rows of all",
    ("staleness", "update_every"): "update_every and a staleness do not go together",
    ("staleness", "replan"): "a plan is made anew among workers only, and there are servers",
    ("sync_batchnorm", "update_every"): TOGETHER,
    ("sync_batchnorm", "replan"): TOGETHER,
    (
        "update_every",
        "replan",
    ): "a plan is made anew only where ranks update all in each step, together",
}
GOING = {pair: said for pair, said in TABLE.items() if said in (TOGETHER, IDLE)}
REFUSED = {pair: said for pair, said in TABLE.items() if pair not in GOING}

ASKED: dict[str, dict[str, Any]] = {
    "accuracy_word": {"accuracy": "near"},
    "check_every": {"check_every": 1},
    "local_steps": {"local_steps": 2},
    "max_error": {"max_error": 0.5},
    "nearer_first": {"first": 2},
    # the other order is for pipelines, which have few of these features: they refuse by themselves
    "pipeline_schedule": {"schedule": "all_forward"},
    "replan": {"replan": True},
    "staleness": {"staleness": 1},
    "sync_batchnorm": {"sync_batchnorm": True},
    "update_every": {"update_every": {"2": 2}},
}
RANKS = 2


def servers_of(pair: Pair) -> int:
    """How many servers a pair needs."""
    return int("staleness" in pair)


def asked_by(pair: Iterable[str]) -> dict[str, Any]:
    """Keywords that ask for both, and pins to a codec where a bound of its error is asked for."""
    asked: dict[str, Any] = {}
    for name in pair:
        asked |= ASKED[name]
    if "max_error" in pair or "update_every" in pair:
        asked["pins"] = {"*": way_of(pair)}
    return asked


def way_of(pair: Pair) -> str:
    """How all layers are served, if something is pinned."""
    strategy = "server" if "staleness" in pair else "replicate"
    return f"{strategy}:direct" + ("+int8(block=8)" if "max_error" in pair else "")


def model_for(pair: Pair) -> nn.Module:
    """A model for both. It has a batch norm only where one is asked for: it drifts elsewhere."""
    middle = nn.BatchNorm1d(5) if "sync_batchnorm" in pair else nn.Tanh()
    return built(lambda: nn.Sequential(nn.Linear(7, 5), middle, nn.Linear(5, 3)))


def test_the_table_has_every_pair_once_and_in_order() -> None:
    assert list(TABLE) == list(combinations(WITH_OPTIONS, 2)), "give a new feature its rows"
    assert sorted(ASKED) == sorted(WITH_OPTIONS), "say how a new feature is asked for"


def test_features_without_options_go_with_all() -> None:
    """Nobody asks for them, so they are there in every pair below, and refuse no plan."""
    without = [kind for name, kind in of(Feature).items() if name not in WITH_OPTIONS]
    assert {kind.name for kind in without} == {"experience", "residuals", "stragglers"}
    for kind in without:
        assert kind.unasked() is not None
        assert kind.refuses is Feature.refuses and kind.plan is Feature.plan


@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_the_later_one_refuses_and_the_earlier_one_does_not(pair: Pair) -> None:
    """Asked of the draft that a request makes, and of a given plan: before anything is measured."""
    model, asked = model_for(pair), asked_by(pair)
    facts = PlanFacts(model, cluster_of(RANKS).topology, servers=servers_of(pair))
    options = Options.of(asked)
    plan = planned_by(options, way_of(pair), facts)
    assert refusing(options, plan, facts) == [pair[1]]
    of_caller = {name for name in pair if of(Feature)[name].of_plan(plan) is None}
    keywords = {key: asked[key] for name in of_caller for key in ASKED[name]}
    for same in (options, Options.of({**keywords, "plan": plan})):
        with pytest.raises(PlanError) as caught:
            request_of(same, model, facts)
        assert caught.value.what.startswith(TABLE[pair]) and caught.value.do


def planned_by(options: Options, way: str, facts: PlanFacts) -> Plan:
    """A plan for a model whose layers are all served so, with what features add to it."""
    plan = request_of(Options.of({"pins": {"*": way}}), facts.model, facts).draft
    for feature in in_order(options.features):
        plan = feature.plan(plan, facts)
    return plan


def refusing(options: Options, plan: Plan, facts: PlanFacts) -> list[str]:
    """The names of the features that refuse a plan."""
    found = []
    for feature in in_order(options.features):
        try:
            feature.refuses(plan, facts)
        except PlanError:
            found.append(feature.name)
    return found


def parallelized(
    pair: Pair, comm: ThreadComm, model: nn.Module, sample: Batch
) -> tuple[Any, Any, Any]:
    optimizer = sgd(model.parameters())
    return shoal.parallelize(model, F.cross_entropy, optimizer, sample=sample, **asked_by(pair))


@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_what_is_refused_attaches_nothing(pair: Pair) -> None:
    models = [model_for(pair) for _ in range(RANKS)]

    def work(comm: ThreadComm) -> str:
        model = models[comm.rank]
        forward, before = type(model).forward, state(model)
        with using(comm, cluster_of(RANKS, servers_of(pair))):
            sample = rows_of(features(7, 3)[0], comm.rank, RANKS)
            with pytest.raises(PlanError) as caught:
                parallelized(pair, comm, model, sample)
            assert not current().attached and type(model).forward is forward
            assert_same_bits([before, state(model)])
            assert not any(module._forward_hooks for module in model.modules())
            return caught.value.what

    for what in on_threads(RANKS, work, servers_of(pair)):
        assert what.startswith(TABLE[pair])


@pytest.mark.parametrize("pair", GOING, ids="-".join)
def test_what_goes_together_trains(pair: Pair) -> None:
    models = [model_for(pair) for _ in range(RANKS)]
    # three rounds, as workers that run ahead may have the first one's result only after the second
    before, batches = state(models[0]), features(7, 3, steps=6)

    def work(comm: ThreadComm) -> State:
        own = [rows_of(batch, comm.rank, RANKS) for batch in batches]
        with using(comm, cluster_of(RANKS, servers_of(pair))):
            model, loss_fn, optimizer = parallelized(pair, comm, models[comm.rank], own[0])
            check_both_there(pair, model)
            plain(model, loss_fn, optimizer, own)
            return state(model)

    got = on_threads(RANKS, work, servers_of(pair))
    assert difference(before, got[0]) > 1e-3, "nothing was trained"
    if "staleness" not in pair:  # two steps end a round, and a period
        assert_same_bits(got)


def check_both_there(pair: Pair, model: nn.Module) -> None:
    """Fail where a feature that was asked for has been left out in silence."""
    attached = current().attached[model]
    attachments, plan = attached.running.attachments, attached.plan
    assert "residuals" in attachments and ("stragglers" in attachments) == plan.in_step
    there = {
        "accuracy_word": True,  # its codecs may be of no use here
        "nearer_first": "nearer_first" in attachments,
        "check_every": "check_every" in attachments,
        "local_steps": plan.local_steps == 2 and "local_steps" in attachments,
        "max_error": all(
            carrier.most_error == 0.5 for carrier in coded_carriers(attached.engine.transfers)
        )
        and any(coded_carriers(attached.engine.transfers))
        and MaxError.name in attachments,
        "pipeline_schedule": "pipeline_schedule" not in attachments,
        "replan": kept(model) is not None,
        "staleness": plan.staleness == 1 and "staleness" in attachments,
        "sync_batchnorm": "sync_batchnorm" in attachments,
        "update_every": plan.update_every == {"2": 2} and "update_every" in attachments,
    }
    found = [name for name in pair if there[name]]
    assert found == [name for name in pair if (TABLE[pair], name) != (IDLE, "check_every")]
