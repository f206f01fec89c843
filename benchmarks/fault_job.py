"""The jobs of faults.py: small ones, in labs, of which a rank is struck at a moment of its own.

Ranks are forked in place of started, as to import torch takes seconds of a processor. The launcher
is the lab's own.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.comm.process_group import ProcessGroupComm
from shoal.contracts.launcher import Job
from shoal.core.facts import Link
from shoal.session.session import current
from shoal_tools.launch import processes
from shoal_tools.launch.lab import Lab
from shoal_tools.launch.namespaces import enter
from shoal_tools.testing import planned_faults

INTERFACE = "interface"
TIMEOUT_S = 120.0  # of an exchange: no fault may have to wait for it
START_S = 20.0  # for every rank to come
GRACE_S = 20.0  # that the launcher gives ranks to end once the first has failed
STOPPED_S = 50.0  # when one that is nobody's loss is let go on
LIMIT_S = 75.0  # what has not ended by then hangs


@dataclass(frozen=True)
class Way:
    """A plan: how a small model is spread over ranks, and who of them does not train."""

    pins: Mapping[str, str]
    others: str = ""  # SHOAL_SERVERS or SHOAL_TAIL, of which there is one
    staleness: int | None = 0
    kept: bool = False  # whether rank 0 keeps the ranks' store, as without a launcher


WAYS = {
    "replicate": Way({"*": "replicate"}),
    "sliced": Way({"*": "sliced"}),
    "factor": Way({"0": "replicate", "1": "factor", "3": "factor"}),
    "cuts": Way({"0": "embedding", "1": "column", "3": "row"}),
    "servers": Way({"*": "server"}, "SHOAL_SERVERS"),
    "tables": Way({"0": "server_rows", "1": "server", "3": "server"}, "SHOAL_SERVERS"),
    "staleness": Way({"0": "server_rows", "1": "server", "3": "server"}, "SHOAL_SERVERS", 2),
    "store at rank 0": Way({"*": "replicate"}, kept=True),
    "tails": Way({"0": "replicate", "1": "replicate", "3": "stage"}, "SHOAL_TAIL"),
}
# of every rank, and of those that train
MOMENTS = ("before init", *(f"group {part}/3" for part in range(4)), "behind init")
STAGES = ("comparing", "measuring the model", "measuring the links", "planning and rewriting")
LOOP = (
    "before forward 0",
    "in forward 0",
    "in backward 0",
    "before step 0",
    "in forward 2",
    "in backward 2",
    "before step 2",
    "in evaluation",
    "in save",
    "behind the loop",
)
KEPT = {
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
TRAINING = ("behind init", *STAGES, *LOOP)  # which only ranks that train come to
# when it may be nobody's loss: evaluation may need no other rank, and nothing follows it
LATE = ("in evaluation", "in save", "behind the loop")
LAST = ", the last"
MESSAGES = tuple(f"message {part}/4" for part in range(5))


@dataclass(frozen=True)
class Case:
    """One fault; `moment` may count groups and messages in parts of all that the rank has."""

    way: str
    ranks: int
    who: int
    moment: str
    kind: str

    def __str__(self) -> str:
        return f"{self.way}, {self.ranks} ranks, rank {self.who}, {self.moment}, {self.kind}"


def is_late(moment: str) -> bool:
    """Whether the others may have done all they have to."""
    return moment in LATE or (moment.startswith("message") and moment.endswith(LAST))


def strike(kind: str) -> None:
    """Let it happen, to this process."""
    if kind == INTERFACE:
        print("fault at", time.time(), flush=True)
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    else:
        planned_faults.strike(kind, planned_faults.Victim(), "planted")


class Moments:
    """Where a rank is; the fault strikes it at one of these moments."""

    def __init__(self, moment: str, kind: str) -> None:
        self.counts: Counter[str] = Counter()
        self._moment, self._kind = moment, kind

    def at(self, moment: str) -> None:
        """This moment has come."""
        if moment == self._moment.removesuffix(LAST):
            self._moment = ""
            strike(self._kind)

    def next(self, what: str) -> None:
        """The next group or message."""
        self.counts[what] += 1
        self.at(f"{what} {self.counts[what]}")

    def before(self, owner: Any, name: str, what: str) -> None:
        """Count the calls of a function, and look before each of them."""
        call = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.next(what)
            return call(*args, **kwargs)

        setattr(owner, name, counted)

    def stages(self) -> None:
        """Look at where `parallelize` says that it is."""
        reached = ProcessGroupComm.reached

        def seen(comm: ProcessGroupComm, where: str) -> None:
            reached(comm, where)
            for stage in STAGES:  # what it gathers within one has other words
                if where.startswith(f"parallelize: {stage}"):
                    self.at(stage)

        ProcessGroupComm.reached = seen  # type: ignore[method-assign]


def rank(way: Way, moment: str, kind: str, folder: str) -> None:
    """Be one rank: train a small model, save and evaluate it, and end."""
    moments = Moments(moment if os.environ["RANK"] == os.environ["FAULTS_WHO"] else "", kind)
    for name in ("init_process_group", "new_group"):
        moments.before(dist, name, "group")
    moments.before(ProcessGroupComm, "receive", "message")
    moments.before(ProcessGroupComm, "gather_objects", "message")
    moments.stages()
    with suppress(shoal.Served):
        train(way, moments)
    (Path(folder) / os.environ["RANK"]).write_text(json.dumps(moments.counts))


def train(way: Way, moments: Moments) -> None:
    """Train, evaluate and save."""
    moments.at("before init")
    world = shoal.init(timeout_s=TIMEOUT_S, start_timeout_s=START_S)
    moments.at("behind init")
    if os.environ.get("FAULTS_LINKS") != "measured":  # to be quick
        spare = {"servers" if way.others == "SHOAL_SERVERS" else "tail": ("spare",)}
        hosts = tuple(f"h{number}" for number in range(world.size))
        current().cluster = shoal.Cluster(
            shoal.Topology(hosts), Link(1e-4, 1e8), 1.0, **(spare if way.others else {})
        )
    torch.manual_seed(world.rank)
    x, y = torch.randint(64, (8,)), torch.randint(8, (8,))
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    shoal.parallelize(
        model, loss_fn, optimizer, sample=(x, y), pins=way.pins, staleness=way.staleness
    )
    for step in range(8 if way.staleness else 4):
        optimizer.zero_grad()
        moments.at(f"before forward {step}")

        def within(module: nn.Module, args: tuple[torch.Tensor], step: int = step) -> None:
            moments.at(f"in forward {step}")
            args[0].register_hook(lambda _: moments.at(f"in backward {step}"))

        inner = model[2].register_forward_pre_hook(within)
        loss = loss_fn(model(x), y)
        inner.remove()
        loss.backward()
        moments.at(f"before step {step}")
        optimizer.step()
    with torch.no_grad():
        inner = model[2].register_forward_pre_hook(lambda *_: moments.at("in evaluation"))
        loss_fn(model.eval()(x), y)
        inner.remove()
    moments.at("in save")
    model.state_dict()
    if way.staleness == 0:  # else there is no one state
        optimizer.state_dict()
    moments.at("behind the loop")


def job(case: Case, folder: str) -> None:
    """Run a case's ranks in a lab, whose hosts are named h0, h1 …"""
    way = WAYS[case.way]
    variables = {
        "FAULTS_WHO": str(case.who),
        **({way.others: "1"} if way.others else {}),
        **(KEPT if way.kept else {}),
        **({"FAULTS_LINKS": "measured"} if case.moment == "measuring the links" else {}),
    }
    processes.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=partial(ForkedRank, case, folder), PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
    )
    done = Lab(hosts=case.ranks, rate="none").launch(Job(("true",), case.ranks, variables, GRACE_S))
    print(f"exit codes {json.dumps(done.exit_codes)}", flush=True)


class ForkedRank:
    """A rank that is forked in place of started, as to import torch takes seconds.

    It has what the launcher uses of a Popen.
    """

    def __init__(
        self, case: Case, folder: str, argv: Sequence[str], *, env: Mapping[str, str], **_: Any
    ) -> None:
        namespace = argv[argv.index("exec") + 1]
        (self.stdout, output), (self.stderr, errors) = _pipe(), _pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid:
            os.close(output)
            os.close(errors)
            return
        code = 1
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it dies with its parent
            if os.getppid() != parent:
                os._exit(1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(output, 1)
            os.dup2(errors, 2)
            os.environ.clear()
            os.environ.update(env)
            enter(namespace)
            (Path(folder) / f"pid{env['RANK']}").write_text(str(os.getpid()))
            rank(WAYS[case.way], case.moment, case.kind, folder)
            code = 0
        except BaseException as error:
            sys.last_value = error
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _pipe() -> tuple[IO[bytes], int]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb", buffering=0), writing


class Started:
    """A case that runs, in a process of its own: what it prints and when."""

    def __init__(self, case: Case) -> None:
        self.case, self.folder = case, tempfile.mkdtemp(prefix="faults-")
        self.lines: list[tuple[float, str]] = []
        self._rest = b""
        self._began = time.monotonic()
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            os.set_blocking(self._reading, False)
            return
        try:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            job(case, self.folder)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)

    def ended(self) -> bool:
        """Read what it has printed; whether it has ended. What takes too long is ended."""
        over = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        with suppress(BlockingIOError):
            while data := os.read(self._reading, 1 << 16):
                *whole, self._rest = (self._rest + data).split(b"\n")
                self.lines += [(time.time(), line.decode(errors="replace")) for line in whole]
        running_s = time.monotonic() - self._began
        if not over and running_s > STOPPED_S and is_late(self.case.moment):
            self._continue()
        if not over and running_s > LIMIT_S:
            self._began = math.inf
            self.lines.append((time.time(), "hangs"))
            os.kill(self.pid, signal.SIGTERM)  # the launcher cleans up
        return over

    def _continue(self) -> None:
        """Let a rank go on that is stopped when the others have done their work."""
        with suppress(OSError):  # there is none
            pid = int((Path(self.folder) / f"pid{self.case.who}").read_text())
            os.kill(pid, signal.SIGCONT)

    def counts(self) -> dict[int, dict[str, int]]:
        """How many groups each rank has made, and for how many messages it has waited."""
        ranks = range(self.case.ranks)
        return {r: json.loads((Path(self.folder) / str(r)).read_text()) for r in ranks}

    def close(self) -> None:
        """Give back what it took."""
        os.close(self._reading)
        shutil.rmtree(self.folder)


def all_ended(cases: Iterable[Case], beside: int) -> Iterator[Started]:
    """Run these cases, some side by side; each that has ended."""
    running: list[Started] = []
    waiting = iter(cases)
    while True:
        running += [Started(case) for case in islice(waiting, beside - len(running))]
        if not running:
            return
        for started in list(running):
            if started.ended():
                running.remove(started)
                yield started
                started.close()
        time.sleep(0.02)
