"""A generation counts once all hosts have it, and outlives any one of them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.checkpoint import generations as module
from shoal.checkpoint import recovery as recovery_module
from shoal.checkpoint.generations import Generations, Kept, next_to
from shoal.checkpoint.host_memory import HostMemory
from shoal.checkpoint.parts import Spread
from shoal.checkpoint.recovery import Recovery
from shoal.checkpoint.snapshot import Saved, Snapshot
from shoal.checkpoint.state import State
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Topology
from shoal.tensors.sharded_parameter import OverRanks

pytestmark = pytest.mark.quick
HOSTS = ("a", "a", "b", "c")
SIZES = [3, 0, 4, 5]
RUN = "0123456789abcdef" * 2


def whole_of(step: int) -> Tensor:
    return torch.arange(24.0).reshape(12, 2) + 100 * step


@dataclass
class Rank:
    """One rank's side, in a folder that stands for the memory of all hosts."""

    comm: ThreadComm
    root: Path
    run: str = RUN
    memory: HostMemory = field(init=False)
    generations: Generations = field(init=False)

    def __post_init__(self) -> None:
        self.memory = HostMemory(self.root, "run", self.comm.topology.hosts[self.comm.rank])
        if self.comm.topology.local_ranks[self.comm.rank] == 0:
            self.memory.lock()
        self.comm.numbers([0] * self.comm.size, "all have their folders")
        self.generations = Generations(self.comm.channel("memory"), self.memory, self.run)

    def take(self, step: int, number: int, buffer: float = 0.0) -> Kept:
        """Make a generation of a tensor that is cut, one that is whole, and plain data."""
        comm, whole = self.comm, whole_of(step)
        snapshot = Snapshot(keeps=comm.topology.local_ranks[comm.rank] == 0)
        sizes = SIZES[: comm.size - 1]
        sizes.append(12 - sum(sizes))
        cut = OverRanks("cut", whole, 0, sizes, comm)
        objects = {
            "model": {"cut": Spread(cut.part(whole).contiguous(), cut), "whole": whole * 2},
            "state": {"buffer": torch.full((5,), buffer), "step": step},
        }
        forms = {name: snapshot.encode(name, value) for name, value in objects.items()}
        taken = self.generations.take(number, snapshot, State(forms, random=[{}], step=step))
        return self.generations.finish(taken, 0.0)

    def newest(self) -> Saved | None:
        """Bring the newest generation."""
        recovery = Recovery(self.comm, self.memory, [self.run])
        found = recovery.newest()
        return None if found is None else recovery.saved(found)

    def check(self, step: int, buffer: float = 0.0) -> None:
        """Fail unless the newest generation is of that step, whole."""
        saved = self.newest()
        assert saved is not None and saved.state.step == step
        model, state = saved.value("model"), saved.value("state")
        assert torch.equal(model["cut"], whole_of(step))
        assert torch.equal(model["whole"], whole_of(step) * 2)
        assert state["step"] == step and state["buffer"].tolist() == [buffer] * 5


def on_ranks(
    root: Path, work: Callable[[Rank], Any], hosts: tuple[str, ...] = HOSTS, run_id: str = RUN
) -> list[Any]:
    def each(comm: ThreadComm) -> Any:
        rank = Rank(comm, root, run_id)
        try:
            return work(rank)
        finally:
            rank.memory.unlock(ended=False)

    return run(len(hosts), each, timeout_s=20, hosts=hosts)


def folder_of(root: Path, host: str) -> Path:
    return HostMemory(root, "run", host).folder


def test_the_next_host_is_one_of_a_ring() -> None:
    topology = Topology(("a", "a", "b", "c", "c", "c"))
    assert [next_to(topology, rank) for rank in range(6)] == [2, 2, 3, 0, 1, 0]
    assert next_to(Topology(("a", "a")), 0) is None


@pytest.mark.parametrize("lost", ["a", "b", "c"])
@pytest.mark.parametrize("new", [(), ("new",), ("new", "d", "d")])
def test_a_generation_outlives_any_one_host(
    lost: str, new: tuple[str, ...], tmp_path: Path
) -> None:
    on_ranks(tmp_path, lambda rank: (rank.take(3, 1), rank.take(5, 2)))
    shutil.rmtree(folder_of(tmp_path, lost))
    left = tuple(dict.fromkeys(host for host in HOSTS if host != lost))
    on_ranks(tmp_path, lambda rank: rank.check(5), (*new, *left))


def test_nothing_that_all_have_is_sent_and_each_piece_once(tmp_path: Path) -> None:
    kept = on_ranks(tmp_path, lambda rank: rank.take(3, 1))
    pieces = [8 * size for size in SIZES]
    assert all(0 < one.sent_bytes - of < 200 for one, of in zip(kept, pieces, strict=True))
    files = {path.name for path in folder_of(tmp_path, "a").glob("1/*.safetensors")}
    assert files == {
        f"{name}.safetensors" for name in ("model", "state", "rank-0", "rank-1", "rank-3")
    }


def test_a_host_that_has_a_part_does_not_receive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[int, int]] = []
    really = recovery_module._receive

    def counted(comm: ThreadComm, size: int, source: int) -> bytes:
        received.append((comm.rank, source))
        return really(comm, size, source)

    monkeypatch.setattr(recovery_module, "_receive", counted)
    on_ranks(tmp_path, lambda rank: rank.take(3, 1))
    on_ranks(tmp_path, lambda rank: rank.check(3))
    # "a" lacks the pieces of rank 2, "b" those of rank 3, and "c" those of ranks 0 and 1: two files
    assert sorted({rank for rank, _ in received}) == [0, 1, 2, 3]
    assert len(received) == 2 * (1 + 1 + 1 + 2)
    assert (1, 0) in received, "the second rank of a host has it from the first"


def test_where_hosts_differ_rank_0_counts(tmp_path: Path) -> None:
    on_ranks(tmp_path, lambda rank: rank.take(3, 1, buffer=rank.comm.rank))
    shutil.rmtree(folder_of(tmp_path, "a"))
    on_ranks(tmp_path, lambda rank: rank.check(3, buffer=0.0), ("b", "c"))


@pytest.mark.parametrize("name", ["rank-2.safetensors", "rank-2.json", "state.json", "whole.json"])
@pytest.mark.parametrize("how", ["changed", "gone"])
def test_half_a_generation_does_not_count(name: str, how: str, tmp_path: Path) -> None:
    on_ranks(tmp_path, lambda rank: (rank.take(3, 1), rank.take(5, 2)))
    shutil.rmtree(folder_of(tmp_path, "a"))
    for host in ("b", "c"):
        file = folder_of(tmp_path, host) / "0" / name
        if how == "gone":
            file.unlink(missing_ok=True)
        elif file.exists():
            content = bytearray(file.read_bytes())
            content[-20] ^= 1
            file.write_bytes(content)
    on_ranks(tmp_path, lambda rank: rank.check(3), ("b", "c"))


def test_a_host_killed_within_a_snapshot_leaves_the_one_before(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        rank.take(3, 1)
        rank.take(5, 2)
        snapshot = Snapshot(keeps=rank.comm.rank in (0, 2, 3))
        forms = {"state": snapshot.encode("state", {"buffer": torch.zeros(5), "step": 7})}
        rank.generations.take(3, snapshot, State(forms, random=[{}], step=7))  # and no further

    on_ranks(tmp_path, work)
    marks = [path for path in tmp_path.glob("*/1/*.json") if path.name != "state.json"]
    assert not marks, "before a file is written its mark goes"
    on_ranks(tmp_path, lambda rank: rank.check(5))


def test_generations_of_another_run_are_not_taken(tmp_path: Path) -> None:
    on_ranks(tmp_path, lambda rank: rank.take(3, 1), run_id="f" * 32)
    assert on_ranks(tmp_path, lambda rank: rank.newest()) == [None] * 4


@pytest.mark.parametrize("place", ["own", "copies"])
def test_no_room_on_one_rank_is_said_on_all(place: str, tmp_path: Path) -> None:
    small = 1 if place == "own" else 2  # files that fit

    def work(rank: Rank) -> str:
        if rank.comm.rank != 2:
            return rank.take(3, 1).problem
        rank.generations._files = Full(small)
        return rank.take(3, 1).problem

    class Full(dict[Any, Any]):
        """Files of which only some fit."""

        def __init__(self, left: int) -> None:
            self.left = left

        def setdefault(self, key: Any, default: Any = None) -> Any:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().setdefault(key, default)

    problems = on_ranks(tmp_path, work)
    assert len({*problems}) == 1 and "the memory of host b has no room: rank 2 needs" in problems[0]
    assert "MB in" in problems[0] and "Make room, or leave out in_memory_every" in problems[0]
    assert on_ranks(tmp_path, lambda rank: rank.newest()) == [None] * 4


def test_a_copy_that_came_otherwise_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_equals_mark", lambda copy, mark: mark.rank != 2)
    problems = {kept.problem for kept in on_ranks(tmp_path, lambda rank: rank.take(3, 1))}
    assert len(problems) == 1 and "the copy of rank 2's pieces" in problems.pop()


@pytest.mark.parametrize("changes", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_memory_and_files_after_50_changes_are_those_after_the_first(
    changes: int, tmp_path: Path
) -> None:
    def sizes() -> dict[str, int]:
        return {
            str(path.relative_to(tmp_path)): path.stat().st_size
            for path in tmp_path.rglob("*.safetensors")
        }

    def turn(number: int) -> Callable[[Rank], None]:
        def work(rank: Rank) -> None:
            rank.newest()
            rank.take(number, number)

        return work

    seen = []
    for number in range(changes + 2):
        hosts = HOSTS if number % 2 == 0 else ("a", "b", "c")
        on_ranks(tmp_path, turn(number), hosts)
        if number in (1, changes + 1):
            seen.append((sizes(), len(os.listdir("/proc/self/fd")), maps_of(tmp_path)))
    assert seen[0] == seen[1]
    assert seen[0][2] == 0, "nothing is mapped any more"
    assert all(len([*folder_of(tmp_path, host).iterdir()]) == 3 for host in "abc")


def maps_of(root: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(root))
