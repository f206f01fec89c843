"""Ray Train runs an ordinary script of Shoal: a worker dies, or a third one comes, and the run goes
on as one process.

Ray is large, so `make test-trainers` does not bring it:
build/trainers/bin/pip install ray==2.60.0 pydantic
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contract import Net, Rows, compute_loss, optimizer_of
from torch.utils.data import DataLoader

pytest.importorskip("ray.train.torch")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(600),
]
HERE, EPOCHS = Path(__file__).parent, 3


def alone() -> Net:
    """Train in this process, by torch alone."""
    model, loader = Net(), DataLoader(Rows(), batch_size=4)
    optimizer = optimizer_of(model)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            compute_loss(model, batch).backward()
            optimizer.step()
    return model


def of_folder(folder: Path) -> list[str]:
    """Return processes of this machine that name a folder, as Ray's do."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = line.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if str(folder) in command:
            found.append(command)
    return found


# the number of workers and the epoch of each start
STARTS = {"dies": ["2 0", "2 1"], "grows": ["2 0", "3 1"]}


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("what", STARTS)
def test_a_run_goes_on_as_one_process(what: str, tmp_path: Path) -> None:
    """Elastic: 2 to 4 workers. There is room for 2, and then for 3, in the middle of an epoch."""
    ray_s = Path("/tmp", f"shoal-ray-{os.getpid()}")  # a socket's path there must be short
    environment = {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_TMPDIR": str(ray_s),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ray_s.mkdir()
    try:
        done = subprocess.run(
            [sys.executable, HERE / "ray_cases.py", tmp_path, what],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=550,
        )
    finally:
        shutil.rmtree(ray_s, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert (tmp_path / "starts").read_text().splitlines() == STARTS[what]
    assert torch.load(tmp_path / "metrics.pt")["epoch"] == EPOCHS - 1
    weights = torch.load(tmp_path / "weights.pt")
    for name, value in alone().state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=1e-10, rtol=0)
    assert not of_folder(ray_s), "Ray has left processes"
