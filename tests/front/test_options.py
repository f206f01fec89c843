"""Keywords become one record of options, and features: what is wrong is said at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.contracts.codec import Codec
from shoal.contracts.feature import Feature, PlanFacts
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import Topology
from shoal.core.option import options_of
from shoal.core.plan import Choice, Plan
from shoal.core.registry import of
from shoal.features.accuracy import Accuracy
from shoal.features.check_every import CheckReplicas
from shoal.features.first_steps import FirstSteps
from shoal.features.local_steps import LocalSteps
from shoal.features.max_error import MaxError
from shoal.features.pipeline_schedule import PipelineSchedule
from shoal.features.replan import Replan
from shoal.features.staleness import Staleness
from shoal.features.sync_batchnorm import SyncBatchNorm
from shoal.features.update_every import UpdateEvery
from shoal.front.options import Options, compared
from shoal.front.recipe import load
from shoal.front.request import check_beside

pytestmark = pytest.mark.quick
OUTER = shoal.Outer(rule="average")


def small_plan(exchange: str = "direct", **fields: Any) -> Plan:
    return Plan(2, "digest", (Choice("0", "replicate", exchange),), 100, lanes=1, **fields)


ASKED: dict[str, tuple[dict[str, Any], Feature[Any]]] = {
    "accuracy_word": ({"accuracy": "fast", "total_steps": 9}, Accuracy("fast", 9)),
    "check_every": ({"check_every": 7}, CheckReplicas(7)),
    "nearer_first": ({"first": 5}, FirstSteps(5)),
    "local_steps": ({"local_steps": 4, "outer": OUTER}, LocalSteps(4, OUTER)),
    "max_error": ({"max_error": 0.1}, MaxError(0.1)),
    "pipeline_schedule": ({"schedule": "1f1b"}, PipelineSchedule("1f1b")),
    "replan": ({"replan": True}, Replan()),
    "staleness": ({"staleness": None}, Staleness(None)),
    "sync_batchnorm": ({"sync_batchnorm": True}, SyncBatchNorm()),
    "update_every": ({"update_every": {"0": 2}}, UpdateEvery({"0": 2})),
}
OFF: dict[str, Any] = {
    "accuracy": "exact",
    "total_steps": None,
    "check_every": 100,
    "first": None,
    "local_steps": None,
    "outer": None,
    "max_error": None,
    "replan": False,
    "schedule": "all_forward",
    "staleness": 0,
    "sync_batchnorm": False,
    "update_every": None,
}


def test_every_option_of_a_feature_is_here() -> None:
    keywords = {o.keyword for kind in of(Feature).values() for o in options_of(kind)}
    assert keywords == OFF.keys() == {key for asked, _ in ASKED.values() for key in asked}


@pytest.mark.parametrize("name", ASKED)
def test_keywords_make_features(name: str) -> None:
    asked, feature = ASKED[name]
    assert Options.of(asked).features == (feature,)
    assert Options.of({}, features=[feature]) == Options.of(asked)


def test_what_is_off_asks_for_nothing() -> None:
    assert Options.of(OFF) == Options.of({}) == Options()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"local_stpes": 4}, r"takes no 'local_stpes'(.|\n)*did you mean 'local_steps'\?"),
        ({"codec": ["int8"]}, r"takes no 'codec'(.|\n)*did you mean 'codecs'\?"),
        (
            {"zzz": 1},
            r"takes no 'zzz'(.|\n)*one of accuracy, buffers, ch(.|\n)*leave it out",
        ),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest(asked: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Options.of(asked)


LOSSY: dict[str, Any] = {
    "codecs": ["int8"],
    "max_error": 0.1,
    "local_steps": 4,
    "outer": OUTER,
    "first": 5,
    "update_every": {"0": 2},
}


@pytest.mark.parametrize("keyword", LOSSY)
def test_lossy_says_what_keywords_say(keyword: str) -> None:
    names = ["local_steps", "outer"] if keyword == "outer" else [keyword]
    asked = {name: LOSSY[name] for name in names}
    by_lossy, by_keyword = Options.of({}, shoal.Lossy(**asked)), Options.of(asked)
    assert by_lossy == by_keyword != Options()
    assert compared(by_lossy, by_lossy.features) == compared(by_keyword, by_keyword.features)
    with pytest.raises(UsageError, match=rf"{keyword} is given twice(.|\n)*or in shoal\.Lossy"):
        Options.of({keyword: LOSSY[keyword]}, shoal.Lossy(**asked))


def test_lossy_and_keywords_may_ask_for_two_options_of_one_feature() -> None:
    options = Options.of({"outer": OUTER}, shoal.Lossy(local_steps=4))
    assert options.features == (LocalSteps(4, OUTER),)


@pytest.mark.parametrize("name", ASKED)
def test_a_feature_is_not_asked_for_twice(name: str) -> None:
    asked, feature = ASKED[name]
    with pytest.raises(UsageError, match=f"{name} is given twice(.|\n)*or in features"):
        Options.of(asked, features=[feature])
    with pytest.raises(PlanError, match=f"{name}' is given twice"):
        Options.of({}, features=[feature, feature])


def test_one_option_beside_the_feature_in_features_is_twice() -> None:
    with pytest.raises(UsageError, match="local_steps is given twice"):
        Options.of({"outer": OUTER}, features=[LocalSteps(4)])
    with pytest.raises(UsageError, match="local_steps is given twice"):
        Options.of({}, shoal.Lossy(local_steps=4), [LocalSteps(4)])


def test_off_beside_the_feature_in_features_is_no_conflict() -> None:
    assert Options.of({"local_steps": None}, features=[LocalSteps(4)]).features == (LocalSteps(4),)


@pytest.mark.parametrize("steps", [{}, {"local_steps": None}])
def test_an_outer_rule_needs_local_steps(steps: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="there is an outer rule, and no local_steps"):
        Options.of({"outer": OUTER, **steps})


WRONG: list[tuple[str, Any, str]] = [
    ("check_every", -1, "check_every is a whole number"),
    ("check_every", True, "check_every is a whole number"),
    ("local_steps", 0, "local_steps is a number of steps"),
    ("local_steps", 4.0, "local_steps is a number of steps"),
    ("local_steps", True, "local_steps is a number of steps"),
    ("local_steps", "Auto", "local_steps is a number of steps"),
    ("max_error", 0, "max_error is a bound"),
    ("max_error", "a", "max_error is a bound"),
    ("replan", 1, "replan is True or False"),
    ("replan", 0, "replan is True or False"),
    ("staleness", -1, "staleness is a number of steps"),
    ("staleness", False, "staleness is a number of steps"),
    ("sync_batchnorm", 1, "sync_batchnorm is True or False"),
    ("update_every", 4, "update_every is not a mapping"),
    ("memory", "little", r"unknown memory mode(.|\n)*do this: give for instance memory=\"low\""),
    ("memory", ["fast"], "unknown memory mode"),
    ("memory_limit", -1.0, "memory_limit is a number of bytes"),
    ("micro_batches", 0, "micro_batches is a whole number"),
    ("micro_batches", True, "micro_batches is a whole number"),
    ("count", 3, "count is not a function"),
    ("search_options", 3, "search_options is of another type"),
    ("pins", 3, "pins is not a mapping"),
    ("strategies", "replicate", "strategies is a list of names"),
    ("strategies", ["replicat"], "did you mean 'replicate'"),
    ("codecs", 3, "codecs is a list of names"),
    ("accuracy", "nearly", "accuracy is none of its words"),
    ("accuracy", None, "accuracy is none of its words"),
]


@pytest.mark.parametrize(("keyword", "value", "says"), WRONG)
def test_a_value_of_another_kind_is_refused(keyword: str, value: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Options.of({keyword: value})


def test_an_accuracy_is_a_word_for_codecs() -> None:
    near = set(Options.of({"accuracy": "near"}).allowed_codecs)
    assert near == {"bfloat16", "float16", "int8", "int4"}
    assert set(Options.of({"accuracy": "fast"}).allowed_codecs) == set(of(Codec)) > near
    assert Options.of({"accuracy": "exact"}) == Options.of({}) == Options()
    assert Options.of({}).allowed_codecs == ()
    assert Options.of({"accuracy": "exact", "codecs": ["int8"]}).allowed_codecs == ("int8",)
    assert Options.of({"accuracy": "near"}).without_codecs() == Options()


def test_an_accuracy_is_compared_and_stands_alone() -> None:
    options = Options.of({"accuracy": "near"})
    assert compared(options, options.features)["accuracy"] == "near"
    with pytest.raises(UsageError, match="there are both an accuracy and codecs"):
        Options.of({"accuracy": "near", "codecs": ["int8"]})
    with pytest.raises(UsageError, match="there are both a plan and an accuracy"):
        Options.of({"accuracy": "fast", "plan": small_plan()})


def test_an_outer_rule_is_an_outer() -> None:
    with pytest.raises(UsageError, match=r"no shoal\.Outer(.|\n)*got: SGD"):
        Options.of({"local_steps": 4, "outer": torch.optim.SGD([torch.ones(1)])})


def test_lossy_is_a_lossy() -> None:
    wrong: Any = {"codecs": ["int8"]}
    with pytest.raises(UsageError, match=r"lossy is no shoal\.Lossy(.|\n)*got: dict"):
        Options.of({}, wrong)


def test_ranks_compare_what_was_asked() -> None:
    def twice(output: Any, target: Any) -> float:
        return 2.0

    asked: dict[str, Any] = {
        "strategies": ["sliced", "replicate"],
        "pins": {"b": "replicate", "a": "sliced"},
        "placement": {"*": 0, "a": 1},
        "count": twice,
        "staleness": None,
        "local_steps": 4,
    }
    options = Options.of(asked)
    seen = compared(options, options.features)
    assert seen["strategies"] == ["replicate", "sliced"], "in any order"
    assert seen["pins"] == [("a", "sliced"), ("b", "replicate")], "in any order"
    assert seen["placement"] == [("*", 0), ("a", 1)], "the later of two patterns wins"
    assert seen["count"] == "a function" and seen["compute_loss"] == "none"
    assert seen["staleness"] == "unbounded" and seen["local_steps"] == 4
    assert "plan" not in seen and "left_alone" not in seen
    assert "check_every" not in seen, "nobody asked for it"


def test_what_is_iterated_once_may_be_looked_at_twice() -> None:
    layer = nn.Linear(2, 2)
    options = Options.of(
        {"strategies": iter(["sliced"]), "codecs": iter(["int8"]), "left_alone": layer.parameters()}
    )
    assert options.strategies == ("sliced",) and options.codecs == ("int8",)
    assert len(options.left_alone) == 2


CODED = small_plan("direct+int8")
SAID: dict[str, tuple[Plan, Feature[Any], Feature[Any]]] = {
    "staleness": (small_plan(staleness=2), Staleness(2), Staleness(1)),
    "local_steps": (
        small_plan(local_steps=4, outer=OUTER),
        LocalSteps(4, OUTER),
        LocalSteps(4, shoal.Outer()),
    ),
    "update_every": (
        small_plan(update_every={"0": 2}),
        UpdateEvery({"0": 2}),
        UpdateEvery({"0": 3}),
    ),
    "nearer_first": (FirstSteps(5).written(CODED), FirstSteps(5), FirstSteps(4)),
    "pipeline_schedule": (
        PipelineSchedule("1f1b").written(small_plan()),
        PipelineSchedule("1f1b"),
        PipelineSchedule("all_forward"),
    ),
}


def test_every_feature_that_plans_say_is_here() -> None:
    assert {n for n, kind in of(Feature).items() if kind.plan is not Feature.plan} == SAID.keys()


@pytest.mark.parametrize("name", SAID)
def test_a_given_plan_and_a_feature_must_say_the_same(name: str) -> None:
    plan, same, other = SAID[name]
    both = f"there are both a plan and {name}(.|\n)*write {name} into the plan"
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    facts = PlanFacts(model, Topology(("one", "other")))
    check_beside(plan, (same,), facts)
    if name in ("nearer_first", "pipeline_schedule"):  # added to a plan that says nothing of it
        check_beside(CODED, (same,), facts)
        with pytest.raises(PlanError, match=both):
            check_beside(plan, (other,), facts)
        return
    for said, feature in ((plan, other), (small_plan(), same)):
        with pytest.raises(PlanError, match=both):
            check_beside(said, (feature,), facts)


def test_a_plan_may_say_more_exactly_what_is_asked_for() -> None:
    """As a recipe's constants do beside a plan that the same recipe has saved."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    facts = PlanFacts(model, Topology(("one", "other")))
    plan = small_plan(local_steps=4, outer=OUTER)
    for asked in (LocalSteps(4), LocalSteps("auto")):
        check_beside(plan, (asked,), facts)
    check_beside(small_plan(update_every={"0": 2, "1": 2}), (UpdateEvery({"*": 2}),), facts)


def test_a_given_plan_leaves_other_features_to_the_caller() -> None:
    others = [feature for name, (_, feature) in ASKED.items() if name not in SAID]
    others.remove(Accuracy("fast", 9))  # for the plan says which codecs there are
    plan = small_plan()
    assert Options.of({"plan": plan}, features=others).given_plan() == plan


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("placement", "hash"),
        ("memory_limit", 2e9),
        ("codecs", ["int8"]),
        ("search_options", shoal.SearchOptions(chunks=(1,))),
    ],
)
def test_a_given_plan_says_all_of_its_own(keyword: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"there are both a plan and (a )?{keyword}"):
        Options.of({"plan": small_plan(), keyword: value})


def test_a_plan_is_given_as_a_plan_or_a_path(tmp_path: Path) -> None:
    small_plan().save(tmp_path / "plan.json")
    for plan in (small_plan(), tmp_path / "plan.json", str(tmp_path / "plan.json")):
        assert Options.of({"plan": plan}).given_plan() == small_plan()
    assert Options.of({"plan": "auto"}).given_plan() is None
    with pytest.raises(PlanError, match="plan must be"):
        Options.of({"plan": 3}).given_plan()


def test_a_plan_is_not_made_of_a_plan() -> None:
    model, (x, y) = nn.Linear(2, 2), (torch.ones(2, 2), torch.zeros(2).long())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match=r"shoal\.plan makes a plan, and takes none"):
        shoal.plan(model, F.cross_entropy, optimizer, sample=(x, y), plan=small_plan())


def test_a_copy_without_codecs_has_none_anywhere() -> None:
    options = Options.of({"codecs": ["int8"], "pins": {"0": "sliced:direct+int8"}})
    exact = options.without_codecs()
    assert exact.pins == {"0": "sliced:direct"} and not exact.codecs
    coded = small_plan().with_choice(Choice("0", "replicate", "direct+int8"))
    without = Options.of({"plan": coded}).without_codecs().given_plan()
    assert without == small_plan()


RECIPE = """
import torch
from torch import nn
from torch.utils.data import DataLoader
import shoal

def data():
    return DataLoader([1.0])

def model():
    return nn.Linear(2, 3)

def loss():
    return nn.MSELoss()

def optimizer(params):
    return torch.optim.SGD(params, lr=0.5)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.syspath_prepend(str(tmp_path))  # load puts it there too; this takes it away again

    def write(constants: str) -> Path:
        path = tmp_path / "options_of_this_recipe.py"
        path.write_text(RECIPE + constants)
        return path

    return write


@pytest.mark.parametrize(
    ("constants", "feature"),
    [
        ("SYNC_BATCHNORM = True", SyncBatchNorm()),
        ('OPTIONS = {"local_steps": 4}', LocalSteps(4)),
        (
            'OPTIONS = {"local_steps": 4, "outer": shoal.Outer(rule="average")}',
            LocalSteps(4, OUTER),
        ),
        ('OPTIONS = {"update_every": {"0": 2}}', UpdateEvery({"0": 2})),
        ('OPTIONS = {"check_every": 7}', CheckReplicas(7)),
        ('OPTIONS = {"staleness": None}', Staleness(None)),
    ],
)
def test_a_recipe_asks_by_constants(
    write: Callable[[str], Path], constants: str, feature: Feature[Any]
) -> None:
    assert Options.of(load(write(constants)).asked).features == (feature,)


def test_a_recipe_asks_for_nothing_by_default(write: Callable[[str], Path]) -> None:
    """Constants of other names are the recipe's own."""
    assert Options.of(load(write("LOCAL_STEPS = 4\nCHECK_EVERY = 0")).asked) == Options()
    assert Options.of(load(write("SYNC_BATCHNORM = False")).asked) == Options()
    assert Options.of(load(write("")).asked) == Options()


@pytest.mark.parametrize(
    ("constants", "says"),
    [
        (
            'OPTIONS = {"local_steps": 0}',
            "local_steps is a number",
        ),
        ('OPTIONS = {"outer": shoal.Outer()}', "no local_steps"),
        ('OPTIONS = {"local_step": 4}', "parallelize takes no"),
        ("OPTIONS = 3", "OPTIONS is not a mapping"),
    ],
)
def test_a_recipe_with_a_wrong_constant_is_named(
    write: Callable[[str], Path], constants: str, says: str
) -> None:
    path = write(constants)
    with pytest.raises(UsageError) as caught:
        load(path)
    assert caught.match(says) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"weigh": "row"}, "'rows' or 'ranks'"),
        ({"weigh": ["ranks"]}, "'rows' or 'ranks'"),
        ({"weigh": "ranks", "count": len}, "both a count and weigh"),
    ],
)
def test_ranks_are_weighed_by_rows_or_all_alike(asked: dict[str, Any], said: str) -> None:
    assert Options.of({"weigh": "ranks"}).weigh == "ranks"
    with pytest.raises(UsageError, match=said):
        Options.of(asked)
