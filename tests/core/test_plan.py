"""A plan survives JSON, refuses what is no plan, and cuts layers into the same sites everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.errors import PlanError
from shoal.core.plan import Choice, Plan, Site
from shoal.core.role import Role

ROLES = {"replicate": Role.BUCKET, "factor": Role.LAYER, "sliced": Role.OWNED}


def plan(*choices: tuple[str, str, str], bucket_bytes: int = 100) -> Plan:
    return Plan(
        2,
        "digest",
        tuple(Choice(*choice) for choice in choices),
        bucket_bytes,
        lanes=2,
        predicted_s=0.5,
    )


def test_a_layer_that_owners_update_is_cut_into_parts_of_about_a_bucket() -> None:
    made = plan(
        ("a", "sliced", "direct"),
        ("b", "replicate", "ring"),
        ("c", "sliced", "direct"),
        bucket_bytes=2 << 20,
    )
    sizes = {"a": 7 << 20, "b": 7 << 20, "c": 5 << 19}
    whole = Site(("b",), "replicate", "ring"), Site(("c",), "sliced", "direct")
    in_parts = [Site(("a",), "sliced", "direct", part, 4) for part in range(4)]
    assert list(made.sites(sizes, ROLES)) == [*in_parts, *whole]
    placed = replace(made, placement="round-robin")
    assert len(list(placed.sites(sizes, ROLES))) == 3, "given whole"


def test_printed_it_says_what_serves_each_layer() -> None:
    made = plan(("head", "factor", ""), ("body.conv", "sliced", "direct"), bucket_bytes=3 << 19)
    head, *rows = str(replace(made, placement="hash", staleness=3)).splitlines()
    assert head == (
        "plan for 2 ranks, buckets of 1.5 MiB, 2 in flight, a predicted step of 500.0 ms, "
        "placement hash, staleness 3"
    )
    assert rows == ["  head       factor", "  body.conv  sliced:direct"]
    assert "placement" not in str(made) and "staleness" not in str(made)


def test_a_file_that_is_no_text_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"\x80\x81")
    with pytest.raises(PlanError, match=r"model\.pt cannot be read"):
        Plan.load(path)


def test_a_saved_plan_loads_as_it_was(tmp_path: Path) -> None:
    made = plan(("b", "factor", ""), ("a", "replicate", "ring"))
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


@pytest.mark.parametrize("placement", ["round-robin", {"b.*": 1, "b.weight": 0}])
def test_a_placement_is_saved_and_balanced_where_a_file_has_none(
    placement: str | dict[str, int],
) -> None:
    made = replace(plan(("b", "sliced", "ring")), placement=placement)
    read = Plan.from_json(made.to_json())
    assert read == made
    if isinstance(placement, dict):
        assert list(read.placement) == list(placement), "the later of two patterns wins"
    older = [line for line in made.to_json().splitlines() if '"placement"' not in line]
    assert Plan.from_json("\n".join(older)).placement == "balanced"


def test_a_choice_is_edited_by_changing_one_line() -> None:
    text = plan(("b", "factor", ""), ("a", "replicate", "ring")).to_json()
    line = '"strategy": "factor", "exchange": ""'
    assert line in text
    edited = Plan.from_json(text.replace(line, '"strategy": "replicate", "exchange": "tree"'))
    assert edited.choice("b") == Choice("b", "replicate", "tree")
    with pytest.raises(KeyError):
        edited.choice("c")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"format": 1', '"format": 2', "not a plan of format 1"),
        ('"lanes": 2', '"lanes": 0', "at least 1"),
        ('"lanes": 2', '"lanes": "2"', "lanes is of the wrong type"),
        ('"lanes": 2', '"lanez": 2', "unknown fields"),
        ('"ranks": 2,', "", "lacks a field"),
        ('"placement": "balanced"', '"placement": 1', "placement is of the wrong type"),
        ('"late": 0', '"late": -1', "late is a number of sites"),
        (
            '"placement": "balanced"',
            '"placement": "robin"',
            "one of balanced, round-robin, hash, or ranks",
        ),
        (
            '"placement": "balanced"',
            '"placement": {"b": "1"}',
            "neither a policy nor ranks by name",
        ),
        ('"layer": "b"', '"lair": "b"', "choice 0 has unknown fields"),
        ("{", "", "not JSON"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_reason(old: str, new: str, says: str) -> None:
    text = plan(("b", "factor", "")).to_json()
    assert old in text
    with pytest.raises(PlanError, match=says):
        Plan.from_json(text.replace(old, new, 1))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json"):
        Plan.load(tmp_path / "none.json")


def test_layers_join_until_the_bucket_is_full() -> None:
    made = plan(*((name, "replicate", "ring") for name in "abcde"))
    sizes = {"a": 40, "b": 40, "c": 40, "d": 500, "e": 10}
    assert list(made.sites(sizes, ROLES)) == [
        Site(("a", "b"), "replicate", "ring"),  # c would make it 120
        Site(("c",), "replicate", "ring"),  # d would make it 540
        Site(("d",), "replicate", "ring"),
        Site(("e",), "replicate", "ring"),
    ]


def test_only_equal_choices_share_a_bucket_and_others_stand_alone() -> None:
    made = plan(
        ("a", "replicate", "ring"),
        ("b", "factor", ""),
        ("c", "replicate", "tree"),
        ("d", "replicate", "ring"),
    )
    assert list(made.sites(dict.fromkeys("abcd", 10), ROLES)) == [
        Site(("b",), "factor", ""),
        Site(("a", "d"), "replicate", "ring"),
        Site(("c",), "replicate", "tree"),
    ]
