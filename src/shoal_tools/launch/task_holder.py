"""The work of each task in the Spark launcher's stage: it runs its rank's command for the driver.

    1  seat     the number of the rank, and the place where ranks meet; the driver hears it, and
                says go
    2  command  with this executor's own Python, and with the files that were sent
    3  lines    the rank's output, at once; signals the other way
    4  end      everything that the rank has left running is killed (executor_rank.py); then the
                exit code

Cost: three threads that sleep while nothing is printed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import IO, Any

from shoal.contracts.launcher import TOKEN
from shoal.core.errors import WorldError
from shoal_tools.launch.desk import ERR, EXIT, OUT, SIGNAL, call_desk
from shoal_tools.launch.executor_rank import ExecutorRank, rank_of_task

PYTHON = "\0python"  # a word of the command: the executor's own
_READ = 1 << 16
_NOT_FOUND, _ENDED = 127, 143  # exit codes, as of a shell


@dataclass(frozen=True)
class TaskOrder:
    """The order to every task."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, bytes]  # contents by the path that the command uses
    folder: str  # the driver's working directory
    desk: tuple[str, int]  # the driver's address
    token: str = field(repr=False)


def task_of(order: TaskOrder) -> Any:
    """Return the function that Spark calls in each task."""

    def task(_: Iterator[Any]) -> Iterator[int]:
        yield hold(order)

    return task


def hold(order: TaskOrder) -> int:
    """Run this task's rank to its end, and return its exit code.

    Raises:
        WorldError: the driver cannot be reached.
    """
    with rank_of_task() as rank:
        seat = rank.seat
        try:
            desk: Any = call_desk(order.desk, order.token)
        except (OSError, AuthenticationError) as error:
            raise WorldError(
                f"{seat.executor}, cannot reach the driver at {order.desk[0]}:{order.desk[1]}, "
                f"where ranks' output goes ({error})",
            ) from error
        with closing(desk):
            desk.send_bytes(f"{seat.rank} {seat.host} {seat.executor}".encode())
            try:
                desk.recv_bytes()  # go
            except (EOFError, OSError):  # the driver is gone, or does not want it
                return _ENDED
            return _Reports(desk).run(order, rank)


class _Reports:
    """The reports of one rank to the driver: lines, and the exit code."""

    def __init__(self, desk: Any) -> None:
        self._desk, self._saying = desk, threading.Lock()

    def run(self, order: TaskOrder, rank: ExecutorRank) -> int:
        """Return the exit code. A signal counts as in a shell."""
        try:
            process = _start(order, rank)
        except OSError as error:
            self._say(ERR + f"shoal: the command cannot be started: {error}\n".encode())
            code = _NOT_FOUND
        else:
            code = self._hold(process, rank)
        self._say(EXIT + str(code).encode())
        return code if code >= 0 else 128 - code

    def _hold(self, process: subprocess.Popen[bytes], rank: ExecutorRank) -> int:
        pipes = ((process.stdout, OUT), (process.stderr, ERR))
        passing = [threading.Thread(target=self._pass_on, args=each, daemon=True) for each in pipes]
        obeying = threading.Thread(target=self._obey, args=(rank,), daemon=True)
        for thread in (*passing, obeying):
            thread.start()
        try:
            code = process.wait()
        finally:
            rank.stop()
        for thread in passing:
            thread.join()
        return code

    def _pass_on(self, pipe: IO[bytes], kind: bytes) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), _READ):
                self._say(kind + data)

    def _obey(self, rank: ExecutorRank) -> None:
        try:
            while message := self._desk.recv_bytes():
                if message[:1] == SIGNAL:
                    rank.signal(int(message[1:]))
        except (OSError, EOFError):  # the driver is gone
            rank.signal(signal.SIGKILL)

    def _say(self, message: bytes) -> None:
        with self._saying, suppress(OSError):
            self._desk.send_bytes(message)


def _start(order: TaskOrder, rank: ExecutorRank) -> subprocess.Popen[bytes]:
    sent = {path: str(rank.folder / Path(path).name) for path in order.files}
    for path, data in order.files.items():
        Path(sent[path]).write_bytes(data)
    words = [sys.executable if word == PYTHON else sent.get(word, word) for word in order.command]
    return rank.start(
        words,
        {TOKEN: order.token, **order.environment},
        folder=order.folder if os.path.isdir(order.folder) else rank.folder,
    )
