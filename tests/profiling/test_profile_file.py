"""What was measured comes back from its file as it was, or is refused with what to do."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import pytest

from shoal.core.cost import CodingPace, Pace, Price
from shoal.core.errors import UsageError
from shoal.core.facts import (
    Cluster,
    Facts,
    LayerProfile,
    Link,
    ModelProfile,
    MovingState,
    ParameterProfile,
    SyncNorm,
    Topology,
)
from shoal.core.terms import Terms
from shoal.profiling.products import ProductFacts
from shoal.profiling.profile_file import Measured
from shoal.strategies.cut_layers import CutFacts
from shoal.strategies.row_parts import RowFacts

WEIGHT = ParameterProfile("fc.weight", (3, 2), 6, 4, used=True, ready_s=0.1 + 0.2, sparse=True)
FACTS = (
    ProductFacts(1e-3, 1e-6, own_s=2e-3),
    CutFacts(input_elements=7, rowwise=True),
    RowFacts("", (("call", (True, False)),), 4, 0.5),
)
LAYER = LayerProfile("fc", "Linear", (WEIGHT,), rows=8, inputs=2, outputs=3, facts=FACTS)
PROFILE = ModelProfile(
    (LAYER, replace(LAYER, name="other", facts=())),
    0.01,
    0.02,
    1e-300,
    digest="0a",
    moving=(MovingState("norm.mean", 8, 4, "mean"),),
    norms=(SyncNorm("norm", 8, 4),),
    terms=Terms("target", ("y", 0), (0, 1), summed=True),
)
PACE = Pace(Price(1e-4, 1e-8), Price(2e-5, 1e-9))
CLUSTER = Cluster(
    Topology(("one", "other"), processors=("x", "x")),
    Link(1e-4, 125e6, 1e-9, 2e5),
    0.5,
    paces=MappingProxyType({"direct": PACE}),
    moves=PACE,
    codings={"int8": CodingPace(1e-9)},
)


def test_what_was_measured_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    Measured(PROFILE, CLUSTER).save(path)
    back = Measured.load(path)
    assert back == Measured(PROFILE, replace(CLUSTER, paces=dict(CLUSTER.paces)))
    assert back.profile.layers[0].measured(RowFacts) == FACTS[2]


def test_a_lone_process_has_no_links_but_cores() -> None:
    text = Measured(PROFILE, Cluster(Topology(("one",)), Link(0.0, math.inf), 3.0)).to_json()
    assert json.loads(text)["cluster"] is None
    cluster = Measured.from_json(text).cluster
    assert (cluster.size, cluster.cores_per_rank, cluster.link.bytes_per_s) == (1, 3.0, math.inf)


@dataclass(frozen=True)
class OutsideFacts(Facts):
    """Of somebody's own strategy."""

    flag: bool = False


def test_facts_of_anybody_are_kept() -> None:
    profile = replace(PROFILE, layers=(replace(LAYER, facts=(OutsideFacts(flag=True),)),))
    back = Measured.from_json(Measured(profile, CLUSTER).to_json())
    assert back.profile.layers[0].measured(OutsideFacts).flag


@pytest.mark.parametrize(
    ("before", "after", "got"),
    [
        ('"format": 1', '"format": 2', "format 2"),
        ('"ProductFacts"', '"LostFacts"', "LostFacts of layer fc"),
        ('"fixed_s": 0.001', '"fixed_s": "much"', "in the facts of layer fc"),
        ('"forward_s": 0.01', '"forward_s": "long"', "forward_s"),
        ("{", "[", "array"),
    ],
)
def test_what_is_no_profile_is_refused(before: str, after: str, got: str) -> None:
    text = Measured(PROFILE, CLUSTER).to_json()
    assert before in text
    with pytest.raises(UsageError, match=r"some\.json is no profile") as caught:
        Measured.from_json(text.replace(before, after, 1), source="some.json")
    assert got in caught.value.got
    assert "shoal plan RECIPE --save-profile FILE" in caught.value.do


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lost\.json cannot be read"):
        Measured.load(tmp_path / "lost.json")
    with pytest.raises(UsageError, match=r"cannot be saved as .*profile\.json"):
        Measured(PROFILE, CLUSTER).save(tmp_path / "lost" / "profile.json")
