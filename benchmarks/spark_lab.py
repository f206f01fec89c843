"""What Spark costs a recipe, and what DDP takes there: four hosts of a lab as Spark's workers.

    sudo .venv/bin/python benchmarks/spark_lab.py [--recipe examples/alexnet.py] [--rounds 4]
        [--steps 40] [--ddp-steps 15] [--out benchmarks/results/spark_lab.json]

A stand-alone master in the switch's namespace, a worker in each host's, all over links of 1 Gbit/s.
Three contenders take turns, with one plan, that of a first run:

    spark    the recipe under `--launcher spark`
    beside   the recipe under the lab's own launcher, while Spark is idle: a session holds executors
    ddp      torch's DDP on the same model and data, under Spark's TorchDistributor

A turn's figure is its median step. The ratios are of medians over turns, with the lowest and the
highest ratio of a round. Needs root, Java 17 and pyspark; takes about 15 minutes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shoal.contracts.launcher import Job
from shoal_tools.launch.lab import SWITCH_ADDRESS, Lab

HOSTS, PORT, PAGE = 4, 7077, 8080
MASTER = f"spark://{SWITCH_ADDRESS}:{PORT}"
HOME = Path(str(importlib.import_module("pyspark").__file__)).parent
SOURCE = Path(__file__).parents[1] / "src"
SMALL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
SUBMIT = (
    f"--master {MASTER} --driver-memory 512m --conf spark.driver.host={SWITCH_ADDRESS} "
    "--conf spark.executor.memory=512m --conf spark.executor.cores=1 --conf spark.ui.enabled=false "
    "--conf spark.executorEnv.GLOO_SOCKET_IFNAME=eth0 --conf spark.executorEnv.OMP_NUM_THREADS=1 "
    f"--conf spark.executor.extraJavaOptions='{SMALL}' pyspark-shell"
)
# a session that holds an executor on every host, until its input ends
IDLE = f"""
import sys, time
from pyspark.sql import SparkSession
from shoal_tools.launch.cluster import check_slots
spark = SparkSession.builder.getOrCreate()
check_slots(spark, {HOSTS}, "")
spark.sparkContext.parallelize(range(64), {HOSTS}).map(lambda i: i).sum()
print("idle", flush=True)
sys.stdin.read()
spark.stop()
"""
DISTRIBUTED = f"""
import sys
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession
from shoal_tools.launch.cluster import check_slots
spark = SparkSession.builder.getOrCreate()
check_slots(spark, {HOSTS}, "")
TorchDistributor(num_processes={HOSTS}, local_mode=False, use_gpu=False).run(*sys.argv[1:])
spark.stop()
"""
DDP = """
import pathlib, statistics, sys
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from shoal_tools.commands.run import timed_step
from shoal.data.sharded import ShardedLoader
from shoal.front.recipe import load

recipe, steps, out = load(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(recipe.model())
optimizer = recipe.optimizer(model.parameters())
batches = [recipe.batch(batch) for batch, _ in zip(recipe.data()[0], range(16))]
times = [
    timed_step(model, recipe.objective(), optimizer, batches[step % len(batches)])[0]
    for step in range(steps)
]
if distributed.get_rank() == 0:
    pathlib.Path(out).write_text(f"median step {statistics.median(times[2:]) * 1e3:.2f} ms")
distributed.destroy_process_group()
"""


def settings(address: str) -> dict[str, str]:
    """Variables of a process of Spark's on the host of this address."""
    return {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": address,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_DAEMON_JAVA_OPTS": SMALL,
        "PYSPARK_SUBMIT_ARGS": SUBMIT,
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def spark_in(lab: Lab, folder: Path) -> Iterator[None]:
    """A master, and a worker on each host."""
    *hosts, switch = lab.namespaces
    with ExitStack() as stack:
        size = ["--webui-port", str(PAGE), "--port", str(PORT)]
        daemon(stack, folder, switch, SWITCH_ADDRESS, "master.Master", size)
        for number, host in enumerate(hosts):
            size = ["--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"w{number}")]
            daemon(stack, folder, host, f"10.0.0.{number + 1}", "worker.Worker", [*size, MASTER])
        page = ["ip", "netns", "exec", switch, sys.executable, "-c", WORKERS]
        deadline = time.monotonic() + 300
        while subprocess.run(page, check=False).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError(f"workers did not come: see {folder}")
            time.sleep(1)
        yield


WORKERS = f"""
import sys, urllib.request
try:
    said = urllib.request.urlopen("http://{SWITCH_ADDRESS}:{PAGE}/json/", timeout=5).read()
except OSError:
    sys.exit(1)
sys.exit(b'"aliveworkers" : {HOSTS}' not in said)
"""


def daemon(
    stack: ExitStack, folder: Path, namespace: str, address: str, name: str, options: Sequence[str]
) -> None:
    """Start one of Spark's daemons in a namespace, until the stack is left."""
    command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]
    log = stack.enter_context((folder / f"{namespace}.log").open("ab"))
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, *command, "--host", address, *options],
        env={**settings(address), "SPARK_LOCAL_DIRS": str(folder / namespace)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)


def driver(lab: Lab, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in the switch's namespace, to its end."""
    command = ["ip", "netns", "exec", lab.namespaces[-1], sys.executable, *words]
    done = subprocess.run(
        command, env=settings(SWITCH_ADDRESS), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:4])} ended with {done.returncode}:\n{done.stderr}")
    return done


@contextmanager
def idle(lab: Lab) -> Iterator[None]:
    """Have a session that holds all executors, and does nothing."""
    command = ["ip", "netns", "exec", lab.namespaces[-1], sys.executable, "-c", IDLE]
    pipes: Mapping[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        command, env=settings(SWITCH_ADDRESS), stderr=subprocess.DEVNULL, text=True, **pipes
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        if process.stdout.readline().strip() != "idle":
            raise RuntimeError("the idle session did not start")
        yield
        process.stdin.close()
        process.wait()


def median_s(text: str) -> float:
    """The median step that a run has told of, in seconds."""
    found = re.search(r"median step ([\d.]+) (ms|s)", text)
    assert found, text
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


class Contenders:
    """One turn of each."""

    def __init__(self, lab: Lab, folder: Path, recipe: Path, steps: int, ddp_steps: int) -> None:
        self._lab, self._folder, self._recipe = lab, folder, str(recipe)
        self._plan, self._ddp_steps = folder / "plan.json", ddp_steps
        self._train = ["-m", "shoal", "train", self._recipe, "--steps", str(steps)]

    def first(self) -> None:
        """Plan, as the lab has it, and keep the plan for all."""
        words = ["-m", "shoal", "train", self._recipe, "--steps", "3"]
        self._in_lab([*words, "--save-plan", str(self._plan)])

    def spark(self) -> float:
        spark = ["--launcher", "spark", "--master", MASTER, "--ranks", str(HOSTS)]
        return median_s(driver(self._lab, [*self._train, *self._planned, *spark]).stdout)

    def beside(self) -> float:
        with idle(self._lab):
            return median_s(self._in_lab([*self._train, *self._planned]))

    def ddp(self) -> float:
        script, out = self._folder / "ddp.py", self._folder / "ddp.txt"
        script.write_text(DDP)
        words = [str(script), self._recipe, str(self._ddp_steps), str(out)]
        driver(self._lab, ["-c", DISTRIBUTED, *words])
        return median_s(out.read_text())

    @property
    def _planned(self) -> list[str]:
        return ["--plan", str(self._plan)]

    def _in_lab(self, words: Sequence[str]) -> str:
        """What ranks under the lab's launcher print."""
        out = self._folder / "lab.txt"
        write = f'exec "$@" >"{out}.$RANK"'
        path = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        job = Job(("sh", "-c", write, "sh", sys.executable, *words), HOSTS, path)
        result = self._lab.launch(job)
        if result.exit_code:
            raise RuntimeError(f"the recipe ended with {result.exit_code} in the lab")
        return Path(f"{out}.0").read_text()


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Of medians, and the lowest and highest of a round."""
    rounds = [a / b for a, b in zip(above, below, strict=False)]
    middle = statistics.median(above) / statistics.median(below)
    return {"ratio": middle, "lowest": min(rounds), "highest": max(rounds)}


def main() -> None:
    """Take turns, and write figures after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("examples/alexnet.py"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ddp-rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ddp-steps", type=int, default=15)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/spark_lab.json"))
    options = parser.parse_args()
    turns: dict[str, list[float]] = {"spark": [], "beside": [], "ddp": []}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-") as name, Lab(HOSTS, options.rate) as lab:
        folder, recipe = Path(name), options.recipe.resolve()
        with spark_in(lab, folder):
            contenders = Contenders(lab, folder, recipe, options.steps, options.ddp_steps)
            contenders.first()
            for number in range(options.rounds):
                order = ["spark", "beside"] if number % 2 == 0 else ["beside", "spark"]
                for what in [*order, *(["ddp"] if number < options.ddp_rounds else [])]:
                    turns[what].append(getattr(contenders, what)())
                    print(f"{what}: median step {turns[what][-1]:.3f} s", flush=True)
    figures = {
        "command": " ".join(sys.argv),
        "turns_s": turns,
        "pace under Spark ÷ beside it": ratio(turns["beside"], turns["spark"]),
        "DDP ÷ Shoal": ratio(turns["ddp"], turns["spark"]),
        "took_s": time.monotonic() - began,
    }
    options.out.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(figures, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
