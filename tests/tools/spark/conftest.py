"""A Spark cluster of its own: a master and two workers on 127.0.0.1, ended with the session."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from free_ports import free_port

SOURCE = Path(__file__).parents[3] / "src"
CORES = (1, 2)  # of the two workers
_START_S = 100.0
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # to begin with: these programs are short


def lacking() -> str | None:
    """Why no cluster can be started here, or None."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed: `make test-spark` installs it"
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        return "there is no Java: install 17, as with apt-get install openjdk-17-jre-headless"
    return None


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of its master."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    with started(tmp_path_factory.mktemp("spark"), CORES) as (url, _):
        yield url


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A cluster of the test's own, of three workers with a core each: its URL, and the workers."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    with started(tmp_path, (1, 1, 1)) as cluster:
        yield cluster


@contextmanager
def started(
    folder: Path, worker_cores: Sequence[int]
) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A master and workers with so many cores, until the block is left."""
    port, page = free_port(), free_port()
    place = ["--host", "127.0.0.1", "--webui-port"]
    url = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        daemon(stack, folder, "master.Master", *place, str(page), "--port", str(port))
        workers = []
        for number, cores in enumerate(worker_cores):
            work = folder / f"worker{number}"
            size = ["--cores", str(cores), "--memory", "1g", "--work-dir", str(work)]
            options = [*place, str(free_port()), *size, url]
            workers.append(daemon(stack, folder, "worker.Worker", *options))
        wait_for_workers(page, len(workers), folder)
        yield url, workers


def daemon(stack: ExitStack, folder: Path, name: str, *options: str) -> subprocess.Popen[bytes]:
    """Start one of Spark's daemons, until the stack is left."""
    home = Path(importlib.import_module("pyspark").__file__).parent
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *options]
    settings = {"SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "256m", "SPARK_NO_DAEMONIZE": "1"}
    settings |= {"SPARK_DAEMON_JAVA_OPTS": QUICK, "SPARK_LAUNCHER_OPTS": QUICK}
    settings |= {"PYTHONPATH": str(SOURCE), "SPARK_LOCAL_DIRS": str(folder / "local")}
    log = stack.enter_context((folder / f"{name}.{len(options)}.log").open("ab"))
    process = subprocess.Popen(
        ("setpriv", "--pdeathsig", "KILL", *command),
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def wait_for_workers(page: int, num: int, folder: Path) -> None:
    """Until the master's page tells of so many."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{page}/json/", timeout=5) as answer:
                if f'"aliveworkers" : {num}' in answer.read().decode():
                    return
        except OSError:
            pass
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    raise TimeoutError(f"the cluster did not start within {_START_S:g} s:\n{logs}")


@pytest.fixture(scope="session")
def spark(cluster: str) -> Iterator[Any]:
    """A session whose executors hold all cores of the cluster."""
    builder = importlib.import_module("pyspark.sql").SparkSession.builder
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.driver.extraJavaOptions": QUICK,
        "spark.executor.extraJavaOptions": QUICK,
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "3",
        "spark.executorEnv.PYTHONPATH": str(SOURCE),
        "spark.executorEnv.OMP_NUM_THREADS": "1",
    }
    builder = builder.master(cluster).appName("shoal")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        session = builder.getOrCreate()
    yield session
    gateway = session.sparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # it ends with its input
    gateway.proc.wait()


@pytest.fixture
def no_rank_left(
    spark: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], None]]:
    """Looks, also at the end of the test, whether a rank of this cluster still runs."""
    folders = str(tmp_path_factory.getbasetemp()).encode()

    def look() -> None:
        deadline = time.monotonic() + 20.0
        while left := [line for line in commands() if b"spark.rank" in line and folders in line]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    yield look
    look()


def commands() -> Iterator[bytes]:
    """Of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            yield path.read_bytes()
