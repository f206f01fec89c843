"""Agents and a meeting place on this machine, forked, with scripts that take no time."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shoal_tools.elastic.agent import Agent, AgentOptions
from shoal_tools.elastic.messages import CrewTerms
from shoal_tools.elastic.place import MeetingPlace

HERE, TOKEN = "127.0.0.1", "0123abcd"
LIMIT_S = 60.0

# A rank that goes on until the file `end` is there, or until it is asked to commit.
SCRIPT = """
import os, pathlib, sys, time
from shoal.comm.rendezvous import crew, is_asked_to_end
folder = pathlib.Path(sys.argv[1])
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
told = " ".join(os.environ[name] for name in names)
new = folder / f"new-{os.getpid()}"
new.write_text(f"{told} {os.getpid()} {crew()[1]}")
new.rename(folder / f"{os.environ['SHOAL_HOST']}-{crew()[1]}")
while not (folder / "end").exists():
    if is_asked_to_end():
        sys.exit(75)
    time.sleep(0.02)
"""


def forked(work: Callable[[list[int]], int], printed: Path) -> int:
    """Fork a process that does this and ends with its exit code; return its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        with printed.open("a") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        told_to_end: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: told_to_end.append(number))
        code = work(told_to_end)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


class Processes:
    """A meeting place and agents, with a folder in which scripts leave files."""

    def __init__(self, folder: Path, terms: CrewTerms = CrewTerms(most=2)) -> None:  # noqa: B008
        self.folder, self.terms = folder, terms
        self.port = 0
        self.pids: dict[str, int] = {}
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)

    def start_place(self) -> None:
        """Start the meeting place, again at the same port."""
        place = MeetingPlace(HERE, self.port, TOKEN, 20.0, print)
        self.port = place.port

        def serve(told_to_end: list[int]) -> int:
            over = place.run(told_to_end)
            return over.code if over else 0

        self.pids["place"] = forked(serve, self.folder / "place.txt")
        place.forget()

    def start(self, host: str, token: str = TOKEN, command: Sequence[str] = ()) -> None:
        """Start an agent."""

        def serve(told_to_end: list[int]) -> int:
            os.environ["SHOAL_HOST"] = host
            words = tuple(command) or (str(self.script), str(self.folder))
            options = AgentOptions(words, terms=self.terms, grace_s=5.0)
            return Agent((HERE, self.port), token, options, told_to_end, print).run()

        self.pids[host] = forked(serve, self.folder / f"{host}.txt")

    def signal(self, who: str, number: int) -> None:
        """Send a signal to an agent, or to the meeting place."""
        os.kill(self.pids[who], number)

    def printed(self, who: str) -> str:
        """Return everything that it has printed."""
        return (self.folder / f"{who}.txt").read_text()

    def told(self, host: str, crew: int) -> list[str]:
        """Wait for a rank; return rank, size, address, port, restarts, pid, crew."""
        path = self.folder / f"{host}-{crew}"
        self.until(path.exists)
        return path.read_text().split()

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        until_s = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < until_s, {who: self.printed(who) for who in self.pids}
            time.sleep(0.02)

    def end(self) -> None:
        """Let all ranks end their work."""
        (self.folder / "end").touch()

    def code(self, who: str) -> int:
        """Wait for the end of a process; return its exit code."""
        pid, found = self.pids[who], [0, 0]

        def ended() -> bool:
            found[:] = os.waitpid(pid, os.WNOHANG)
            return found[0] != 0

        self.until(ended)
        del self.pids[who]
        return os.waitstatus_to_exitcode(found[1])


@contextmanager
def up(folder: Path, *hosts: str, terms: CrewTerms | None = None) -> Iterator[Processes]:
    """Start a meeting place and agents on hosts of these names; end all that is left."""
    processes = Processes(folder, terms or CrewTerms(most=len(hosts) or 2))
    try:
        processes.start_place()
        for host in hosts:
            processes.start(host)
        yield processes
    finally:
        for pid in processes.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def lives(pid: str) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False
