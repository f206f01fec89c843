"""`Checkpoints`: saved in time, beside training, by all ranks at the same step; gone on with."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_script import Script, on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import shoal
from shoal.checkpoint.folder import LATEST
from shoal.comm.rendezvous import agent_variable, has_agent, is_asked_to_end
from shoal.comm.threads import ThreadComm
from shoal.core.errors import UsageError
from shoal.front.session_start import using
from shoal_tools.testing.planned_faults import Faults


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_goes_on_where_it_was(tmp_path: Path, ranks: int) -> None:
    def first(comm: ThreadComm, script: Script) -> Any:
        script.start()
        with shoal.Checkpoints(tmp_path, every_s=1e-6, keep=2, **script.objects, epoch=0) as saved:
            assert saved.resume() == {"epoch": 0}
            for number in range(5):
                script.step(number)
                assert saved.step(epoch=number) is False
                saved._background.wait()
        for number in range(5, 8):
            script.step(number)
        return script.model.state_dict()

    def second(comm: ThreadComm, script: Script) -> Any:
        with shoal.Checkpoints(tmp_path, every_s=1e6, **script.objects, epoch=0) as saved:
            assert saved.resume() == {"epoch": 4}
            script.start()
            assert saved.steps == 5
            for number in range(5, 8):
                script.step(number)
                saved.step()
            return script.model.state_dict()

    expected = on_ranks(ranks, first)
    assert sorted(os.listdir(tmp_path)) == [LATEST, "LOCK", "step-00000004", "step-00000005"]
    got = on_ranks(ranks, second)
    for one in (*expected, *got):
        assert all(map(torch.equal, one.values(), expected[0].values()))


def test_hosts_of_their_own_write_all_of_it_and_one_that_has_lost_it_is_sent_it(
    tmp_path: Path,
) -> None:
    hosts = ("one", "one", "two")

    def first(comm: ThreadComm, script: Script) -> Any:
        script.start()
        folder = tmp_path / hosts[comm.rank]
        with shoal.Checkpoints(folder, local=True, **script.objects) as saved:
            for number in range(3):
                script.step(number)
                saved.step()
            saved.save()
        return script.model.state_dict()

    def second(comm: ThreadComm, script: Script) -> Any:
        folder = tmp_path / hosts[comm.rank]
        with shoal.Checkpoints(folder, local=True, **script.objects) as saved:
            saved.resume()
            assert saved.steps == 3
        return script.model.state_dict()

    expected = on_ranks(3, first, hosts)
    for host in ("one", "two"):
        assert (tmp_path / host / "step-00000003" / "model.safetensors").is_file()
        assert (tmp_path / host / LATEST).read_text() == "step-00000003\n"
    shutil.rmtree(tmp_path / "one")
    for got in on_ranks(3, second, hosts):
        assert all(map(torch.equal, got.values(), expected[0].values()))


def test_a_write_that_fails_is_logged_and_the_last_one_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(comm: ThreadComm, script: Script) -> None:
        script.start()
        saved = shoal.Checkpoints(tmp_path, every_s=1e-6, **script.objects)
        saved.save()
        with Faults("rank 0, step 0, save, full disk", comm.rank) as faults:
            faults.at(0, "save")
            for number in range(2):
                script.step(number)
                saved.step()
                saved._background.wait()
            with pytest.raises(UsageError, match=r"No space left|rank 0 cannot go on"):
                saved.close()

    with caplog.at_level(logging.ERROR, "shoal"):
        on_ranks(2, work)
    assert caplog.text.count("a checkpoint was not written, and the older ones stay") == 2
    assert sorted(os.listdir(tmp_path)) == [LATEST, "LOCK", "step-00000000"]


def test_two_jobs_that_write_one_folder(tmp_path: Path) -> None:
    def work(comm: ThreadComm, script: Script) -> None:
        with (
            shoal.Checkpoints(tmp_path, **script.objects),
            pytest.raises(UsageError, match="another job writes its checkpoints there"),
        ):
            shoal.Checkpoints(tmp_path, **script.objects)

    on_ranks(2, work)


@pytest.mark.parametrize("stopped_at", [3, 4, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_over_epochs_goes_on_wherever_it_stopped(
    tmp_path: Path, ranks: int, stopped_at: int
) -> None:
    """Two epochs of four steps, as the guide has them; also behind the last row of an epoch."""

    def work(comm: ThreadComm, script: Script) -> list[list[int]]:
        loader = shoal.shard(DataLoader(range(32), 8, shuffle=True), batch="global")
        sample = script.rows[0]
        x, y = (torch.cat([part] * 8) for part in sample)
        drawn = []
        with shoal.Checkpoints(tmp_path, **script.objects, loader=loader) as saved:
            saved.resume()
            script.start()
            for _ in range(loader.epoch, 2):
                for rows in loader:
                    F.cross_entropy(script.model(x[: len(rows)]), y[: len(rows)]).backward()
                    script.optimizer.step()
                    drawn.append(rows.tolist())
                    saved.step()
                    if saved.steps == stopped_at and not (tmp_path / LATEST).exists():
                        saved.save()
                        return drawn
            return drawn

    before, after = on_ranks(ranks, work), on_ranks(ranks, work)
    assert len(before[0]) == stopped_at and len(before[0]) + len(after[0]) == 8
    rows = [row for rank in (*before, *after) for step in rank for row in step]
    assert sorted(rows) == sorted([*range(32)] * 2), "each row once an epoch"


def test_a_signal_asks_for_a_checkpoint(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    model = nn.Linear(2, 2)
    with using(ThreadComm()), shoal.Checkpoints(tmp_path, signals=True, model=model) as saved:
        assert saved.step() is False
        os.kill(os.getpid(), signal.SIGTERM)
        while not saved.step():  # at the next decision, which is a second away at most
            pass
        assert signal.getsignal(signal.SIGTERM) is before
        assert (tmp_path / LATEST).read_text() == f"step-{saved.steps:08d}\n"
        steps = saved.steps
        assert saved.step() is True and saved.steps == steps, "also in a loop around"
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_in_the_loop_lets_signals_act_as_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with (
        using(ThreadComm()),
        pytest.raises(KeyError),
        shoal.Checkpoints(tmp_path, signals=True, model=nn.Linear(2, 2)),
    ):
        assert signal.getsignal(signal.SIGINT) is not before
        raise KeyError
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Have an agent, as its ranks do; return its end of the socket."""
    own, theirs = socket.socketpair()
    with own, theirs:
        for name, value in agent_variable(theirs.fileno()).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SHOAL_JOB", "job-2")
        yield own


def test_all_ranks_end_at_one_step_with_a_checkpoint_when_an_agent_asks(
    tmp_path: Path, agent: socket.socket
) -> None:
    def work(comm: ThreadComm, script: Script) -> tuple[Any, int]:
        script.start()
        ended: SystemExit | None = None
        saved = shoal.Checkpoints(tmp_path, every_s=600, **script.objects)
        try:
            with saved:
                for number in count():
                    script.step(number % 8)
                    if comm.rank == 0 and number == 2:
                        agent.send(b"e")
                    saved.step()
        except SystemExit as error:
            ended = error
        return ended and ended.code, saved.steps

    ((code, steps),) = set(on_ranks(2, work))
    assert (code, (tmp_path / LATEST).read_text()) == (75, f"step-{steps:08d}\n")
    assert steps >= 3


def test_a_process_that_only_inherits_the_variable_has_no_agent(
    tmp_path: Path, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.send(b"e")
    assert has_agent() and is_asked_to_end()
    number, _, inode = os.environ["SHOAL_AGENT"].partition(":")
    for other in (f"{number}:{int(inode) + 1}", f"9999:{inode}", "x", f"{number}"):
        monkeypatch.setenv("SHOAL_AGENT", other)
        assert not has_agent() and not is_asked_to_end()


def test_a_later_crew_that_finds_no_checkpoint_is_told_that_it_begins_anew(
    tmp_path: Path, agent: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    with using(ThreadComm()), shoal.Checkpoints(tmp_path, model=model) as saved:
        saved.resume()
        assert "begins anew" in caplog.text and "local=True" in caplog.text
        caplog.clear()
        saved.save()
        saved.resume()
    assert "begins anew" not in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every_s": 0}, "every_s"), ({"every_s": "10min"}, "every_s"), ({"keep": 0}, "keep is")],
)
def test_what_is_no_number_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        shoal.Checkpoints(tmp_path / "run", **options, model=nn.Linear(1, 1))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
def test_hosts_without_a_common_disk_go_on_from_the_newest_of_all(
    tmp_path: Path, order: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 may be on another host at each start, and its checkpoint is not the newest then."""
    for host, steps in (("one", 1), ("two", 2)):
        with using(ThreadComm()):
            model = nn.Linear(7, 3).double()
            nn.init.constant_(model.weight, float(steps))
            with shoal.Checkpoints(tmp_path / host, model=model) as saved:
                saved.steps = steps
                saved.save()

    def work(comm: ThreadComm, script: Script) -> int:
        with shoal.Checkpoints(tmp_path / order[comm.rank], model=script.model) as saved:
            saved.resume()
            assert bool((script.model.weight == 2).all())
            return saved.steps

    with caplog.at_level(logging.INFO, "shoal"):
        assert on_ranks(2, work) == [2, 2]
    words = "step-00000002 of rank 1; rank 0 has step-00000001"
    assert (words in caplog.text) == (order[0] == "one")


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no folder": (None, {}, "shoal.Checkpoints takes the path of a folder"),
    "an empty name": ("", {}, "shoal.Checkpoints takes the path of a folder"),
    "local": ("run", {"local": "x"}, "local is True or False"),
    "signals": ("run", {"signals": 1}, "signals is True or False"),
    "name": ("run", {"../x": 1}, "cannot be saved under that name"),
}


@pytest.mark.parametrize(("folder", "options", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_right_is_refused_on_all_ranks(
    tmp_path: Path,
    folder: Any,
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    def work(comm: ThreadComm, script: Script) -> None:
        given = (folder, options) if comm.rank else ("run", {})
        with pytest.raises(UsageError, match=message):
            shoal.Checkpoints(given[0], **given[1], model=script.model)

    on_ranks(2, work)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_removed_while_training_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with using(ThreadComm()), shoal.Checkpoints(folder, model=nn.Linear(2, 2)) as saved:
        saved.save()
        shutil.rmtree(folder)
        saved.step()
        saved.save()
        assert sorted(os.listdir(folder)) == [LATEST, "LOCK", "step-00000001"]
        with pytest.raises(UsageError, match="another job"):
            shoal.Checkpoints(folder, model=nn.Linear(2, 2))
