"""A second start of a job takes the figures of the first one; a changed job is measured anew."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.cost import Pace, Price
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.known_figures import KnownFigures
from shoal.core.plan import Plan
from shoal.features import experience
from shoal.front import cluster, earlier_figures
from shoal.front.session_start import using
from shoal.profiling import steps
from shoal.session.session import Attached

RANKS, TRIED = 2, 1e8


class Work:
    """What starts have measured and searched on rank 0."""

    def __init__(self) -> None:
        self.links = self.steps = self.searches = 0
        self.carried = TRIED


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    done = Work()
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    measured, found = steps._measured, earlier_figures.plan_for

    def probe_link(comm: ThreadComm, **_: object) -> Link:
        done.links += comm.rank == 0
        return Link(1e-4, 1e8)

    def measure(sample: object, layers: object, comm: ThreadComm, *rest: object) -> object:
        done.steps += comm.rank == 0
        return measured(sample, layers, comm, *rest)  # type: ignore[arg-type]

    def plan(profile: object, there: object, **among: object) -> Plan:
        done.searches += 1
        made: Plan = found(profile, there, **among)  # type: ignore[arg-type]
        return made

    monkeypatch.setattr(cluster, "probe_link", probe_link)
    pace = Pace(Price(1e-4, 1e-8 / 3), Price(1e-5, 1e-9))
    monkeypatch.setattr(cluster, "probe_paces", lambda *_, **__: {"allreduce": pace, "ring": pace})
    monkeypatch.setattr(cluster, "probe_moves", lambda *_, **__: pace)
    monkeypatch.setattr(cluster, "probe_now", lambda *_: done.carried)
    monkeypatch.setattr(steps, "_measured", measure)
    monkeypatch.setattr(earlier_figures, "plan_for", plan)
    # of the step to warm up, which other threads' work changes here
    monkeypatch.setattr(steps, "_ALIKE", 1e9)
    return done


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(x).tanh())


class Changed(Own):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(x).relu())


Changed.__name__ = Changed.__qualname__ = "Own"


def start(
    kind: type[nn.Module] = Own, rows: int = 4, train: int = 0, *, loaded: bool = False
) -> Attached:
    """Start a job anew, and train for some steps; give what rank 0 has attached."""
    models = [kind() for _ in range(RANKS)]

    def rank(comm: ThreadComm) -> Attached:
        model = models[comm.rank]
        with using(comm) as session:
            if loaded:  # as `shoal.load` notes it
                session.usual_rows[model] = {RANKS: 4.0}
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sample = torch.full((rows, 4), 1.0 + comm.rank), torch.zeros(rows, 2)
            _, loss_fn, _ = shoal.parallelize(model, nn.MSELoss(), optimizer, sample=sample)
            for _ in range(train):
                optimizer.zero_grad()
                loss_fn(model(sample[0]), sample[1]).backward()
                optimizer.step()
            return session.attached[model]

    return run(RANKS, rank, timeout_s=60)[0]


def test_a_second_start_measures_nothing_and_takes_the_same_plan(
    work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    first = start()
    assert (work.links, work.steps, work.searches) == (1, 1, 1)
    with caplog.at_level(logging.INFO, "shoal"):
        second = start()
    assert (work.links, work.steps, work.searches) == (1, 1, 1)
    assert second.plan == first.plan
    assert second.profile == first.profile
    assert second.cluster == first.cluster
    assert "the model's times are known from" in caplog.text
    assert "links are known from" in caplog.text


def test_a_changed_job_is_measured_anew(work: Work) -> None:
    start()
    start(Changed)  # of the same names and shapes
    assert (work.links, work.steps) == (1, 2)
    start(rows=6)
    assert (work.links, work.steps) == (1, 3)
    start()
    assert (work.links, work.steps) == (1, 3)


def test_changed_links_are_measured_anew_and_it_is_said(
    work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    work.carried = TRIED / 5
    with caplog.at_level(logging.INFO, "shoal"):
        start()
    assert (work.links, work.steps) == (2, 1)
    assert "so they are measured again" in caplog.text


def test_a_step_that_takes_otherwise_is_measured_anew_with_all_prices(
    work: Work, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setattr(steps, "_ALIKE", 1e-9)
    with caplog.at_level(logging.INFO, "shoal"):
        start()
    assert work.steps == 2
    assert "the model's times are no longer as they were" in caplog.text


def test_nothing_is_kept_where_the_user_wants_none(
    work: Work, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", "off")
    start()
    start()
    assert (work.links, work.steps, work.searches) == (2, 2, 2)
    assert [*tmp_path.iterdir()] == []


def test_a_plan_that_somebody_has_edited_is_searched_for_again(
    work: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    (path,) = tmp_path.glob("plan-*")
    path.write_text(path.read_text().replace('\\"choices\\"', '\\"chosen\\"'))
    with caplog.at_level(logging.INFO, "shoal"):
        start()
    assert work.searches == 2
    assert "a plan cannot be taken from" in caplog.text


def test_the_code_of_a_model_is_the_same_in_every_process() -> None:
    """Sets of constants are in another order in each process."""

    def forward(way: str) -> bool:
        return way in {"sum", "mean", "none"}

    told = [*earlier_figures._codes(forward)]
    assert str(["'mean'", "'none'", "'sum'"]) in told
    assert not any("frozenset" in text for text in told)


def test_links_that_were_given_are_not_kept(work: Work, tmp_path: Path) -> None:
    given, models = Cluster(Topology(("one", "other")), Link(1e-4, 1e8)), [Own(), Own()]

    def rank(comm: ThreadComm) -> None:
        with using(comm, given):
            optimizer = torch.optim.SGD(models[comm.rank].parameters(), lr=0.1)
            sample = torch.ones(4, 4), torch.zeros(4, 2)
            shoal.parallelize(models[comm.rank], nn.MSELoss(), optimizer, sample=sample)

    run(RANKS, rank, hosts=["one", "other"], timeout_s=60)
    assert work.links == 0
    assert [*tmp_path.glob("links-*")] == []


def test_steps_of_a_run_are_known_at_the_next_start(
    work: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(train=experience._STEPS // 2 - 1)
    assert [*tmp_path.glob("steps-*")] == []
    start(train=experience._STEPS)
    (path,) = tmp_path.glob("steps-*")
    kept = json.loads(path.read_text())["value"]
    assert kept["taken"] in kept["kinds"]
    assert kept["kinds"][kept["taken"]]["steps"] > experience._STEPS / 2
    with caplog.at_level(logging.INFO, "shoal"):
        start()
    assert "steps of an earlier run took" in caplog.text


@pytest.mark.parametrize("resumes", [False, True])
def test_a_model_that_was_loaded_keeps_the_kind_of_plan(
    work: Work, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    asked: list[bool] = []

    def preferred(best: Plan, *_: object, resumes: bool) -> tuple[Plan, str]:
        asked.append(resumes)
        return best, ""

    monkeypatch.setattr(earlier_figures, "prefer", preferred)
    start(loaded=resumes)
    assert asked == [resumes]


def test_files_hold_no_weights(work: Work, tmp_path: Path) -> None:
    class Wide(Own):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.last = nn.Linear(4, 4000), nn.Linear(4000, 2)

    start(Wide)
    kept = {path.name.partition("-")[0]: path.stat().st_size for path in tmp_path.iterdir()}
    assert kept.keys() == {"links", "model", "plan"}
    assert sum(kept.values()) < 24_000  # weights have 26,000 numbers


def test_a_figure_of_another_type_is_measured() -> None:
    known = KnownFigures({"seconds": "long"})
    assert known.figure("seconds", float, lambda: 0.5) == 0.5
    assert known.has_measured
