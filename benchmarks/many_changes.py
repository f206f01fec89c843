"""Many changes of hosts in one run: do memory, open files, temporary files or processes grow?

    python benchmarks/many_changes.py [--changes 50] [--json FILE]

Two agents on this machine train change_job.py, with generations in memory each second step. Of ten
changes, eight are a rank that is killed, one is a host that leaves, and one a host that comes. Once
the new crew trains, this counts all that the agent, its nursery and the meeting place hold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

JOB = Path(__file__).with_name("change_job.py")
LIMIT_S = 600.0  # to import PyTorch on a busy machine, too
MARKED = "MANY_CHANGES"  # a variable of all processes of this benchmark


class Agents:
    """A meeting place and agents, whose lines go to files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pids = folder, dict[str, subprocess.Popen[bytes]]()
        for name in ("memory", "tmp"):
            (folder / name).mkdir()
        self.start("place", "rendezvous", "--address", "127.0.0.1", "--port", "0")
        found = self.until(lambda: re.search(r"listens at port (\d+)", self.said("place")))
        self.port = found[1]

    def said(self, who: str) -> str:
        """Return all lines of a process."""
        path = self.folder / f"{who}.txt"
        return path.read_text() if path.exists() else ""

    def start(self, who: str, *words: str) -> None:
        """Start a command of Shoal."""
        own = {
            "SHOAL_HOST": who,
            "SHOAL_TOKEN": "many",
            "SHOAL_CACHE": "off",
            "SHOAL_HOST_MEMORY": f"{self.folder}/memory",
            "TMPDIR": f"{self.folder}/tmp",
            "OMP_NUM_THREADS": "1",
            "CHANGES_IN_MEMORY_EVERY": "2",
            MARKED: str(self.folder),
        }
        with (self.folder / f"{who}.txt").open("ab") as file:
            self.pids[who] = subprocess.Popen(
                (sys.executable, "-m", "shoal", *words),
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def start_host(self, who: str) -> None:
        """Start an agent."""
        own = ("--rendezvous", f"127.0.0.1:{self.port}", "--max", "2", "--max-restarts", "9999")
        files = (f"{self.folder}/{who}", f"{self.folder}/out.pt", f"{self.folder}/enough")
        self.start(who, "agent", *own, str(JOB), "replicate", "AdamW", "9999", "0.05", *files)

    def until(self, found: Callable[[], re.Match[str] | None]) -> re.Match[str]:
        """Wait until something is found."""
        until_s = time.monotonic() + LIMIT_S
        while (what := found()) is None:
            assert time.monotonic() < until_s, self.said("place") + self.said("a")
            time.sleep(0.05)
        return what

    def trains(self, crew: int) -> list[int]:
        """Wait until that crew, or a later one, has made steps; return its number and size."""

        def step() -> re.Match[str] | None:
            text = self.said("a")
            begun = list(re.finditer(r"\] crew (\d+) trains on (.*?), this host", text))
            if not begun or int(begun[-1][1]) < crew:
                return None
            behind = text[begun[-1].start() :]
            return begun[-1] if behind.count('"is": "step"') >= 5 else None

        found = self.until(step)
        return [int(found[1]), len(found[2].split(", "))]

    def close(self) -> None:
        """End everything."""
        for process in self.pids.values():
            process.kill()
            process.wait()


def status(pid: int, name: str) -> int:
    """Return a number of a process's status."""
    found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    told = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in told.split()]


def counted(agents: Agents) -> dict[str, int]:
    """Count what processes hold, and files."""
    agent, place = agents.pids["a"].pid, agents.pids["place"].pid
    nursery = children(agent)[0]
    found = {}
    for who, pid in (("agent", agent), ("nursery", nursery), ("place", place)):
        found[f"{who} files"] = len(os.listdir(f"/proc/{pid}/fd"))
        found[f"{who} threads"] = status(pid, "Threads")
        found[f"{who} MB"] = status(pid, "VmRSS") // 1024
    memory = [path for path in (agents.folder / "memory").rglob("*") if path.is_file()]
    found["memory files"] = len(memory)
    found["temporary files"] = len([*(agents.folder / "tmp").rglob("*")])
    mark = f"{MARKED}={agents.folder}".encode()
    processes = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            processes += mark in path.read_bytes().split(b"\0")
        except OSError:
            continue
    return {**found, "processes": processes}


def change(agents: Agents, number: int) -> None:
    """Make the change of that number."""
    if number % 10 == 8:
        agents.pids["b"].send_signal(signal.SIGTERM)
        agents.pids["b"].wait()
    elif number % 10 == 9:
        agents.start_host("b")
    else:
        rank = children(children(agents.pids["a"].pid)[0])[0]
        os.kill(rank, signal.SIGKILL)


def main() -> None:
    """Make the changes, and print what was counted after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--changes", type=int, default=50)
    parser.add_argument("--json", type=Path, help="a file to add a line a change to")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="many-changes-") as name:
        agents = Agents(Path(name))
        try:
            for host in ("a", "b"):
                agents.start_host(host)
            crew, hosts = agents.trains(1)
            for number in range(asked.changes + 1):
                began_s = time.monotonic()
                if number:
                    change(agents, number - 1)
                    crew, hosts = agents.trains(crew + 1)
                took_s = round(time.monotonic() - began_s, 1)
                line = {"change": number, "crew": crew, "hosts": hosts, "s": took_s}
                text = json.dumps({**line, **counted(agents)})
                print(text, flush=True)
                if asked.json is not None:
                    with asked.json.open("a") as file:
                        file.write(text + "\n")
        finally:
            agents.close()


if __name__ == "__main__":
    main()
