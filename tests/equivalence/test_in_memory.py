"""A run that has lost a host goes on from the hosts' memory as if nothing had happened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from one_process import assert_same_bits, difference
from resumed import AFTER, BEFORE, OPTIMIZERS, WAYS, Script, on_ranks
from test_resume import assert_same_state, taken

import shoal
from shoal.front.in_memory import InMemory
from shoal.session.session import current

HOSTS = ("a", "b", "b", "c")  # several ranks a host
ALONE = [way for way in WAYS if not WAYS[way].servers and not WAYS[way].tail]
QUICK = [
    ("owners of parts", "AdamW", 3, "b", 2, "owners of parts"),
    ("head", "AdamW", 3, "a", 3, "head"),
    ("embedding", "SGD", 2, "a", 3, "factor"),
]
SLOW = [
    ("replicate", "AdamW", 3, "a", 2, "head"),
    ("factor", "SGD", 3, "b", 3, "factor"),
    ("owners of wholes", "SGD", 4, "b", 4, "owners of wholes"),
    *(
        (before, optimizer, ranks, lost, then, after)
        for number, before in enumerate([*ALONE, "servers", "tables", "tail"])
        for optimizer in ("AdamW", "SGD")
        for ranks, lost, then in [((3, "a", 2), (2, "b", 3), (4, "b", 4))[number % 3], (3, "b", 3)]
        for after in dict.fromkeys((before, ALONE[number % len(ALONE) - 1]))
    ),
]


class HostLost(Exception):
    """The end of a run."""


@pytest.fixture
def memories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("SHOAL_HOST_MEMORY", str(folder))
    return folder


def memory_of(checkpoints: shoal.Checkpoints) -> InMemory:
    memory = checkpoints._memory
    assert memory is not None
    return memory


def training(folder: Path, places: dict[str, Path]) -> Any:
    """Train, have a generation in memory, and train on: the truth. No step is on the disk."""

    def loop(script: Script, loss_fn: Any) -> None:
        checkpoints = shoal.Checkpoints(folder, every_s=1e6, in_memory_every=BEFORE, **script.saved)
        checkpoints.steps = BEFORE - 1
        script.train(loss_fn, BEFORE)
        assert checkpoints.step() is False
        memory = memory_of(checkpoints)
        memory.settle()
        assert memory.cost is not None and memory.cost.step == BEFORE
        places[current().world.host] = memory._memory.folder
        checkpoints.__exit__(HostLost, HostLost(), None)
        script.train(loss_fn, AFTER)

    return loop


def going_on(folder: Path) -> Any:
    def loop(script: Script, loss_fn: Any) -> None:
        with shoal.Checkpoints(folder, every_s=1e6, in_memory_every=99, **script.saved) as saved:
            saved.resume()
            assert saved.steps == BEFORE
            script.train(loss_fn, AFTER)

    return loop


@pytest.mark.parametrize(
    ("before", "optimizer", "ranks", "lost", "then", "after"),
    [
        *(pytest.param(*case, marks=pytest.mark.quick) for case in QUICK),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_a_lost_host_is_as_if_nothing_had_happened(
    before: str,
    optimizer: str,
    ranks: int,
    lost: str,
    then: int,
    after: str,
    memories: Path,
    tmp_path: Path,
) -> None:
    make, places = OPTIMIZERS[optimizer], dict[str, Path]()
    hosts = HOSTS[:ranks]
    first = training(tmp_path / "run", places)
    truth = on_ranks(make, ranks, WAYS[before], first, workers=hosts)
    shutil.rmtree(places.pop(lost))
    left = [host for host in hosts if host != lost]
    again = (*left, *(f"new{number}" for number in range(then)))[:then]
    got = on_ranks(make, then, WAYS[after], going_on(tmp_path / "run"), workers=again)
    assert_same_bits([outcome.model for outcome in got])
    error = difference(truth[0].model, got[0].model)
    same = (ranks, before) == (then, after)
    assert error <= (0 if same else 1e-10), f"{error:.1e}"
    assert_same_state(truth[0].optimizer, got[0].optimizer)
    assert taken(got) == taken(truth)[BEFORE:]
    kept = {path.name for path in memories.iterdir()}
    assert kept <= {place.name for place in places.values()}, "an orderly end removes its own"
