"""The work of each task in the Spark launcher's stage: it runs its rank's command for the driver.

    1  seat     the number of the rank, and the place where ranks meet; the driver hears it, and
                says go
    2  command  with this executor's own Python, and with the files that were sent
    3  lines    the rank's output, at once; signals the other way
    4  end      everything that the rank has left running is killed; then the exit code

Cost: three threads that sleep while nothing is printed.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import IO, Any

from shoal.contracts.launcher import TOKEN
from shoal.core.errors import WorldError
from shoal_tools.launch.barrier import TaskSeat, local_folder, seat_of
from shoal_tools.launch.desk import ERR, EXIT, OUT, SIGNAL, call_desk
from shoal_tools.launch.host_end import POLITE, job_folder, marked
from shoal_tools.launch.processes import DIE_WITH_PARENT, kill_all

PYTHON = "\0python"  # a word of the command: the executor's own
_TASK = "SHOAL_SPARK_TASK"  # variable that marks all processes of one rank
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
    with closing(seat_of(importlib.import_module("pyspark").BarrierTaskContext.get())) as seat:
        return _hold(order, seat)


def _hold(order: TaskOrder, seat: TaskSeat) -> int:
    try:
        desk: Any = call_desk(order.desk, order.token)
    except (OSError, AuthenticationError) as error:
        raise WorldError(
            f"{seat.executor}, cannot reach the driver at {order.desk[0]}:{order.desk[1]}, "
            f"where ranks' output goes ({error})",
        ) from error
    with closing(desk), job_folder(local_folder()) as folder:
        desk.send_bytes(f"{seat.rank} {seat.host} {seat.executor}".encode())
        try:
            desk.recv_bytes()  # go
        except (EOFError, OSError):  # the driver is gone, or does not want it
            return _ENDED
        return _Rank(desk).run(order, seat, folder)


class _Rank:
    """The processes of one rank, from start to end, and their reports to the driver."""

    def __init__(self, desk: Any) -> None:
        self._desk, self._saying = desk, threading.Lock()

    def run(self, order: TaskOrder, seat: TaskSeat, folder: Path) -> int:
        """Return the exit code. A signal counts as in a shell."""
        mark = f"{_TASK}={uuid.uuid4().hex}"
        try:
            process = _start(order, seat, folder, mark)
        except OSError as error:
            self._say(ERR + f"shoal: the command cannot be started: {error}\n".encode())
            code = _NOT_FOUND
        else:
            code = self._held(process, mark)
        self._say(EXIT + str(code).encode())
        return code if code >= 0 else 128 - code

    def _held(self, process: subprocess.Popen[bytes], mark: str) -> int:
        pipes = ((process.stdout, OUT), (process.stderr, ERR))
        passing = [threading.Thread(target=self._pass_on, args=each, daemon=True) for each in pipes]
        obeying = threading.Thread(target=self._obey, args=(process,), daemon=True)
        for thread in (*passing, obeying):
            thread.start()
        try:
            code = process.wait()
        finally:
            _signal(process, signal.SIGKILL)
            kill_all(lambda: marked(mark))
        for thread in passing:
            thread.join()
        return code

    def _pass_on(self, pipe: IO[bytes], kind: bytes) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), _READ):
                self._say(kind + data)

    def _obey(self, process: subprocess.Popen[bytes]) -> None:
        try:
            while message := self._desk.recv_bytes():
                if message[:1] == SIGNAL:
                    _signal(process, int(message[1:]))
        except (OSError, EOFError):  # the driver is gone
            _signal(process, signal.SIGKILL)

    def _say(self, message: bytes) -> None:
        with self._saying, suppress(OSError):
            self._desk.send_bytes(message)


def _start(order: TaskOrder, seat: TaskSeat, folder: Path, mark: str) -> subprocess.Popen[bytes]:
    sent = {path: str(folder / Path(path).name) for path in order.files}
    for path, data in order.files.items():
        Path(sent[path]).write_bytes(data)
    words = [sys.executable if word == PYTHON else sent.get(word, word) for word in order.command]
    task, _, value = mark.partition("=")
    # the path of this executor, with everything that Spark was told to send
    search = os.pathsep.join(each for each in sys.path if each)
    environment = {**POLITE, **os.environ, "PYTHONPATH": search}
    return subprocess.Popen(
        _dying_with_us(words),
        env={**environment, **seat.settings, TOKEN: order.token, **order.environment, task: value},
        cwd=order.folder if os.path.isdir(order.folder) else folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _dying_with_us(words: Sequence[str]) -> Sequence[str]:
    return (*DIE_WITH_PARENT, *words) if shutil.which(DIE_WITH_PARENT[0]) else words


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
