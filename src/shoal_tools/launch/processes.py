"""Runs commands side by side, one process group each, and leaves none of their processes behind.

Why here: every launcher needs the same three promises, and each has a trap of its own.

1. The first failure in time is the verdict, unless the ranks themselves know better, so process
   descriptors (pidfd) wake one loop the moment a rank ends.
2. Output passes line by line while ranks run, so the same loop reads the pipes; no threads, no
   locks.
3. Nothing stays, by whatever way the launcher ends:
   an end, an error, Ctrl-C, SIGTERM   the loop ends the groups, then kills whatever still carries
                                       the job's mark
   kill -9 of the launcher             the kernel kills the ranks (`setpriv --pdeathsig`)

Cost: one thread that sleeps while nothing is printed. Linux only.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, TextIO

from shoal.contracts.launcher import MARK, Job, Result
from shoal.core.cores import bound_cores, quota_cores
from shoal.core.errors import UsageError
from shoal.core.numbers import how_many
from shoal.core.open_files import raise_limit
from shoal_tools.launch.host_end import marked

DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
KILL_AFTER_S = 3.0  # how long a group may take to follow a polite signal


@dataclass(frozen=True)
class Command:
    """A rank's program, and its label in messages.

    `prefix` stands before its lines, by default the label in brackets.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    label: str
    prefix: str | None = None

    @property
    def before_lines(self) -> str:
        """The text before each of its lines."""
        return f"[{self.label}] " if self.prefix is None else self.prefix


def missing_tools(*tools: str) -> str | None:
    """Name the programs that this machine lacks; None if it has all."""
    if sys.platform != "linux":
        return "it needs Linux"
    absent = [tool for tool in tools if shutil.which(tool) is None]
    return f"not on PATH: {', '.join(absent)}" if absent else None


def check(job: Job) -> None:
    """Raise UsageError for a job that cannot start, before anything does."""
    if job.ranks < 1:
        raise UsageError(
            "a job needs at least one rank", got=f"ranks={job.ranks}", do="ask for 1 or more"
        )
    if min(job.servers, job.tail) < 0 or job.servers + job.tail >= job.ranks:
        raise UsageError(
            "a job has at least one rank that trains",
            got=f"ranks={job.ranks}, servers={job.servers}, tail={job.tail}",
            do="ask for more ranks, or fewer of the others",
        )
    if job.ranks_per_host is not None and job.ranks_per_host < 1:
        raise UsageError("a host has at least one rank", got=f"ranks_per_host={job.ranks_per_host}")
    if job.ranks_per_host is not None and job.ranks_per_host > job.ranks:
        raise UsageError(
            "there are fewer ranks than each host is to have",
            got=f"{how_many(job.ranks, 'rank')}, --ranks-per-host {job.ranks_per_host}",
            do=f"start --ranks {job.ranks_per_host}, or leave --ranks-per-host out",
        )
    if not job.command:
        raise UsageError("there is no command to run", do="give one, e.g. python script.py")
    if shutil.which(job.command[0], path=job.environment.get("PATH")) is None:
        raise UsageError(
            f"there is no program {job.command[0]!r} to run",
            got=" ".join(job.command),
            do="check the spelling; a script without execute permission starts as: python "
            "script.py",
        )


def check_here(job: Job) -> None:
    """Check a job for a launcher that starts all ranks on this machine."""
    check(job)
    if job.master:
        raise UsageError(
            "this launcher starts ranks on this machine, and takes no master",
            got=job.master,
            do="leave --master out, or name the launcher that it is for: --launcher spark",
        )
    if job.hosts not in (None, 1):
        raise UsageError(
            "this launcher starts all ranks on one host, this machine",
            got=f"{job.ranks} ranks, {job.ranks_per_host} a host",
            do="leave the number of ranks a host out",
        )


def environment(job: Job, **launcher: str) -> dict[str, str]:
    """Return one rank's environment: the launcher's variables, overridden by the job's.

    Cores are shared out among ranks. Python's output is unbuffered, so that lines come at once. The
    user's own variables win over both.
    """
    threads = max(1, int(min(bound_cores(), quota_cores()) // job.ranks))
    polite = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    return {
        **polite,
        **os.environ,
        "SHOAL_HOST": socket.gethostname(),
        **launcher,
        **job.roles,
        **job.environment,
    }


class Interrupts:
    """Holds Ctrl-C, SIGTERM and SIGHUP back until all is cleaned up, then lets them act.

    Off the main thread, where Python takes no signals, it holds nothing. A signal that was being
    ignored stays ignored.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                before = signal.getsignal(number)
                if before is not None and before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, lambda number, _: self.received.append(number))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self.received:
            signal.raise_signal(self.received[0])


def run(
    commands: Sequence[Command],
    grace_s: float,
    interrupts: Interrupts,
    agreed: Callable[[str], tuple[str, int | None] | None] = lambda job: None,
) -> Result:
    """Run all commands to their end (`Job` says the grace). A single one keeps the terminal.

    `agreed` returns the fault that the ranks themselves have found in the job of that id, if any,
    and the rank that failed. It is printed last. It counts more than the rank that ended first,
    because ranks that hear of a failure may end before the failed rank.
    """
    raise_limit()
    mark = uuid.uuid4().hex
    ranks = _RankProcesses(commands, mark, grace_s, interrupts)
    found: tuple[str, int | None] | None = None
    try:
        ranks.start()
        while ranks.alive:
            ranks.turn()
            ranks.hurry_end()
            if ranks.first_failure is not None:
                # keep the first answer, because a stranger may overwrite it at the end
                found = found or agreed(mark)
    finally:
        ranks.kill()
        kill_all(lambda: marked(f"{MARK}={mark}"))
        ranks.close()
    first, found = ranks.first_failure, found or agreed(mark)
    if first is not None and found is not None and not interrupts.received:
        problem, rank = found
        _say(problem)
        if rank is not None and 0 <= rank < len(commands) and ranks.exit_codes[rank]:
            first = rank
    return Result(tuple(ranks.exit_codes), first)


class _RankProcesses:
    """The processes of one `run`, and the one loop that watches them."""

    def __init__(
        self, commands: Sequence[Command], mark: str, grace_s: float, interrupts: Interrupts
    ) -> None:
        self.exit_codes = [0] * len(commands)
        self.first_failure: int | None = None
        self.alive: dict[int, subprocess.Popen[bytes]] = {}
        self._commands = commands
        self._mark = mark
        self._grace_s = grace_s
        self._interrupts = interrupts
        self._hurried = False  # whether it was seen to the last one
        self._obeyed = 0  # how many interrupts have been acted on
        # signals that are due for all groups: (when, signal)
        self._ending: list[tuple[float, int]] = []
        self._selector = selectors.DefaultSelector()
        self._lines: list[tuple[IO[bytes], Lines]] = []

    def start(self) -> None:
        for rank, command in enumerate(self._commands):
            alone = len(self._commands) == 1
            columns = {} if alone else _terminal(command.before_lines)
            process = subprocess.Popen(
                (*DIE_WITH_PARENT, *command.argv),
                env={**columns, **command.environment, MARK: self._mark},
                stdin=None if alone else subprocess.DEVNULL,
                stdout=None if alone else subprocess.PIPE,
                stderr=None if alone else subprocess.PIPE,
                start_new_session=True,
            )
            self.alive[rank] = process
            descriptor = os.pidfd_open(process.pid)
            self._selector.register(
                descriptor, selectors.EVENT_READ, (self._note_end, rank, descriptor)
            )
            for pipe, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                if pipe is not None:
                    lines = Lines(command.before_lines, sink)
                    self._lines.append((pipe, lines))
                    self._selector.register(
                        pipe, selectors.EVENT_READ, (self._print_lines, pipe, lines)
                    )

    def turn(self) -> None:
        """Wait for something to happen, a tenth of a second at most, and act on it."""
        for key, _ in self._selector.select(timeout=0.1):
            act, *arguments = key.data
            act(*arguments)
        # the first is passed on, a second one means now
        if len(self._interrupts.received) > self._obeyed:
            again, number = self._obeyed > 0, self._interrupts.received[-1]
            self._obeyed = len(self._interrupts.received)
            if again:
                self._end_after(0.0, signal.SIGKILL)
            else:
                self._pass_on(number)
        while self._ending and self._ending[0][0] <= time.monotonic():
            _, number = self._ending.pop(0)
            _say(
                f"sending {signal.Signals(number).name} to "
                f"{', '.join(self._commands[r].label for r in self.alive)}"
            )
            self._send(number)

    def _pass_on(self, number: int) -> None:
        """Tell the ranks of an interrupt, and leave them time to save and end."""
        name = signal.Signals(number).name
        _say(
            f"{name}: {', '.join(self._commands[r].label for r in self.alive)} may save and end "
            f"within {self._grace_s:g} s; {'Ctrl-C' if number == signal.SIGINT else name} again "
            "ends them now"
        )
        self._send(number)
        self._ending = [(time.monotonic() + self._grace_s, signal.SIGKILL)]

    def hurry_end(self) -> None:
        """End a process that is stopped, once it alone is left: it does not end by itself."""
        if not self._hurried and len(self.alive) == 1 and self.first_failure is not None:
            (process,) = self.alive.values()
            self._hurried = True
            if _is_stopped(process.pid) and not self._interrupts.received:
                self._end_after(0.0, signal.SIGTERM)

    def kill(self) -> None:
        """End whatever has not ended, now."""
        self._send(signal.SIGKILL)
        for process in self.alive.values():
            process.wait()

    def close(self) -> None:
        """Pass on the rest of the pipes. Their writers are dead, so each pipe ends soon."""
        for pipe, lines in self._lines:
            os.set_blocking(pipe.fileno(), False)
            with suppress(BlockingIOError):  # a stranger that we could not kill holds the other end
                while data := os.read(pipe.fileno(), 1 << 16):
                    lines.feed(data)
            lines.end()
            pipe.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self._selector.close()

    def _print_lines(self, pipe: IO[bytes], lines: Lines) -> None:
        data = os.read(pipe.fileno(), 1 << 16)
        if data:
            lines.feed(data)
        else:
            self._selector.unregister(pipe)

    def _note_end(self, rank: int, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        code = self.alive.pop(rank).wait()
        # the shell's way to say "by signal N"
        self.exit_codes[rank] = code if code >= 0 else 128 - code
        if code == 0 or self.first_failure is not None:
            return
        self.first_failure = rank
        if self.alive and not self._ending and not self._interrupts.received:
            how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
            _say(
                f"{self._commands[rank].label} ended first ({how}); the others have "
                f"{self._grace_s:g} s to end"
            )
            self._end_after(self._grace_s, signal.SIGTERM)

    def _send(self, number: int) -> None:
        for process in self.alive.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _end_after(self, delay_s: float, number: int) -> None:
        at = time.monotonic() + delay_s
        self._ending = [(at, number), (at + KILL_AFTER_S, signal.SIGKILL)]


def _terminal(prefix: str) -> dict[str, str]:
    """Return variables that tell a rank of the terminal behind its pipe.

    A rank without a prefix may rewrite its line there (TTY_COMPATIBLE is rich's).
    """
    wide = {"COLUMNS": str(shutil.get_terminal_size().columns - len(prefix))}
    return wide if prefix or not sys.stdout.isatty() else {**wide, "TTY_COMPATIBLE": "1"}


class Lines:
    """One rank's output stream: whole lines pass, each with a prefix.

    A progress bar rewrites its line with carriage returns. On a terminal each state of it passes;
    in a file only the last, as a terminal would show it.
    """

    def __init__(self, prefix: str, sink: TextIO) -> None:
        self._prefix = prefix
        self._sink = sink
        self._rest = b""
        # wipes the rest of a longer state of a bar
        self._clear = "\x1b[K" if sink.isatty() else ""

    def feed(self, data: bytes) -> None:
        """Take output of the rank, in pieces of any size."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            *passing, last = line.rstrip(b"\r").split(b"\r")
            self._write(passing, "\r")
            self._write([last], "\n")
        *passing, _ = rest.rstrip(b"\r").split(b"\r")
        self._write(passing, "\r")
        self._rest = rest[sum(len(state) + 1 for state in passing) :]
        self._sink.flush()

    def end(self) -> None:
        """Pass on a last line that has no end."""
        if self._rest:
            self.feed(b"\n")

    def _write(self, states: Sequence[bytes], end: str) -> None:
        for state in states:
            if end == "\n" or (state and self._clear):
                self._sink.write(
                    f"{self._prefix}{state.decode(errors='replace')}{self._clear}{end}"
                )


def kill_all(find: Callable[[], list[int]]) -> None:
    """Kill the processes that `find` lists until it lists none: a process may fork meanwhile."""
    give_up = time.monotonic() + KILL_AFTER_S
    while (found := find()) and time.monotonic() < give_up:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _is_stopped(pid: int) -> bool:
    """Return whether a process has been sent SIGSTOP."""
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _say(message: str) -> None:
    print(f"shoal: {message}", file=sys.stderr, flush=True)
