"""A run's record comes back from its file as it was, or is refused with what to do."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_records import everything, trained

from shoal.core.errors import UsageError
from shoal.core.outer_step import Outer
from shoal.core.plan import Choice, Plan
from shoal.core.record import Curve, Record
from shoal_tools.report.page import page
from shoal_tools.report.run_file import FORMAT, from_json, load, to_json, write


@pytest.mark.parametrize(
    "record", [Record("nothing"), trained(5), everything(7)], ids=lambda record: record.title
)
def test_a_record_comes_back(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write(record, path)
    assert load(path) == record
    write(record, tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == page(record) == page(load(path))


@pytest.mark.parametrize("name", ["run.json", "run.html"])
def test_files_are_in_utf_8_wherever_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says so of itself, and a locale of few letters would end a run that is done."""
    record, path = replace(trained(5), title="größer → 汉"), tmp_path / name
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(io, "text_encoding", lambda encoding, _=2: encoding or "iso-8859-1")
        write(record, path)
        if path.suffix == ".json":
            assert load(path) == record
    assert record.title in path.read_text(encoding="utf-8")


def test_a_plan_in_a_simulation_comes_back() -> None:
    record = everything(5)
    assert record.simulation is not None
    scale = record.simulation.scales[-1]
    plan = Plan(
        8,
        "d",
        (Choice("fc", "factor"),),
        1 << 20,
        3,
        placement={"fc": 1},
        outer=Outer(),
        local_steps=4,
    )
    simulation = replace(record.simulation, scales=(replace(scale, plan=plan),))
    record = replace(record, simulation=simulation)
    assert from_json(to_json(record)) == record


def text_of(**changes: object) -> str:
    return json.dumps({**json.loads(to_json(trained(5))), **changes})


def of_simulation(**changes: object) -> str:
    whole = json.loads(to_json(everything(5)))
    whole["run"]["simulation"]["scales"][0].update(changes)
    return json.dumps(whole)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "truncated"),
        ("a page", "malformed"),
        ("[1]", "array"),
        ("[" * 100_000, ""),
        ("{}", "format"),
        ('{"format": 1, "choices": []}', "nobody's word who wrote it"),
        (Plan(2, "d", (Choice("fc", "factor"),), 1, 1).to_json(), "written by shoal.plan"),
        (text_of(format=FORMAT - 1), f"format {FORMAT - 1}, of an older version of Shoal"),
        (text_of(format=FORMAT + 1), f"format {FORMAT + 1}, of a newer version of Shoal"),
        (text_of(run={}), "title"),
        (text_of(run={"title": "a", "step_s": "long"}), "$.run.step_s"),
        (of_simulation(hosts=0), "0 hosts"),
        (of_simulation(times=-1), "-1.0 times one host"),
        (of_simulation(step_s=0), "a step of 0.0 s"),
    ],
)
def test_what_is_no_record_is_refused(text: str, got: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_json(text, "run.json")
    assert caught.value.what == "run.json is no run's record"
    assert got in caught.value.got
    assert caught.value.expected and "--report run.json" in caught.value.do


def test_files_that_cannot_be_read_or_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.json", tmp_path, tmp_path / "bytes.json"):
        with pytest.raises(UsageError, match=r"cannot be read(.|\n)*do this: check the path"):
            load(path)
    with pytest.raises(UsageError, match=r"cannot be written(.|\n)*do this: give another path"):
        write(Record("a"), tmp_path / "no folder" / "run.json")


def test_what_is_not_finite_is_written_as_nothing() -> None:
    record = trained(5)
    assert record.training is not None
    training = replace(record.training, loss=Curve(1, (1.0, None, 2.0)))
    record = replace(record, training=training)
    assert from_json(to_json(record)) == record


def test_a_file_of_this_format_is_read_for_ever() -> None:
    """Where this fails a file of yesterday is not read: raise FORMAT, and write another file."""
    path = Path(__file__).parent / f"run-format-{FORMAT}.json"
    record = load(path)
    before, after = (json.loads(text)["run"] for text in (path.read_text(), to_json(record)))
    assert after["explanation"] == before["explanation"], "its fields stand where they stood"
    assert record.explanation is not None and record.simulation is not None
    assert len(record.explanation.layers) == 2 and len(record.simulation.scales) == 3
    assert page(record).count("<section") == 6
