"""`shoal report`, and `--report` of the commands that write what it draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from made_records import trained

from command_line import RECIPE, prepare, shoal
from shoal.core.facts import Cluster, LayerProfile, Link, ModelProfile, ParameterProfile, Topology
from shoal.core.record import PREDICTED, Record
from shoal.core.trace import MAIN
from shoal.profiling.profile_file import Measured
from shoal_tools.cli import main
from shoal_tools.report.page import page
from shoal_tools.report.run_file import load, write
from shoal_tools.simulate import slowest


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


def report(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["report", *words])
    return done.exit_code, done.output


def test_a_record_becomes_a_page_beside_it_or_elsewhere(tmp_path: Path) -> None:
    write(trained(5), tmp_path / "run.json")
    code, said = report(str(tmp_path / "run.json"))
    assert code == 0
    assert f"wrote {tmp_path}/run.html" in said
    assert (tmp_path / "run.html").read_text() == page(trained(5))
    code, _ = report(str(tmp_path / "run.json"), "-o", str(tmp_path / "other.html"))
    assert code == 0
    assert (tmp_path / "other.html").read_text() == page(trained(5))


def test_what_cannot_be_drawn_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format": 0, "written_by": "shoal.run"}')
    for words, said in (
        ((str(tmp_path / "none.json"),), "do this: check the path"),
        ((str(tmp_path / "run.json"),), "got: format 0, of an older version of Shoal"),
        ((RECIPE, "-o", str(tmp_path / "page.json")), "ends in .html"),
        ((RECIPE,), "is no run's record"),
        ((RECIPE, "-o", str(tmp_path / "no" / "page.html")), "there is no folder"),
    ):
        code, told = report(*words)
        assert code == 2
        assert said in told
    assert not (tmp_path / "page.json").exists()


def trained_with(tmp_path: Path, *words: str, ranks: int) -> Record:
    path = tmp_path / "run.json"
    assert shoal("train", RECIPE, *words, "--report", path, ranks=ranks) == [0] * ranks
    return load(path)


def test_train_writes_curves_steps_and_the_plan_with_its_reasons(tmp_path: Path) -> None:
    pin = "--pin", "*=replicate:direct+int8"
    record = trained_with(tmp_path, "--steps", "11", *pin, ranks=2)
    assert record.title == "tiny_recipe"
    assert record.machine is not None and record.machine.cores > 0
    assert record.training is not None and record.training.steps == 11
    assert len(record.training.loss.values) == len(record.training.step_s.values) == 11
    assert record.step_s == record.training.median_step_s
    assert record.outcome is not None and record.outcome.measured_s > 0
    assert record.explanation is not None
    for layer in record.explanation.layers:
        assert layer.reason and layer.others and layer.forward_s > 0
        assert layer.plain_bytes == 4 * layer.parameters, "2·n·(P − 1)/P of four bytes each"
        assert layer.chosen.sent_bytes < layer.exact_bytes
    assert [row.layer for row in record.codecs] == ["2", "0"]
    assert record.tracks[0].name == PREDICTED
    assert [track.name.partition(" (")[0] for track in record.tracks[1:]] == ["rank 0", "rank 1"]
    for track in record.tracks[1:]:
        main = [event.what for event in track.events if event.thread == MAIN]
        for what in ("forward", "backward", "wait for gradients", "optimizer"):
            assert main.count(what) == 3
        exchanges = [event for event in track.events if event.what.startswith("exchange")]
        assert exchanges and all(event.thread.startswith("lane") for event in exchanges)
    assert "The step, predicted beside measured" in page(record)


def test_a_process_that_trains_alone_has_a_report_without_a_plan(tmp_path: Path) -> None:
    record = trained_with(tmp_path, "--steps", "2", ranks=1)
    assert record.explanation is None and record.codecs == ()
    (track,) = record.tracks
    main = [event.what for event in track.events if event.thread == MAIN]
    assert main == ["forward", "backward", "optimizer"] * 2
    assert "Training" in page(record)


@pytest.mark.slow
def test_local_steps_have_no_predicted_timeline(tmp_path: Path) -> None:
    words = "--steps", "8", "--local-steps", "4", "--outer", "average"
    record = trained_with(tmp_path, *words, ranks=2)
    assert record.explanation is not None and record.explanation.local
    assert PREDICTED not in [track.name for track in record.tracks]
    assert "the bytes of a layer are those of one exchange" in page(record)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A file of one layer of 40 MB, as two hosts measured it."""
    weight = ParameterProfile("fc.weight", (10_000_000,), 10_000_000, 4, used=True, ready_s=0.1)
    layer = LayerProfile("fc", "Conv2d", (weight,), forward_s=0.2, backward_s=0.3)
    measured = Cluster(Topology(("one", "other")), Link(1e-4, 125e6), 4.0)
    path = tmp_path / "profile.json"
    Measured(ModelProfile((layer,), 0.2, 0.3, 0.01, digest=""), measured).save(path)
    return str(path)


def simulated(profile: str, path: Path, *words: str) -> Record:
    words = "--from", profile, "--report", str(path), *words
    done = CliRunner().invoke(main, ["simulate", *words])
    assert done.exit_code == 0, done.output
    return load(path)


@pytest.mark.parametrize("strong", [False, True])
def test_simulate_writes_its_answer_with_the_plan_for_the_most_hosts(
    profile: str, tmp_path: Path, strong: bool
) -> None:
    words = ["--hosts", "1,8", *(["--strong"] if strong else [])]
    record = simulated(profile, tmp_path / "run.json", *words)
    assert record.simulation is not None
    last = record.simulation.scales[-1]
    assert record.explanation is not None and record.explanation.ranks == last.hosts == 8
    (layer,) = record.explanation.layers
    assert layer.chosen.choice == last.plan.choices[0]
    # of the slowest of 8 hosts in the median step, where 2 measured it
    times = slowest(8, 0.5, sigma=0.02) / slowest(2, 0.5, sigma=0.02)
    assert layer.forward_s == pytest.approx(times * (0.2 / 8 if strong else 0.2))
    assert record.explanation.step.total_s == pytest.approx(last.step_s, rel=1e-12)
    (track,) = record.tracks
    assert track.name == PREDICTED and track.rates
    assert "The model, layer by layer" in page(record)


def test_simulate_of_one_host_has_no_plan(profile: str, tmp_path: Path) -> None:
    record = simulated(profile, tmp_path / "run.json", "--hosts", "1")
    assert record.explanation is None and record.tracks == ()
    assert "One host alone" in page(record)


def test_where_no_json_is_asked_for_it_is_a_page(profile: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["simulate", "--from", profile, "--report", str(path)])
    assert done.exit_code == 0, done.output
    assert path.read_text().startswith("<!DOCTYPE html>")
