"""A Spark cluster as its driver sees it: its session, its slots for tasks, and its lost executors.

Spark waits although it could report a fault: a minute for a master that does not exist, and without
an end for the cores of a barrier stage. The functions here report these faults within seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from shoal.contracts.versions import install_shoal
from shoal.core.errors import UsageError, WorldError

T = TypeVar("T")

_CONNECT_S = 10.0  # seconds to connect to a master
_OF_OTHERS = ("local", "yarn", "k8s://")  # masters that are not Spark's own
_SLOTS_WAIT_S = 20.0  # seconds to wait for executors that are still starting
_SETTLED_S = 4.0  # without a new one
_AGAIN_S = 30.0  # seconds to wait for an executor in the place of one that has left
_LOOK_S = 1.0


def missing_spark() -> str | None:
    """Name the part of Spark that this machine lacks; None if it has all."""
    if importlib.util.find_spec("pyspark") is None:
        return f"pyspark is not installed: {install_shoal('spark')}"
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java") is None and not (home and shutil.which(f"{home}/bin/java")):
        return (
            "there is no Java: install 17 or newer, as with apt-get install "
            "openjdk-17-jre-headless, or set JAVA_HOME"
        )
    return None


@contextmanager
def session(master: str = "", name: str = "shoal") -> Iterator[Any]:
    """Yield a session on the cluster: the program's own, or a new one for this block.

    Executors use this Python, if `PYSPARK_PYTHON` names no other.

    Args:
        master: its URL, as spark://head:7077; by default the master of Spark's own settings.
        name: of the application.

    Raises:
        UsageError: Spark is not installed, or its session is on another cluster.
        WorldError: no master answers.
    """
    if (lacks := missing_spark()) is not None:
        raise UsageError("Spark cannot be used on this machine", got=lacks, do="install it here")
    if (own := _own_session()) is not None:
        if master not in ("", own.sparkContext.master):
            raise UsageError(
                "this program has a session of another cluster",
                got=own.sparkContext.master,
                expected=master,
                do="stop that session first, or leave the master out",
            )
        yield own
        return
    reach(master)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = importlib.import_module("pyspark.sql").SparkSession.builder
    builder = builder.appName(name).config("spark.ui.showConsoleProgress", "false")
    try:
        opened = (builder.master(master) if master else builder).getOrCreate()
    except Exception as error:
        raise WorldError(
            "Spark gave no session",
            where=master or "the master of Spark's own settings",
            got=_first_line(error),
            do="look whether the master is right, and lets this machine in: spark://host:7077",
        ) from error
    try:
        yield opened
    finally:
        opened.stop()


def _own_session() -> Any:
    return importlib.import_module("pyspark.sql").SparkSession.getActiveSession()


def reach(master: str) -> None:
    """Connect to a stand-alone master: Spark itself would try for a minute.

    Raises:
        UsageError: it is written otherwise than a master is.
        WorldError: no master answers.
    """
    if master.startswith(_OF_OTHERS) or not master:
        return
    problems = []
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        if not (master.startswith("spark://") and host and port.isdecimal()):
            raise UsageError(
                "that is no master",
                got=master,
                expected="as spark://host:7077, yarn, k8s://… or local[2]",
                do="write the host and the port that the master listens at",
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            return
        except (OSError, OverflowError) as error:
            problems.append(f"{place}: {error}")
    raise WorldError(
        "the master of the Spark cluster cannot be reached",
        where=master,
        got="; ".join(problems),
        do="look whether it runs, and at its port: its page on port 8080 says the URL",
    )


def slots(spark: Any) -> int:
    """Return the number of tasks that the executors can run at once."""
    java = spark.sparkContext._jsc.sc()
    return int(java.maxNumConcurrentTasks(java.resourceProfileManager().defaultResourceProfile()))


def waited_slots(spark: Any) -> int:
    """Return the number of slots, once no more executors come."""
    deadline, found, since = time.monotonic() + _SLOTS_WAIT_S, 0, time.monotonic()
    while time.monotonic() < deadline and (not found or time.monotonic() - since < _SETTLED_S):
        if (now := slots(spark)) != found:
            found, since = now, time.monotonic()
        time.sleep(0.2)
    return found


def check_slots(spark: Any, num_tasks: int, said: str) -> None:
    """Wait some seconds for executors that are still starting.

    Args:
        spark: the session.
        num_tasks: number of tasks of the barrier stage.
        said: the user's own words, as "num_ranks=4".

    Raises:
        UsageError: the cluster cannot run as many tasks at once.
    """
    context = spark.sparkContext
    deadline = time.monotonic() + _SLOTS_WAIT_S
    while (there := slots(spark)) < num_tasks:
        if time.monotonic() > deadline or context.master.startswith("local"):
            raise UsageError(
                "there are more ranks than tasks that the cluster can run at once",
                where=f"Spark at {context.master}",
                got=f"{said}, {there} free for tasks of "
                f"{context.getConf().get('spark.task.cpus', '1')} cores",
                do=f"ask for {max(there, 1)} in all; or more executors, or more cores for each",
            )
        time.sleep(0.5)


class BarrierStage:
    """One action on a barrier stage, watched: executors that leave are named, and none is waited
    for without an end.
    """

    def __init__(self, spark: Any, num_tasks: int) -> None:
        self._spark, self._num_tasks = spark, num_tasks
        self._tag = f"shoal-{uuid.uuid4().hex}"
        self._ended = threading.Event()
        self.left: list[str] = []  # executors that were there, as host:port
        self._is_given_up = False

    def run(self, action: Callable[[], T]) -> T:
        """Run the action, and return its result.

        Raises:
            WorldError: Spark gave it up, or too few executors are there.
        """
        context = self._spark.sparkContext
        context.addJobTag(self._tag)
        watching = threading.Thread(target=self._watch, name="shoal watch", daemon=True)
        watching.start()
        try:
            return action()
        except Exception as error:
            module = type(error).__module__
            if "pyspark" not in module and "py4j" not in module:
                raise
            raise self._tell_error(error) from error
        finally:
            self._ended.set()
            watching.join()
            with suppress(Exception):  # the context may be stopped
                context.removeJobTag(self._tag)

    def cancel(self) -> None:
        """End the tasks of the stage."""
        with suppress(Exception):  # the context may be stopped
            self._spark.sparkContext.cancelJobsWithTag(self._tag)

    def _watch(self) -> None:
        known, short = set[str](), 0.0
        while not self._ended.wait(_LOOK_S):
            try:
                there, room = _executors(self._spark), slots(self._spark)
            except Exception:  # the context is being stopped
                return
            for name in sorted(known - there):
                self.left.append(name)
                _say(f"the executor at {name} has left")
            known = there
            short = short + _LOOK_S if self.left and room < self._num_tasks else 0.0
            if short > _AGAIN_S:
                self._is_given_up = True
                self.cancel()
                return

    def _tell_error(self, error: Exception) -> WorldError:
        if self._is_given_up:
            return WorldError(
                "an executor has left, and none has come in its place",
                where=f"executor at {', '.join(self.left)}",
                got=f"room for {slots(self._spark)} tasks, {self._num_tasks} are needed",
                do="start a worker there again, and then the same run; or ask for fewer ranks",
            )
        return WorldError(
            "Spark gave the stage up",
            where=f"executor at {', '.join(self.left)}, which has left" if self.left else "",
            got=_first_line(error),
            do="look at the executors' stderr; Spark's own words are above. Where a module is "
            f"missing there: on every executor, {install_shoal('spark')}. Let PYSPARK_PYTHON name "
            "that Python before the session starts",
        )


def _executors(spark: Any) -> set[str]:
    """Return the addresses of the executors, as host:port. The driver is one of them."""
    names = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().keys().toSeq().mkString(" ")
    return set(names.split())


def _first_line(error: Exception) -> str:
    """Return the line with an executor's Python error, or else Java's, or else the first line."""
    lines = [line.strip(" :") for line in str(error).splitlines()]
    for kind in ("(Error|Lost)", "Exception"):
        for line in lines:
            if re.match(rf"[\w.]*{kind}: ", line):
                return line[:300]
    return (lines or [type(error).__name__])[0][:300]


def _say(message: str) -> None:
    print(f"shoal: {message}", file=sys.stderr, flush=True)
