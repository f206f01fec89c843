"""One command for a job that shrinks and grows, on two hosts with ssh servers."""

from __future__ import annotations

import shlex
import threading
import time
from pathlib import Path

import pytest
from ssh_hosts import missing, ssh_hosts

from shoal_tools.cli import main
from shoal_tools.commands import run_script
from shoal_tools.elastic import ssh_crews

pytestmark = [
    pytest.mark.slow,
    pytest.mark.lab,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

# Trains until the file `end` is there. Each crew has a file a host, with its last step.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import shoal
from shoal.comm.rendezvous import crew
from shoal.session.session import current

told = Path(sys.argv[1])
world = shoal.init(lost_after_s=8.0)
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 8).double(), torch.randn(32, 4).double())
model, loss_fn = torch.nn.Linear(8, 4).double(), torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = shoal.shard(DataLoader(data, 8, shuffle=True), batch="global")
objects = {"model": model, "optimizer": optimizer, "loader": loader}
with shoal.Checkpoints("run", every_s=0.5, local=True, **objects) as checkpoints:
    checkpoints.resume()
    shoal.parallelize(model, loss_fn, optimizer, sample=data[:8])
    for epoch in range(loader.epoch, 10_000):
        if any(current().comm.gather_objects((told / "end").exists(), "the end")):
            break
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            checkpoints.step()
            (told / f"{crew()[1]}-{world.host}-of-{world.size}").write_text(str(checkpoints.steps))
            time.sleep(0.05)
print("ended at", checkpoints.steps, flush=True)
"""


def test_a_host_is_killed_and_comes_back_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, told = tmp_path / "here", tmp_path / "told"
    here.mkdir(), told.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(Path(run_script.__file__).parents[2]))
    monkeypatch.setattr(ssh_crews, "AGAIN_S", 2.0)
    (here / "train.py").write_text(SCRIPT)

    def there(name: str) -> int:
        until_s = time.monotonic() + 100
        while not (told / name).exists() or not (told / name).read_text():
            if time.monotonic() > until_s:
                (told / "end").touch()
                raise AssertionError(name)
            time.sleep(0.05)
        return int((told / name).read_text())

    with ssh_hosts(tmp_path) as hosts:
        steps: list[int] = []

        def act() -> None:
            there("1-b-of-2")
            time.sleep(2)
            hosts.kill(1)
            there("2-a-of-1")
            steps.append(there("3-b-of-2"))
            steps.append(there("1-a-of-2"))
            (told / "end").touch()

        acting = threading.Thread(target=act)
        acting.start()
        options = ("--chdir", str(hosts.folder), "--ssh", shlex.join(hosts.ssh), "--send")
        words = ("--hosts", "a,b", "--nnodes", "1:2", *options, "train.py", str(told))
        with pytest.raises(SystemExit) as ended:
            main.main(["run", *words], prog_name="shoal")
        acting.join()
        left = [pid for host in (0, 1) for pid in hosts.processes(host)]
        assert sorted(left) == sorted(hosts.servers)
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    later, before = steps
    assert later > before - 20, "the run did not begin anew"
    assert "shoal: host b is lost: its agent has ended" in printed.err
    assert "shoal: b is reached again" in printed.err
    assert "[a] ended at" in printed.out and "[b] ended at" in printed.out
