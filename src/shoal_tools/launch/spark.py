"""Ranks on the executors of a Spark cluster: a barrier stage, with one rank a task.

    driver      a session on the cluster · a desk that listens · the stage        this file, desk.py
    executors   a task runs the command as its rank, and tells the desk of it     task_holder.py

The driver gets a rank's output at once. The rank that first reports a failure, or closes its
connection, counts as the first that failed. Ctrl-C and SIGTERM go to every rank, which may save and
end.

Cost: Spark's own start, some seconds. While ranks train, nothing of it takes part.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, final

from shoal.comm.rendezvous import token_of
from shoal.contracts.launcher import Job, Launcher, Result
from shoal.core.errors import UsageError
from shoal.core.regular_files import read_bytes
from shoal_tools.launch.cluster import (
    BarrierStage,
    check_slots,
    missing_spark,
    session,
    waited_slots,
)
from shoal_tools.launch.desk import ERR, EXIT, GO, HELLO, LOST, OUT, SIGNAL, Desk
from shoal_tools.launch.processes import KILL_AFTER_S, Interrupts, Lines, check
from shoal_tools.launch.task_holder import PYTHON, TaskOrder, task_of

_KILLED, _ENDED = 137, 143  # exit codes of ranks that were lost, and that were ended: 128 + signal


@final
class Spark(Launcher):
    """Runs a job's ranks on the executors of a Spark cluster, a task each.

    A job's `master` says which, as `spark://host:7077`. Without one it is that of the program's own
    session, or of Spark's settings, or this machine. Shoal must be installed on every executor.
    """

    name: ClassVar[str] = "spark"

    def missing(self) -> str | None:
        """Name the part of Spark that this machine lacks; None if it has all."""
        return missing_spark()

    def room(self, master: str) -> int:
        """Return the number of tasks that the cluster runs at once."""
        with session(master, "shoal") as spark:
            return waited_slots(spark)

    def launch(self, job: Job) -> Result:
        """Run the job to its end.

        Raises:
            UsageError: the job cannot start: Spark is not installed, or there are too few cores.
            WorldError: the master cannot be reached, or Spark gave the stage up.
            KeyboardInterrupt: after Ctrl-C, when nothing is left.
        """
        check(job)
        files = _read(job.files)
        # Spark takes Ctrl-C for itself, as a session begins
        with session(job.master, "shoal") as spark, Interrupts() as interrupts:
            said = f"ranks={job.ranks}"
            check_slots(spark, job.ranks, said)
            settings = spark.sparkContext.getConf()
            host, token = settings.get("spark.driver.host"), token_of(job)
            with Desk(settings.get("spark.driver.bindAddress", host), token, job.ranks) as desk:
                python = {sys.executable: PYTHON}
                command = tuple(python.get(word, word) for word in job.command)
                environment = {"COLUMNS": str(_columns()), **job.roles, **job.environment}
                order = TaskOrder(
                    command, environment, files, str(Path.cwd()), (host, desk.port), token
                )
                return _RankTasks(job, desk, interrupts, BarrierStage(spark, job.ranks)).run(
                    spark, order
                )


class _RankTasks:
    """All ranks of one launch, as the driver hears of them."""

    def __init__(self, job: Job, desk: Desk, interrupts: Interrupts, stage: BarrierStage) -> None:
        self._job, self._desk, self._interrupts = job, desk, interrupts
        self._stage = stage
        self._codes: dict[int, int] = {}
        self._first: int | None = None
        self._executors: dict[int, str] = {}  # executors in words, by the ranks that have come
        self._hosts: list[str] = []
        self._lines: dict[tuple[int, bytes], Lines] = {}
        # still to be sent to all: (when, signal); behind the last one the stage is cancelled
        self._ending: list[tuple[float, int]] = []
        self._obeyed = 0  # how many interrupts have been acted on

    def run(self, spark: Any, order: TaskOrder) -> Result:
        """Start the stage, and be here until it has ended."""
        stage, failed, ranks = self._stage, list[Exception](), range(self._job.ranks)
        seats = spark.sparkContext.parallelize(ranks, self._job.ranks).barrier()
        action = seats.mapPartitions(task_of(order)).collect

        def work() -> None:
            try:
                stage.run(action)
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=work, name="shoal stage", daemon=True)
        thread.start()
        try:
            while thread.is_alive() or self._turn(0.0):
                self._turn(0.1)
            deadline = time.monotonic() + KILL_AFTER_S  # Spark may know of a loss before the desk
            while failed and self._is_waiting() and time.monotonic() < deadline:
                self._turn(0.1)
        finally:
            if thread.is_alive():
                self._send(signal.SIGKILL)
                stage.cancel()
                thread.join(KILL_AFTER_S)
            for lines in self._lines.values():
                lines.end()
        if self._first is None and failed and not self._interrupts.received:
            raise failed[0]
        left = _ENDED if failed or self._first is not None else 0
        return Result(tuple(self._codes.get(rank, left) for rank in ranks), self._first)

    def _is_waiting(self) -> bool:
        """Return whether ranks that have come have not ended."""
        return self._first is None and len(self._executors) == self._job.ranks

    def _turn(self, within_s: float) -> bool:
        """Wait for a message, and act on it. Return whether a rank has sent one."""
        said = self._desk.next(within_s)
        if said is not None:
            self._hear(said.rank, said.kind, said.data)
        if len(self._interrupts.received) > self._obeyed:
            self._pass_on(self._interrupts.received[-1], again=self._obeyed > 0)
            self._obeyed = len(self._interrupts.received)
        while self._ending and self._ending[0][0] <= time.monotonic():
            self._send(self._ending.pop(0)[1])
            if not self._ending:
                self._stage.cancel()
        return said is not None

    def _hear(self, rank: int, kind: bytes, data: bytes) -> None:
        if kind in (OUT, ERR):
            self._lines[rank, kind].feed(data)
        elif kind == HELLO:
            self._wait_for_flight(rank, *data.decode(errors="replace").split(" ", 1))
        elif kind == EXIT:
            code = int(data)
            how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
            self._note_end(rank, code if code >= 0 else 128 - code, how)
        elif kind == LOST and rank not in self._codes:
            self._note_end(rank, _KILLED, "nothing more is heard of its executor")

    def _wait_for_flight(self, rank: int, host: str, executor: str) -> None:
        self._executors[rank] = executor
        self._hosts.append(host)
        for kind, sink in ((OUT, sys.stdout), (ERR, sys.stderr)):
            self._lines[rank, kind] = Lines(self._job.label(rank), sink)
        if len(self._executors) == self._job.ranks:
            self._check_hosts()
            for each in self._executors:
                self._desk.tell(each, GO)

    def _check_hosts(self) -> None:
        """Raise UsageError if hosts have another number of ranks than the job asks for."""
        hosts = [
            words.partition("host ")[2].partition(",")[0] for words in self._executors.values()
        ]
        there = {host: hosts.count(host) for host in sorted(hosts)}
        asked = self._job.ranks_per_host
        if asked is not None and any(number != asked for number in there.values()):
            raise UsageError(
                "Spark has put ranks on hosts otherwise",
                got=", ".join(f"{number} on {host}" for host, number in there.items()),
                expected=f"{asked} on each of {self._job.hosts} hosts",
                do="give every executor as many cores as ranks: spark.executor.cores, and "
                "spark.task.cpus for what one rank takes",
            )

    def _note_end(self, rank: int, code: int, how: str) -> None:
        self._codes[rank] = code
        if code == 0 or self._first is not None:
            return
        self._first = rank
        if not self._interrupts.received:
            _say(f"{self._executors[rank]}: ended first ({how})")
            if len(self._codes) < self._job.ranks:
                _say(f"the others have {self._job.grace_s:g} s to end")
                self._end_after(self._job.grace_s, signal.SIGTERM)

    def _pass_on(self, number: int, *, again: bool) -> None:
        """Tell the ranks of an interrupt, and leave them time to save and end."""
        if again or len(self._executors) < self._job.ranks:  # they have not begun
            self._end_after(0.0, signal.SIGKILL)
            return
        name, grace = signal.Signals(number).name, f"{self._job.grace_s:g} s"
        _say(f"{name}: ranks may save and end within {grace}; {name} again ends them now")
        self._send(number)
        at = time.monotonic() + self._job.grace_s
        self._ending = [(at, signal.SIGKILL), (at + KILL_AFTER_S, signal.SIGKILL)]

    def _end_after(self, delay_s: float, number: int) -> None:
        at = time.monotonic() + delay_s
        self._ending = [(at, number), (at + KILL_AFTER_S, signal.SIGKILL)]

    def _send(self, number: int) -> None:
        for rank in self._executors:
            if rank not in self._codes:
                self._desk.tell(rank, SIGNAL + str(int(number)).encode())


def _read(paths: tuple[Path, ...]) -> Mapping[str, bytes]:
    """Return the contents of files to send, by path."""
    by_name: dict[str, Path] = {}
    for path in paths:
        if (other := by_name.setdefault(path.name, path)) != path:
            raise UsageError(
                "two files that are sent have one name, and they go into one folder",
                got=f"{other} and {path}",
                do="give one of them another name",
            )
    try:
        return {str(path): read_bytes(path) for path in paths}
    except OSError as error:
        raise UsageError("a file that ranks need cannot be read", got=str(error)) from error


def _columns() -> int:
    """Return the width for a rank's line, after its label."""
    return shutil.get_terminal_size().columns - len("[rank 0] ")


def _say(message: str) -> None:
    print(f"shoal: {message}", file=sys.stderr, flush=True)
