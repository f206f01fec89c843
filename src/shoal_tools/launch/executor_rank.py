"""A rank on an executor of Spark: its seat, its folder and its process, and an end without a trace.

    seat      the number of the rank, and the place where ranks meet                   barrier.py
    folder    on the executor's local disk, for files of this rank; gone at the end
    process   with the executor's own import path; it ends with the task
    end       everything that the rank has left running is killed

Both ways to Spark hold a rank by it: the launcher (task_holder.py) and `run` (spark/task.py).

Cost: one look at the executor's processes at the end.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import final

from shoal.core.errors import PeerLost
from shoal_tools.launch.barrier import TaskSeat, local_folder, seat_of
from shoal_tools.launch.host_end import POLITE, job_folder, marked
from shoal_tools.launch.processes import DIE_WITH_PARENT, kill_all

_TASK = "SHOAL_SPARK_TASK"  # variable that marks all processes of one rank


@final
class ExecutorRank:
    """One rank of a barrier stage.

    Args:
        seat: the rank's place in the stage.
        folder: a folder of its own.
    """

    def __init__(self, seat: TaskSeat, folder: Path) -> None:
        self.seat, self.folder = seat, folder
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        words: Sequence[str],
        settings: Mapping[str, str],
        *,
        folder: str | Path | None = None,
        stdout: int = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start the rank's process. `stop` ends it, and the end of this process does.

        Args:
            words: the command.
            settings: variables, beside those of the seat.
            folder: the working directory; by default the task's.
            stdout: as in `subprocess`.
            stderr: as in `subprocess`.
            pass_fds: file descriptors that it inherits.

        Raises:
            OSError: the command cannot be started.
        """
        # the path of this executor, with everything that Spark was told to send
        search = os.pathsep.join(each for each in sys.path if each)
        environment = {**POLITE, **os.environ, "PYTHONPATH": search, **self.seat.settings}
        self._process = subprocess.Popen(
            _dying_with_us(words),
            env={**environment, **settings, _TASK: self._mark},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        return self._process

    def signal(self, number: int) -> None:
        """Send a signal to the rank's process and the processes of its session."""
        if self._process is not None:
            _signal(self._process, number)

    def stop(self) -> None:
        """Kill everything that the rank has left running. After that it gets no signal."""
        process, self._process = self._process, None
        if process is not None:
            _signal(process, signal.SIGKILL)
            kill_all(lambda: marked(f"{_TASK}={self._mark}"))
            process.wait()

    def error(self, code: int) -> PeerLost:
        """Return the error for a process that has ended without an outcome."""
        return PeerLost(
            "the process of a rank ended without a word",
            where=self.seat.executor,
            got=f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}",
            do="look at the executor's stderr; SIGKILL is mostly the system's, for want of memory: "
            "raise spark.executor.memoryOverhead, or lower batch_size",
        )


@contextmanager
def rank_of_task() -> Iterator[ExecutorRank]:
    """Hold the rank of the Spark task that calls, until the end of the block."""
    context = importlib.import_module("pyspark").BarrierTaskContext.get()
    with closing(seat_of(context)) as seat, job_folder(local_folder()) as folder:
        rank = ExecutorRank(seat, folder)
        try:
            yield rank
        finally:
            rank.stop()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _dying_with_us(words: Sequence[str]) -> Sequence[str]:
    return (*DIE_WITH_PARENT, *words) if shutil.which(DIE_WITH_PARENT[0]) else words
