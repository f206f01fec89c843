"""`Checkpoints(in_memory_every=k)`: generations in time, and a restart from the newest."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_script import Script, on_ranks

import shoal
from shoal.checkpoint import host_memory
from shoal.checkpoint.folder import LATEST
from shoal.comm.threads import ThreadComm
from shoal.core.errors import UsageError

pytestmark = pytest.mark.quick
HOSTS = ("a", "b")


@pytest.fixture(autouse=True)
def memories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("SHOAL_HOST_MEMORY", str(folder))
    monkeypatch.setattr(host_memory, "_TRIES", 1)
    return folder


class Killed(Exception):
    """The end of a run."""


def opened(folder: Path, script: Script, every: int = 2, **options: Any) -> shoal.Checkpoints:
    return shoal.Checkpoints(
        folder, every_s=1e6, in_memory_every=every, **options, **script.objects, mark=0
    )


def trained(
    saved: shoal.Checkpoints, script: Script, steps: int, *, starts: bool = True
) -> list[int]:
    """Make steps; the steps that have a generation."""
    if starts:
        script.start()
    generations = []
    for _ in range(steps):
        script.step(saved.steps)
        saved.step(mark=saved.steps + 1)
        settled(saved)
        if saved.memory_cost is not None:
            generations.append(saved.memory_cost.step)
    return sorted({*generations})


def settled(saved: shoal.Checkpoints) -> None:
    assert saved._memory is not None
    saved._memory.settle()


def killed(saved: shoal.Checkpoints) -> None:
    saved.__exit__(Killed, Killed(), None)


def run_to(folder: Path, steps: int, **options: Any) -> Any:
    def work(comm: ThreadComm, script: Script) -> Any:
        saved = opened(folder, script, **options)
        generations = trained(saved, script, steps)
        killed(saved)
        return generations

    return work


def resumed(folder: Path, **options: Any) -> Any:
    def work(comm: ThreadComm, script: Script) -> Any:
        saved = opened(folder, script, **options)
        mark = saved.resume()["mark"]
        killed(saved)
        assert mark == saved.steps
        return mark

    return work


def test_a_generation_comes_every_k_steps_and_a_run_goes_on_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def second(comm: ThreadComm, script: Script) -> Any:
        with opened(tmp_path / "run", script) as saved:
            assert saved.resume() == {"mark": 4}
            assert trained(saved, script, 3) == [5, 7], "the first step makes one"
        return script.model.state_dict()

    def whole(comm: ThreadComm, script: Script) -> Any:
        script.start()
        for number in range(7):
            script.step(number)
        return script.model.state_dict()

    with caplog.at_level(logging.INFO, "shoal"):
        assert on_ranks(2, run_to(tmp_path / "run", 5), HOSTS) == [[2, 4], [2, 4]]
        got = on_ranks(2, second, HOSTS)
    said = [record.getMessage() for record in caplog.records]
    assert (
        sum("snapshot of step 2 in memory" in line and "predicted: copy" in line for line in said)
        == 1
    )
    assert any("goes on from the snapshot of step 4 in the memory of a, b" in line for line in said)
    expected = on_ranks(2, whole, HOSTS)[0]
    assert all(map(torch.equal, got[1].values(), expected.values()))


def test_an_orderly_end_leaves_nothing(tmp_path: Path, memories: Path) -> None:
    def work(comm: ThreadComm, script: Script) -> None:
        with opened(tmp_path / "run", script) as saved:
            trained(saved, script, 3)
            assert len([*memories.iterdir()]) == 2
            comm.numbers([0] * 2, "both have looked")

    on_ranks(2, work, HOSTS)
    assert not [*memories.iterdir()]
    assert on_ranks(2, resumed(tmp_path / "run"), HOSTS) == [0, 0]


def test_the_newer_of_memory_and_disk_is_taken(tmp_path: Path) -> None:
    def saves(comm: ThreadComm, script: Script) -> None:
        saved = opened(tmp_path / "run", script)
        trained(saved, script, 4)
        saved.save()
        trained(saved, script, 1, starts=False)
        saved.save()
        killed(saved)

    on_ranks(2, saves, HOSTS)
    assert (tmp_path / "run" / LATEST).read_text() == "step-00000005\n"
    assert on_ranks(2, resumed(tmp_path / "run"), HOSTS) == [5, 5]
    shutil.rmtree(tmp_path / "run" / "step-00000005")
    assert on_ranks(2, resumed(tmp_path / "run"), HOSTS) == [4, 4]


def test_who_goes_back_to_an_earlier_checkpoint_is_not_overruled(tmp_path: Path) -> None:
    def saves(comm: ThreadComm, script: Script) -> None:
        saved = opened(tmp_path / "run", script)
        trained(saved, script, 1)
        saved.save()
        trained(saved, script, 2, starts=False)
        saved.save()
        trained(saved, script, 1, starts=False)
        killed(saved)

    on_ranks(2, saves, HOSTS)
    (tmp_path / "run" / LATEST).write_text("step-00000001\n")
    assert on_ranks(2, resumed(tmp_path / "run"), HOSTS) == [1, 1]
    assert on_ranks(2, resumed(tmp_path / "run"), HOSTS) == [1, 1]


def test_a_run_that_was_deleted_does_not_come_back(tmp_path: Path, memories: Path) -> None:
    on_ranks(2, run_to(tmp_path / "run", 4), HOSTS)
    shutil.rmtree(tmp_path / "run")
    assert on_ranks(2, resumed(tmp_path / "run"), HOSTS) == [0, 0]


def test_a_run_that_does_not_resume_begins_anew(tmp_path: Path) -> None:
    on_ranks(2, run_to(tmp_path / "run", 5), HOSTS)
    on_ranks(2, run_to(tmp_path / "run", 2), HOSTS)
    assert on_ranks(2, resumed(tmp_path / "run"), HOSTS) == [2, 2]


def test_commit_saves_where_it_is_quickest(tmp_path: Path) -> None:
    def work(comm: ThreadComm, script: Script) -> None:
        saved = opened(tmp_path / "run", script, every=100)
        trained(saved, script, 3)
        saved.commit(mark=3)
        killed(saved)

    on_ranks(2, work, HOSTS)
    assert not (tmp_path / "run" / LATEST).exists()
    assert on_ranks(2, resumed(tmp_path / "run"), HOSTS) == [3, 3]

    def on_disk(comm: ThreadComm, script: Script) -> None:
        with shoal.Checkpoints(tmp_path / "other", **script.objects) as saved:
            saved.commit()

    on_ranks(2, on_disk, HOSTS)
    assert (tmp_path / "other" / LATEST).read_text() == "step-00000000\n"


def test_where_there_is_no_room_the_disk_goes_on(
    tmp_path: Path,
    memories: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def work(comm: ThreadComm, script: Script) -> None:
        with opened(tmp_path / "run", script) as saved:
            assert trained(saved, script, 6) == []
            saved.commit()
        held = [path for path in memories.rglob("*.safetensors") if path.stat().st_size]
        assert not held

    monkeypatch.setattr("os.posix_fallocate", full)
    with caplog.at_level(logging.WARNING, "shoal"):
        on_ranks(2, work, HOSTS)
    said = [r.getMessage() for r in caplog.records if "no more snapshots" in r.getMessage()]
    assert len(said) == 1 and "MB in" in said[0] and "leave out in_memory_every" in said[0]
    assert (tmp_path / "run" / LATEST).read_text() == "step-00000006\n"


def test_a_snapshot_that_is_still_copied_is_left_out_on_all_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(comm: ThreadComm, script: Script) -> Any:
        with opened(tmp_path / "run", script, every=1) as saved:
            script.start()
            memory = saved._memory
            assert memory is not None
            for number in range(3):
                script.step(number)
                if comm.rank == 0:  # one rank's thread is late
                    memory._background._thread = Late()  # type: ignore[assignment]
                saved.step()
            memory._background._thread = None
            return memory.cost

    with caplog.at_level(logging.WARNING, "shoal"):
        assert on_ranks(2, work, HOSTS) == [None, None]
    assert sum("takes longer than 1 steps" in r.getMessage() for r in caplog.records) == 1


class Late:
    """A thread that has not ended."""

    def is_alive(self) -> bool:
        return True


def test_two_jobs_on_one_host_are_refused(tmp_path: Path) -> None:
    def work(comm: ThreadComm, script: Script) -> None:
        saved = opened(tmp_path / "run", script)
        with pytest.raises(UsageError, match="another job"):
            opened(tmp_path / "run", script)
        other = opened(tmp_path / "other", script)
        for each in (saved, other):
            each.close()

    on_ranks(2, work, HOSTS)


def test_no_rights_are_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOST_MEMORY", str(tmp_path / "missing"))

    def work(comm: ThreadComm, script: Script) -> None:
        with pytest.raises(UsageError, match="cannot be kept in this host's memory"):
            opened(tmp_path / "run", script)
        shoal.Checkpoints(tmp_path / "run", **script.objects).close()  # the lock is free again

    on_ranks(2, work, HOSTS)


@pytest.mark.parametrize("every", [0, -1, 2.0, True, "20"])
def test_a_wrong_number_of_steps_is_refused(every: Any, tmp_path: Path) -> None:
    def work(comm: ThreadComm, script: Script) -> None:
        with pytest.raises(UsageError, match="in_memory_every is a number of steps"):
            opened(tmp_path / "run", script, every=every)

    on_ranks(1, work)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_host_keeps_its_own(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, run_to(tmp_path / "run", 4), ("a",) * ranks)
    assert on_ranks(ranks, resumed(tmp_path / "run"), ("a",) * ranks) == [4] * ranks
