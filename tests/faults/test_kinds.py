"""Every kind of fault at a step of a small training: it takes effect, and what Shoal says then.

Ranks are threads. Processes that die or are stopped, and hosts that are cut off: test_lost_ranks.py
has them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.checkpoint.folder import LATEST
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.launcher import Job
from shoal.core.errors import DeadlinePassed, PeerLost, UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using
from shoal_tools.launch.lab import Lab
from shoal_tools.testing import planned_faults
from shoal_tools.testing.planned_faults import (
    KINDS,
    Fault,
    Faults,
    FaultyComm,
    Killed,
    Planted,
    Victim,
    faults_of,
)

HOSTS = ("a", "b", "c")
STEPS, AT = 6, 3
ROWS = torch.arange(8.0 * 6 * len(HOSTS)).view(len(HOSTS), 8, 6).sin()

needs_lab = pytest.mark.skipif(
    Lab().missing() is not None, reason=f"no lab here: {Lab().missing()}"
)


def never(step: int) -> None:
    """Nothing more to do."""


def train(
    fault: Fault,
    folder: Path | None = None,
    behind: Callable[[int], None] = never,
    width: int = 8,
    steps: int = STEPS,
    timeout_s: float = 20.0,
) -> list[dict[str, Tensor]]:
    """Train on three ranks, one of which has a fault; the weights at the end.

    Args:
        fault: strikes at its place.
        folder: where rank 0 has a checkpoint begun behind step `AT`.
        behind: called on rank 0 behind each step.
        width: of the hidden layer.
        steps: how many.
        timeout_s: how long a rank waits for another.
    """
    cluster = Cluster(Topology(HOSTS), Link(1e-4, 1e8), 1.0)

    def work(comm: ThreadComm) -> dict[str, Tensor]:
        faulted = FaultyComm(comm, [])
        with using(faulted, cluster):
            model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            x, y = ROWS[comm.rank], torch.arange(8) % 3
            faults = Faults((fault,), comm.rank, Victim(faulted, model))
            faults.at(0, "set-up")
            pins = {"*": "replicate:direct"}
            shoal.parallelize(
                model, F.cross_entropy, optimizer, sample=(x, y), pins=pins, check_every=1
            )
            saved = None
            if folder is not None:
                saved = shoal.Checkpoints(folder, model=model, optimizer=optimizer)
            with faults:
                for step in range(steps):
                    faults.at(step, "forward")
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    faults.at(step, "backward")
                    loss.backward()
                    faults.at(step, "step")
                    optimizer.step()
                    faults.at(step, "save")
                    if saved is not None:
                        saved.step()
                        if step == AT:
                            saved.save(wait=False)
                    if comm.rank == 0:
                        behind(step)
                    faults.at(step, "end")
                if saved is not None:
                    saved.close()
            return {name: value.clone() for name, value in model.state_dict().items()}

    return run(len(HOSTS), work, timeout_s, HOSTS)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("phase", ["backward", "step"])
@pytest.mark.parametrize(
    ("kind", "error"), [("exit", SystemExit), ("kill", Killed), ("exception", Planted)]
)
def test_a_rank_that_is_gone_is_named_by_the_others(
    kind: str, error: type[BaseException], phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[PeerLost] = []
    made = PeerLost.__init__

    def hear(self: PeerLost, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        heard.append(self)

    monkeypatch.setattr(PeerLost, "__init__", hear)
    with pytest.raises(error):
        train(Fault(1, AT, phase, kind))
    assert heard and {lost.rank for lost in heard} == {1}
    assert all(error.__name__ in str(lost) for lost in heard)


def test_a_thread_cannot_be_stopped_alone() -> None:
    with pytest.raises(UsageError, match="a thread cannot be stopped alone"):
        train(Fault(1, AT, "forward", "stop"))


def test_a_link_that_is_down_is_a_deadline() -> None:
    with pytest.raises(DeadlinePassed, match=r"rank \d sent nothing to rank \d within 1 s"):
        train(Fault(1, AT, "backward", "link down"), timeout_s=1.0)


@pytest.mark.slow
def test_a_link_at_a_tenth_is_named(caplog: pytest.LogCaptureFixture) -> None:
    train(Fault(1, AT, "forward", "link at a tenth"), width=40_000, steps=30)
    said = warned(caplog)
    assert said and all("the link of host b carries" in line for line in said)
    mostly = r"exchanges, rank 0 [\d,.]+ ms of it for site \d \(replicate direct: 0\); "
    assert all(re.search(mostly, line) for line in said), said


def test_a_corrupted_value_is_named_and_healed(caplog: pytest.LogCaptureFixture) -> None:
    sound = train(Fault(1, STEPS, "forward", "corrupted value"))
    assert warned(caplog) == []
    healed = train(Fault(1, AT, "forward", "corrupted value"))
    assert all(map(torch.equal, healed[1].values(), healed[0].values()))
    assert not all(map(torch.equal, healed[0].values(), sound[0].values()))  # its gradients counted
    said = warned(caplog)
    assert said and all(
        "rank 1 (host b) had other bits than most ranks in 0.weight (backward 3" in line
        for line in said
    )


def test_a_full_disk_is_logged_training_goes_on_and_the_last_save_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    behind: list[int] = []
    with pytest.raises(UsageError, match=r"No space left|rank 0 cannot go on"):
        train(Fault(0, AT, "save", "full disk"), tmp_path, behind.append)
    assert behind == [*range(STEPS)]
    (line,) = warned(caplog)
    assert "a checkpoint was not written, and the older ones stay: " in line
    assert "No space left on device" in line
    assert os.listdir(tmp_path) == ["LOCK"]


def test_nobody_waits_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, waited = Event(), []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        assert trained.wait(20)

    def behind(step: int) -> None:
        if step == STEPS - 1:
            trained.set()

    monkeypatch.setattr(planned_faults, "sleep", sleep)
    expected, *_ = train(Fault(1, STEPS, "forward", "kill"), steps=AT + 1)
    train(Fault(0, AT, "save", "slow disk"), tmp_path, behind)
    assert waited and set(waited) == {planned_faults.SLOW_S}
    assert (tmp_path / LATEST).read_text() == f"step-{AT + 1:08d}\n"
    with using(ThreadComm()):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        shoal.load(tmp_path / f"step-{AT + 1:08d}", model=model)
    assert all(map(torch.equal, model.state_dict().values(), expected.values()))


def test_faults_that_last_are_over_behind_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.fsync
    with Faults("rank 0, step 0, save, full disk; rank 0, step 0, save, slow disk", 0) as faults:
        faults.at(0, "save")
        assert os.fsync is not before
    assert os.fsync is before


# Strikes at once, and says what both ends of each host's link carry then, bits a second.
LINKS = """
import json, os
from shoal_tools.testing import planned_faults
if os.environ["RANK"] == "1":
    planned_faults.strike(os.environ["KIND"], planned_faults.Victim())
    for namespace, device in planned_faults._ends():
        show = "tc", "-n", namespace, "-j", "qdisc", "show", "dev", device
        (queue,) = [q for q in json.loads(planned_faults._tool(*show)) if q["kind"] == "tbf"]
        link = planned_faults._tool("ip", "-n", namespace, "-j", "link", "show", device)
        up = "UP" in json.loads(link)[0]["flags"]
        print("end", json.dumps([device, queue["options"]["rate"] * 8, up]), flush=True)
"""


@pytest.mark.processes
@pytest.mark.lab
@pytest.mark.slow
@needs_lab
def test_in_the_lab_the_link_of_the_host_is_meant(capfd: pytest.CaptureFixture[str]) -> None:
    def ends(kind: str) -> list[list[Any]]:
        job = Job((sys.executable, "-c", LINKS), 2, {"KIND": kind})
        result = Lab(hosts=2, rate="200mbit").launch(job)
        printed = capfd.readouterr()
        assert result.exit_codes == (0, 0), printed.err
        return [json.loads(line.partition("end ")[2]) for line in printed.out.splitlines()[1:]]

    assert ends("link at a tenth") == [["eth0", 20_000_000, True], ["h1", 20_000_000, True]]
    assert ends("link down") == [["eth0", 200_000_000, False], ["h1", 200_000_000, True]]


def test_a_link_outside_the_lab_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_faults, "_tool", lambda *command: "\n")
    for kind in ("link down", "link at a tenth"):
        with pytest.raises(UsageError, match="only a link of the lab may be changed"):
            planned_faults.strike(kind, Victim())


def test_faults_are_written_as_they_are_read() -> None:
    for kind in KINDS:
        fault = Fault(1, 5, "backward", kind)
        assert faults_of(f"{fault}; {fault}") == (fault, fault)
    assert faults_of("") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 1, step 5, backward", "this is no fault"),
        ("rank 1, step 5, breakfast, kill", "no such phase of a fault"),
        ("rank 1, step 5, backward, flood", "no such kind of a fault"),
    ],
)
def test_a_fault_that_would_never_strike_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        faults_of(text)


def test_a_fault_strikes_once_also_in_a_rank_that_is_started_again(tmp_path: Path) -> None:
    fault = Fault(2, 1, "step", "exception")
    Faults((fault,), 1, marks=tmp_path).at(1, "step")  # another rank's
    first = Faults((fault,), 2, marks=tmp_path)
    first.at(0, "step")
    with pytest.raises(Planted, match=str(fault)):
        first.at(1, "step")
    first.at(1, "step")
    Faults((fault,), 2, marks=tmp_path).at(1, "step")


def test_every_kind_is_tried() -> None:
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    lines = [line for text in texts for line in text.splitlines()]
    tried = [line for line in lines if re.search(r"Fault\(|late\(|SystemExit", line)]
    assert [kind for kind in KINDS if not any(f'"{kind}"' in line for line in tried)] == []
