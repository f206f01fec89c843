"""A rank of a lab with cores has that part of a core and no more, and Shoal knows of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shoal.contracts.launcher import Job
from shoal.core.errors import LabError
from shoal_tools.launch import quota
from shoal_tools.launch.lab import Lab


def _missing() -> str | None:
    """Why no quota can be had here."""
    if (missing := Lab().missing()) is not None:
        return missing
    try:
        quota.remove([quota.make(f"shoal-{os.getpid()}-try", 1.0)])
    except LabError as error:
        return str(error)
    return None


MISSING = _missing()
needs_quotas = pytest.mark.skipif(MISSING is not None, reason=f"no quotas here: {MISSING}")

# Computes for a second, and tells what part of it it had.
BUSY = """
import os, pathlib, sys, time
began, own = time.monotonic(), time.process_time()
while time.monotonic() - began < 1.0: pass
part = (time.process_time() - own) / (time.monotonic() - began)
path = pathlib.Path(sys.argv[1]) / os.environ["RANK"]
path.write_text(f"{part} {os.environ['SHOAL_CORES']}")
"""


def groups() -> list[str]:
    """Those of this process that there are."""
    return [path.name for path in quota.ROOT.rglob(f"shoal-{os.getpid()}-*")]


@pytest.mark.lab
@needs_quotas
def test_a_rank_has_its_part_and_leaves_no_group(tmp_path: Path) -> None:
    lab = Lab(hosts=1, ranks_per_host=2, cores=0.25)
    assert lab.launch(Job((sys.executable, "-c", BUSY, str(tmp_path)), 2)).exit_codes == (0, 0)
    for rank in "01":
        part, told = (tmp_path / rank).read_text().split()
        assert float(part) < 0.4  # a busy machine may have given it less
        assert told == "0.25"
    assert groups() == []


@pytest.mark.lab
@needs_quotas
def test_hosts_have_unlike_parts(tmp_path: Path) -> None:
    lab = Lab(hosts=2, cores=[0.5, 0.2])
    assert lab.launch(Job((sys.executable, "-c", BUSY, str(tmp_path)), 2)).exit_codes == (0, 0)
    told = [(tmp_path / rank).read_text().split() for rank in "01"]
    assert [cores for _, cores in told] == ["0.5", "0.2"]
    assert float(told[1][0]) < 0.35
    assert groups() == []


def test_each_host_has_a_number_of_cores_or_none() -> None:
    with pytest.raises(LabError, match="one for all hosts, or one for each"):
        Lab(hosts=3, cores=[1.0, 0.5])


@pytest.mark.lab
@needs_quotas
def test_groups_of_a_launcher_that_is_gone_are_swept() -> None:
    gone = 1 << 30  # above every process's number
    quota.make(f"shoal-{gone}-0-h0.0", 0.5)
    quota.sweep()
    assert [path.name for path in quota.ROOT.rglob(f"shoal-{gone}-*")] == []


@pytest.mark.parametrize(("cores", "second"), [(0.25, False), (1.5, True)])
def test_a_group_is_made_as_the_kernel_wants_it(
    cores: float, second: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "ROOT", tmp_path)
    (tmp_path / "cpu").mkdir()
    if second:
        (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    group = quota.make("shoal-1-0-h0.0", cores)
    written = {path.name: path.read_text() for path in group.iterdir()}
    if second:
        assert (group.parent, written) == (tmp_path, {"cpu.max": "15000 10000"})
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    else:
        assert group.parent == tmp_path / "cpu"
        assert written == {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "2500"}


def test_a_machine_without_groups_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "ROOT", tmp_path)
    with pytest.raises(LabError, match="quota of processor time"):
        quota.make("shoal-1-0-h0.0", 0.5)


@pytest.mark.parametrize("cores", [0.0, 0.05, -1.0, float("nan"), float("inf")])
def test_no_part_of_a_core_is_refused(cores: float) -> None:
    with pytest.raises(LabError, match="some part of a core"):
        Lab(cores=cores)


def test_each_group_is_tried_however_long_others_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "_GIVE_UP_S", 0.02)
    stuck, empty = tmp_path / "stuck", tmp_path / "empty"
    for group in (stuck, empty):
        group.mkdir()
    (stuck / "in").mkdir()
    quota.remove([tmp_path / "gone", stuck, empty])
    assert [path.name for path in tmp_path.iterdir()] == ["stuck"]


def test_a_group_that_takes_no_quota_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "ROOT", tmp_path)
    (tmp_path / "cpu").mkdir()

    def refuse(*_: object) -> None:
        raise OSError("not writable")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", refuse)
        with pytest.raises(LabError, match="not writable"):
            quota.make("shoal-1-0-h0.0", 0.5)
    assert list((tmp_path / "cpu").iterdir()) == []


def test_a_group_that_stayed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "ROOT", tmp_path)
    group = tmp_path / "cpu" / "shoal-1-0-h0.0"
    group.mkdir(parents=True)
    assert quota.make(group.name, 0.5) == group
    assert (group / "cpu.cfs_quota_us").read_text() == "5000"
