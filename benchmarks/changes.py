"""Hosts that come and go at random moments: does the run end as if nothing had happened?

    sudo .venv/bin/python benchmarks/changes.py [--runs N] [--faults K] [--seed S] [--way WAY]
                                                [--optimizer NAME] [--only KIND …] [--json FILE]

Each run is a job of its own on four emulated hosts, and has K faults one after the other:

    kill     all processes of a host die, and with them its /dev/shm and its folder
    stop     all of them hang (SIGSTOP); they go on once the others do without that host
    cut      the host's link is down for 30 s, longer than `--lost-after`
    blink    the link is down for 3 s, which is no loss
    leave    SIGTERM to the host's agent
    join     a host that is not there comes
    place    the meeting place dies, and is started again

A run has passed when the job has ended with 0, every step has taken each row of its global batch
once, and the last parameters differ from those of one undisturbed process by 1e-10 at most.

Needs root and Linux (the lab). Each fault is one line of JSON, with seconds by part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import change_job
import torch
from change_job import OPTIMIZERS, WAYS

from shoal_tools.elastic.agent import Agent, AgentOptions
from shoal_tools.elastic.messages import CrewTerms
from shoal_tools.elastic.place import MeetingPlace
from shoal_tools.launch.lab import SWITCH_ADDRESS, Lab
from shoal_tools.launch.namespaces import attempt, enter

JOB = Path(__file__).with_name("change_job.py")
KINDS = ("kill", "stop", "cut", "leave", "join", "blink", "place")
PORT, HOSTS, CUT_S = 29480, 4, 30.0
LOST_S = float(os.environ.get("CHANGES_LOST_S", "8"))  # `--lost-after`
LIMIT_S = float(os.environ.get("CHANGES_LIMIT_S", "90"))  # until a crew trains again
OWN = "/run/own"  # a host's folder, as its processes see it
TOKEN = "changes"
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "SHOAL_CACHE": f"{OWN}/cache",
    "SHOAL_TOKEN": TOKEN,
    "CHANGES_LOST_S": str(LOST_S),
}
_RATIO = 1e-10


@dataclass
class Fault:
    """One fault and its seconds: from the fault to each part of what followed."""

    run: str
    kind: str
    hosts: tuple[int, ...]
    before: int  # hosts that trained
    after: int = 0
    named_s: float | None = None  # the meeting place said it
    crew_s: float | None = None  # the next crew was told to train
    parts_s: dict[str, float] = field(default_factory=dict)  # script, init, resumed, parallelized
    again_s: float | None = None  # the first step of the next crew
    lost_steps: int = 0
    complaint: str = ""


class Said:
    """Everything that processes print, with the time at which it came."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str, str]] = []
        self._changed = threading.Condition()

    def follow(self, who: str, printed: IO[str]) -> None:
        """Read what a process prints, on a thread of its own."""

        def read() -> None:
            for line in printed:
                with self._changed:
                    self.lines.append((time.time(), who, line.rstrip("\n")))
                    self._changed.notify_all()
                if os.environ.get("CHANGES_SHOW"):
                    print(f"{time.time():.1f} {who}: {line}", end="", flush=True)

        threading.Thread(target=read, daemon=True).start()

    def wait(self, fits: Callable[[str, str], bool], since: int, limit_s: float) -> int | None:
        """Wait for a line behind that number; return the number after it, None in vain."""
        until_s = time.monotonic() + limit_s
        with self._changed:
            while True:
                for number in range(since, len(self.lines)):
                    if fits(*self.lines[number][1:]):
                        return number + 1
                since = max(since, len(self.lines))
                if (left_s := until_s - time.monotonic()) <= 0:
                    return None
                self._changed.wait(left_s)


class Forked:
    """An agent or the meeting place, forked in place of started: to import PyTorch takes seconds.

    Args:
        namespace: of its host.
        who: name of its host.
        work: returns an exit code.
        said: takes what it prints.
    """

    def __init__(
        self, namespace: str, who: str, work: Callable[[list[int]], int], said: Said
    ) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        self.pid, self._code = os.fork(), None
        if self.pid:
            os.close(writing)
            said.follow(who, os.fdopen(reading, errors="replace"))
            return
        code = 1
        try:
            os.setsid()
            for number in (1, 2):
                os.dup2(writing, number)
            told_to_end: list[int] = []
            signal.signal(signal.SIGTERM, lambda number, _: told_to_end.append(number))
            os.environ.update(VARIABLES, SHOAL_HOST=who)
            enter(namespace)
            for place in ("/dev/shm", OWN):
                subprocess.run(("mount", "-t", "tmpfs", "tmpfs", place), check=True)
            code = work(told_to_end)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)

    def wait(self, limit_s: float = LIMIT_S) -> int | None:
        """Wait for its end; return its exit code, None if it does not end."""
        until_s = time.monotonic() + limit_s
        while self._code is None and time.monotonic() < until_s:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.05)
        return self._code


def say(line: str) -> None:
    """Print a line of an agent, or of the meeting place."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


class Hosts:
    """Four emulated hosts with agents, and a switch beside which the meeting place stands."""

    def __init__(self, lab: Lab, command: Sequence[str], said: Said) -> None:
        self.lab, self.said, self._command = lab, said, tuple(command)
        self.agents: dict[int, Forked] = {}
        self.place: Forked | None = None

    def start_place(self) -> None:
        """Start the meeting place."""

        def serve(told_to_end: list[int]) -> int:
            place = MeetingPlace(SWITCH_ADDRESS, PORT, TOKEN, LOST_S, say)
            over = place.run(told_to_end)
            return over.code if over else 0

        self.place = Forked(self.lab.namespaces[-1], "place", serve, self.said)

    def start(self, host: int) -> None:
        """Start a host's agent, in mounts of its own."""

        def serve(told_to_end: list[int]) -> int:
            options = AgentOptions(self._command, terms=CrewTerms(1, HOSTS))
            return Agent((SWITCH_ADDRESS, PORT), TOKEN, options, told_to_end, say).run()

        self.agents[host] = Forked(self.lab.namespaces[host], f"h{host}", serve, self.said)

    def pids(self, host: int) -> list[int]:
        """Return all processes of a host."""
        listed = subprocess.run(
            ("ip", "netns", "pids", self.lab.namespaces[host]), capture_output=True, text=True
        )
        return [int(pid) for pid in listed.stdout.split()]

    def signal_all(self, host: int, number: int) -> None:
        """Send a signal to all processes of a host."""
        for pid in self.pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, host: int) -> None:
        """Kill a host. Its mounts go with its processes."""
        agent = self.agents.pop(host)
        while self.pids(host):
            self.signal_all(host, signal.SIGKILL)
            agent.wait(0.05)

    def link(self, host: int, state: str) -> None:
        """Take a host's link down or up, at the switch."""
        complaint = attempt("ip", "-n", self.lab.namespaces[-1], "link", "set", f"h{host}", state)
        assert not complaint, complaint


class Run:
    """One job, with faults.

    Args:
        name: of the run, for lines.
        hosts: of its lab.
        chance: draws moments, hosts and kinds.
        kinds: to choose from.
    """

    def __init__(
        self, name: str, hosts: Hosts, chance: random.Random, kinds: Sequence[str]
    ) -> None:
        self._name, self._hosts, self._chance, self._kinds = name, hosts, chance, kinds
        self.faults: list[Fault] = []

    def fault(self, kind: str, struck: tuple[int, ...]) -> Fault:
        """Strike, and wait until a crew trains again as it should."""
        hosts, said = self._hosts, self._hosts.said
        fault = Fault(self._name, kind, struck, len(hosts.agents))
        since, began_s = len(said.lines), time.time()
        members = set(hosts.agents)
        if kind == "join":
            members |= {*struck}
        elif kind not in ("blink", "place"):
            members -= {*struck}
        for host in struck:
            self._strike(kind, host)
        fault.after = len(members)
        if kind in ("blink", "place"):
            self._still(fault, members)
        else:
            self._again(fault, members, since, began_s)
        self.faults.append(fault)
        if kind in ("stop", "cut") and not fault.complaint:
            self._come_back(fault, members | {*struck})
        return fault

    def _strike(self, kind: str, host: int) -> None:
        hosts = self._hosts
        if kind == "kill":
            hosts.kill(host)
        elif kind == "stop":
            hosts.signal_all(host, signal.SIGSTOP)
        elif kind == "cut":
            hosts.link(host, "down")
        elif kind == "leave":
            os.kill(hosts.agents.pop(host).pid, signal.SIGTERM)
        elif kind == "join":
            hosts.start(host)
        elif kind == "blink":
            hosts.link(host, "down")
            time.sleep(3)
            hosts.link(host, "up")
        elif kind == "place" and hosts.place is not None:
            os.kill(hosts.place.pid, signal.SIGKILL)
            hosts.place.wait()
            time.sleep(1 + 2 * self._chance.random())
            hosts.start_place()

    def _come_back(self, fault: Fault, members: set[int]) -> None:
        """Let hosts go on that the others do without: they join them again."""
        if fault.kind == "cut" and fault.again_s is not None:
            time.sleep(max(0.0, CUT_S - fault.again_s))
        since, began_s = len(self._hosts.said.lines), time.time()
        for host in fault.hosts:
            if fault.kind == "stop":
                self._hosts.signal_all(host, signal.SIGCONT)
            else:
                self._hosts.link(host, "up")
        back = Fault(self._name, f"back from {fault.kind}", fault.hosts, fault.after, len(members))
        self._again(back, members, since, began_s)
        self.faults.append(back)
        fault.complaint = back.complaint

    def _again(self, fault: Fault, members: set[int], since: int, began_s: float) -> None:
        """Wait for the first step of a crew of these hosts, and note the seconds of each part."""
        lines = self._hosts.said.lines
        names = {f"h{host}" for host in members}

        def is_crew(who: str, line: str) -> bool:
            found = line.partition("] crew ")[2] if who == "place" else ""
            listed = found.partition(" ranks: ")[2] or found.partition(" rank: ")[2]
            return bool(found) and set(listed.partition(" (")[0].split(", ")) == names

        crew = self._hosts.said.wait(is_crew, since, LIMIT_S)
        if crew is None:
            fault.complaint = f"no crew of {sorted(names)}"
            return
        wanted = {"script", "init", "resumed", "parallelized", "step"}
        seen: dict[str, dict[str, float]] = {what: {} for what in wanted}
        first = -1

        def is_step(who: str, line: str) -> bool:
            nonlocal first
            said = told(line)
            if who in names and said.get("is") in wanted:
                seen[said["is"]].setdefault(who, said["at"])
                if said["is"] == "step" and said["ranks"] == len(names):
                    first = said["step"]
                    return True
            return False

        # a line of the crew before may still be on its way
        if self._hosts.said.wait(is_step, crew, LIMIT_S) is None:
            fault.complaint = "no step of the new crew"
            return
        host = f"host h{fault.hosts[0]} "
        named = [at for at, who, line in lines[since:crew] if who == "place" and host in line]
        fault.named_s = round(named[0] - began_s, 2) if named else None
        fault.crew_s = round(lines[crew - 1][0] - began_s, 2)
        for what in ("script", "init", "resumed", "parallelized"):
            if seen[what]:
                fault.parts_s[what] = round(max(seen[what].values()) - began_s, 2)
        fault.again_s = round(max(seen["step"].values()) - began_s, 2)
        fault.lost_steps = max(0, self._reached(crew) - first + 1)

    def _still(self, fault: Fault, members: set[int]) -> None:
        """See that the same crew goes on."""
        since = len(self._hosts.said.lines)
        names = {f"h{host}" for host in members}

        def is_step(who: str, line: str) -> bool:
            said = told(line)
            return said.get("is") == "step" and said["ranks"] == len(names)

        if self._hosts.said.wait(is_step, since, LIMIT_S) is None:
            fault.complaint = "no step"
        time.sleep(7)
        # nobody has begun anew
        fresh = [line for _, _, line in self._hosts.said.lines[since:] if "] crew " in line]
        if fresh:
            fault.complaint = f"hosts changed: {fresh[0]}"

    def _reached(self, before: int) -> int:
        """Return the last step that some rank has made, by lines before that number."""
        lines = self._hosts.said.lines[max(0, before - 500) : before]
        said = [told(line) for _, _, line in lines]
        return max((each["step"] for each in said if each.get("is") == "step"), default=0)

    def next(self) -> tuple[str, tuple[int, ...]] | None:
        """Draw a fault that can be: somebody must be left, or there must be room."""
        here, absent = set(self._hosts.agents), set(range(HOSTS)) - set(self._hosts.agents)
        fit = [kind for kind in self._kinds if (absent if kind == "join" else len(here) > 1)]
        if not fit:
            return ("join", (min(absent),)) if absent else None
        kind = self._chance.choice(fit)
        return kind, (self._chance.choice(sorted(absent if kind == "join" else here)),)


def told(line: str) -> dict[str, Any]:
    """Return what a rank has said in JSON, or nothing."""
    if line.startswith("{"):
        with suppress(ValueError):
            found: dict[str, Any] = json.loads(line)
            return found
    return {}


def rows_by_step(lines: Sequence[tuple[float, str, str]]) -> dict[int, list[int]]:
    """Return the rows of each step, as the last crew took them that has made it.

    Steps beyond the job's end are left out: the crew that made them was lost, and the next one was
    told that the job has enough.
    """
    last_step = 0
    crews: dict[str, str] = {}  # by host
    number: dict[str, int] = {}  # of a crew, in order
    taken: dict[int, dict[int, list[int]]] = {}
    for _, who, line in lines:
        said = told(line)
        if said.get("is") == "script":
            crews[who] = said["crew"]
            number.setdefault(said["crew"], int(said["crew"].rpartition("-")[2] or 0))
        elif said.get("is") == "step":
            of_step = taken.setdefault(said["step"], {})
            of_step.setdefault(number.get(crews.get(who, ""), 0), []).extend(said["rows"])
        elif said.get("is") == "end":
            last_step = max(last_step, said["steps"])
    steps = [step for step in taken if step <= last_step]
    return {step: sorted(taken[step][max(taken[step])]) for step in steps}


@contextmanager
def made_folder() -> Iterator[str]:
    """Make a folder, and remove it in this process only: forks end in other ways."""
    folder = tempfile.mkdtemp(prefix="changes-")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def undisturbed(way: str, optimizer: str, epochs: int) -> tuple[dict[int, list[int]], Any]:
    """Run the job in one process; return the rows of each step, and the parameters."""
    with made_folder() as folder:
        out, printed = Path(folder, "out.pt"), Path(folder, "printed")
        pid = os.fork()
        if not pid:
            with printed.open("w") as file:
                os.dup2(file.fileno(), 1)
            change_job.main(way, optimizer, str(epochs), "0", f"{folder}/run", str(out))
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        lines = [(0.0, "alone", line) for line in printed.read_text().splitlines()]
        return rows_by_step(lines), torch.load(out)


def run(
    way: str,
    optimizer: str,
    faults: Sequence[tuple[str, tuple[int, ...]] | None],
    seed: int,
    kinds: Sequence[str],
) -> tuple[list[Fault], str]:
    """Run one job with these faults (None: one that is drawn); return them, and a complaint."""
    chance = random.Random(seed)
    name, said = f"{way}, {optimizer}, seed {seed}", Said()
    Path(OWN).mkdir(exist_ok=True)
    with made_folder() as folder, Lab(hosts=HOSTS, rate="none") as lab:
        out = Path(folder) / "out.pt"
        enough = Path(folder) / "enough"
        command = (str(JOB), way, optimizer, "9999", "0.1", f"{OWN}/run", str(out), str(enough))
        hosts = Hosts(lab, command, said)
        hosts.start_place()
        for host in range(HOSTS):
            hosts.start(host)
        one = Run(name, hosts, chance, kinds)
        if said.wait(lambda who, line: told(line).get("is") == "step", 0, LIMIT_S) is None:
            return one.faults, "nobody has begun"
        for wanted in faults:
            time.sleep(1 + 4 * chance.random())
            drawn = wanted or one.next()
            if drawn is not None:
                fault = one.fault(*drawn)
                if fault.complaint:
                    return one.faults, f"{fault.kind} of {fault.hosts}: {fault.complaint}"
        enough.touch()
        return one.faults, complaint_of(hosts, out, way, optimizer)


def complaint_of(hosts: Hosts, out: Path, way: str, optimizer: str) -> str:
    """Wait for the end of the job; return what is wrong with it, or nothing."""
    until_s = time.monotonic() + 2 * LIMIT_S
    for host, agent in hosts.agents.items():
        code = agent.wait(max(1.0, until_s - time.monotonic()))
        if code is None:
            return f"the agent of h{host} hangs"
        if code:
            return f"the agent of h{host} ended with {code}"
    time.sleep(0.3)
    rows = rows_by_step(hosts.said.lines)
    if not rows:
        return "no rank has told the job's end"
    steps_an_epoch = change_job.ROWS // change_job.BATCH
    expected_rows, expected = undisturbed(way, optimizer, max(rows) // steps_an_epoch)
    wrong = [step for step in sorted(expected_rows) if rows.get(step) != expected_rows[step]]
    if wrong or len(rows) != len(expected_rows):
        return f"other rows in steps {wrong[:5]}"
    found = torch.load(out)
    far = max(ratio(found[name], value) for name, value in expected.items())
    return "" if far <= _RATIO else f"parameters differ by {far:.1e}"


def ratio(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference against the largest value."""
    return float((found - expected).abs().max() / max(float(expected.abs().max()), 0.01))


def listed(fault: str) -> tuple[str, tuple[int, ...]] | None:
    """Return kind and hosts of a fault as it is written on the command line."""
    kind, _, hosts = fault.partition(":")
    return kind, tuple(int(host) for host in hosts.split(","))


def plans(asked: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield way, optimizer and seed of each run."""
    ways = [asked.way] if asked.way else list(WAYS)
    optimizers = [asked.optimizer] if asked.optimizer else list(OPTIMIZERS)
    for number in range(asked.runs):
        way = ways[number % len(ways)]
        yield way, optimizers[number // len(ways) % len(optimizers)], asked.seed + number


def main() -> int:
    """Run the jobs that were asked for, and print each fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--faults", type=int, default=5, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--optimizer", choices=OPTIMIZERS)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--sequence",
        nargs="+",
        help="these faults in place of drawn ones: kill:1,2 join:1,2 place:0",
    )
    parser.add_argument("--json", type=Path, help="a file to add a line a fault to")
    asked = parser.parse_args()
    if (lacks := Lab().missing()) is not None:
        print(f"there is no lab here: {lacks}")
        return 1
    sequence = [listed(fault) for fault in asked.sequence or ()] or [None] * asked.faults
    every: list[Fault] = []
    bad = 0
    for way, optimizer, seed in plans(asked):
        faults, complaint = run(way, optimizer, sequence, seed, asked.only)
        every += faults
        bad += bool(complaint)
        for fault in faults:
            line = json.dumps(asdict(fault))
            print(line, flush=True)
            if asked.json is not None:
                with asked.json.open("a") as file:
                    file.write(line + "\n")
        print(f"{'FAIL' if complaint else 'ok  '} {way}, {optimizer}, seed {seed} {complaint}")
    for kind in sorted({fault.kind for fault in every}):
        seconds = [f.again_s for f in every if f.kind == kind and f.again_s is not None]
        if seconds:
            print(f"{kind}: {len(seconds)}, median {statistics.median(seconds):.1f} s again")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
