"""Parts of tensors come to those who write, whole, and nobody waits where a write fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import parts, snapshot
from shoal.checkpoint.parts import Bringing, Spread
from shoal.checkpoint.snapshot import Copies, Snapshot
from shoal.checkpoint.state import State
from shoal.comm.threads import ThreadComm, run
from shoal.tensors.sharded_parameter import OverRanks

WHOLES = [torch.arange(60.0).reshape(5, 12), torch.arange(15).reshape(5, 3) % 2 == 0]
SIZES = {0: [2, 0, 3], 1: [1, 1, 10]}


def spreads(comm: ThreadComm) -> list[Spread]:
    cuts = [
        (WHOLES[0], OverRanks("one", WHOLES[0], 0, SIZES[0], comm)),
        (WHOLES[0], OverRanks("other", WHOLES[0], 1, SIZES[1], comm)),
        (WHOLES[1], OverRanks("bits", WHOLES[1], 0, SIZES[0], comm)),
    ]
    return [Spread(cut.part(whole).contiguous(), cut) for whole, cut in cuts]


@pytest.mark.parametrize("writers", [(0,), (1,), (0, 2)])
@pytest.mark.parametrize("chunk_bytes", [8, 1 << 20])
def test_writers_get_the_whole(
    writers: tuple[int, ...], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CHUNK_BYTES", chunk_bytes)

    def work(comm: ThreadComm) -> list[Any]:
        bringing = Bringing(comm.channel("parts"), writers, spreads(comm))
        return [bringing.next() for _ in range(3)]

    for rank, got in enumerate(run(3, work, timeout_s=20)):
        for whole, tensor in zip([WHOLES[0], WHOLES[0], WHOLES[1]], got, strict=True):
            assert torch.equal(tensor, whole) if rank in writers else tensor is None


def test_where_a_write_fails_the_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = snapshot.tensors.write

    def full(path: Path, forms: Any, tensor: Any) -> Any:
        if path.name.startswith("second"):
            raise OSError(28, "No space left on device")
        return written(path, forms, tensor)

    monkeypatch.setattr(snapshot.tensors, "write", full)

    def work(comm: ThreadComm) -> bool:
        taken, copies = spreads(comm), Copies()
        shot = Snapshot(copies, keeps=comm.rank == 0)
        shot.encode("first", {"a": taken[0]})
        shot.encode("second", {"b": taken[1], "c": taken[2]})
        bringing = Bringing(comm.channel("parts"), (0,), shot.in_order())
        try:
            shot.write(tmp_path / "saved", State({}), bringing)
        except OSError:
            return True
        return False

    assert run(3, work, timeout_s=20) == [True, False, False]
    assert list(tmp_path.iterdir()) == []
