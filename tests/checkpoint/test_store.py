"""Checkpoints in a store that fsspec reaches: written marker last, gone on with by all ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import nn, optim

import shoal
from shoal.checkpoint.folder import LATEST, STATE, as_path, passing
from shoal.checkpoint.store import Store
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using
from shoal_tools.commands.options import NamedPath

fsspec = pytest.importorskip("fsspec")
RUN = NamedPath(file_okay=False, stores=True)
HOSTS = Cluster(Topology(("host",) * 2), Link(1e-4, 1e8))


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a run that is not there yet; nothing stays in this host's own folders."""
    name = "run" if request.param == "memory" else f"{tmp_path}/run"
    before = set(Path(tempfile.gettempdir()).glob("shoal-checkpoint*"))
    yield f"{request.param}://{name}"
    assert set(Path(tempfile.gettempdir()).glob("shoal-checkpoint*")) <= before
    system = fsspec.filesystem("memory")
    for path in system.ls("/", detail=False):
        system.rm(path, recursive=True)


def files(url: str) -> list[str]:
    system, root = fsspec.core.url_to_fs(url)
    return sorted(str(path).removeprefix(f"{root}/") for path in system.find(root))


def filled(value: float) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def written(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(name)
    return folder


def on_two_ranks(work: Any) -> list[Any]:
    def join(comm: ThreadComm) -> Any:
        with using(comm, HOSTS):
            return work(comm)

    return run(2, join)


def test_a_run_is_saved_in_a_store_and_gone_on_with(url: str) -> None:
    def first(comm: ThreadComm) -> None:
        model = filled(0.0)
        with shoal.Checkpoints(url, every_s=1e6, keep=2, model=model, epoch=0) as saved:
            assert saved.resume() == {"epoch": 0}
            for number in range(1, 5):
                with torch.no_grad():
                    model.weight.fill_(number)
                saved.step(epoch=number)
                saved.save()

    def second(comm: ThreadComm) -> tuple[int, float]:
        model = filled(0.0)
        with shoal.Checkpoints(url, every_s=1e6, model=model, epoch=0) as saved:
            assert saved.resume() == {"epoch": 4}
            return saved.steps, model.weight.sum().item()

    on_two_ranks(first)
    each = ["model.safetensors", "random-state.safetensors", STATE]
    kept = [f"step-0000000{number}/{name}" for number in (3, 4) for name in each]
    assert files(url) == [LATEST, *kept]
    assert on_two_ranks(second) == [(4, 24.0)] * 2


def test_what_has_no_marker_is_no_checkpoint_of_a_run(url: str) -> None:
    def save(comm: ThreadComm) -> None:
        model = filled(1.0)
        with shoal.Checkpoints(url, every_s=1e6, model=model) as saved:
            for _ in range(2):
                saved.step()
                saved.save()

    def go_on(comm: ThreadComm) -> int:
        with shoal.Checkpoints(url, every_s=1e6, model=filled(0.0)) as saved:
            saved.resume()
            return saved.steps

    on_two_ranks(save)
    system, root = fsspec.core.url_to_fs(url)
    system.rm(f"{root}/step-00000002/{STATE}")  # as a job leaves it that is killed
    assert on_two_ranks(go_on) == [1, 1]


def test_one_checkpoint_is_saved_loaded_and_replaced(url: str) -> None:
    def work(comm: ThreadComm) -> tuple[dict[str, Any], float]:
        model = filled(1.0)
        optimizer = optim.SGD(model.parameters(), 0.1)
        shoal.save(url, model=model, optimizer=optimizer, epoch=1)
        shoal.save(url, model=filled(2.0), epoch=2)
        return shoal.load(url, model=model, epoch=0), model.weight.sum().item()

    assert on_two_ranks(work) == [({"epoch": 2}, 12.0)] * 2
    assert files(url) == ["model.safetensors", "random-state.safetensors", STATE]


def test_the_marker_comes_last_and_goes_first(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(url)
    store.put(written(tmp_path / "one", STATE, "a", "z"), "step-00000001")
    system, _ = fsspec.core.url_to_fs(url)
    put = type(system).put_file

    def fails(self: Any, source: str, target: str, **how: Any) -> None:
        if target.endswith("/z"):
            raise OSError("the network is gone")
        put(self, source, target, **how)

    monkeypatch.setattr(type(system), "put_file", fails)
    with pytest.raises(OSError, match="network"):
        store.put(written(tmp_path / "two", STATE, "a", "z"), "step-00000001")
    assert files(url) == ["step-00000001/a"]
    assert store.complete() == [] and not store.has("step-00000001")


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_what_a_killed_job_left_on_this_host_is_removed(url: str) -> None:
    left = passing()
    host_and_name, _, number = str(left).rpartition("-")
    dead = Path(f"{host_and_name.rpartition('-')[0]}-{1 << 30}-{number}")
    dead.mkdir()
    shoal.save(url, model=filled(1.0))
    assert not dead.exists()


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_path_of_this_host_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="path of a folder on this host"):
        as_path(url, "--weights")
    assert RUN.convert(url, None, None) == url
    with pytest.raises(click.BadParameter, match="it is an address"):
        NamedPath().convert(url, None, None)


class Broken:
    """A file system of a package that has an error class of its own."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("access denied")


def test_what_cannot_be_is_refused(url: str, tmp_path: Path) -> None:
    model = filled(1.0)
    with pytest.raises(UsageError, match="cannot reach that store") as unknown:
        shoal.save("nowhere://bucket/run", model=model)
    assert "Protocol not known" in str(unknown.value) and "s3fs" in str(unknown.value)
    with pytest.raises(UsageError, match="no such checkpoint") as missing:
        shoal.load(url, model=model)
    assert url in str(missing.value)
    with pytest.raises(UsageError, match="one store"):
        shoal.Checkpoints(url, local=True, model=model)
    system, root = fsspec.core.url_to_fs(url)
    system.makedirs(root, exist_ok=True)
    system.pipe_file(f"{root}/mine.txt", b"1")
    with pytest.raises(UsageError, match="something else"):
        shoal.save(url, model=model)
    assert files(url) == ["mine.txt"]
    store = Store(url)
    vars(store)["_opened"] = (Broken(), root)
    with pytest.raises(OSError, match="RuntimeError: access denied"):
        store.has("")


def test_messages_leave_out_names_and_passwords() -> None:
    store = Store("sftp://somebody:secret@host:22/run")
    assert str(store) == "sftp://…@host:22/run"
    assert store.where("last") == "sftp://…@host:22/run/last"
    assert store.url.startswith("sftp://somebody:secret@")  # fsspec takes it whole
