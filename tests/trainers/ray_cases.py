"""Train by Ray Train on two workers, and go on from a checkpoint when something happens to them.

python ray_cases.py FOLDER dies     one of the two workers dies once
python ray_cases.py FOLDER grows    a node comes with room for a third worker, in mid-epoch
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from contract import Net, Rows, compute_loss, optimizer_of
from torch.utils.data import DataLoader

import shoal

EPOCHS = 3
STEP = 2  # of the second epoch: something happens in it
_WAIT_S = 240.0
_STORE_BYTES = 100 << 20  # memory of a node's object store


def trained(config: dict[str, Any]) -> None:
    """Train as in an ordinary script of Shoal, and report each epoch with a checkpoint."""
    train = import_module("ray.train")
    torch.set_num_threads(1)
    shoal.init()
    loader = shoal.shard(DataLoader(Rows(), batch_size=4), batch="global")
    model = Net()
    optimizer = optimizer_of(model)
    sample = next(iter(loader))
    model, loss_fn, optimizer = shoal.parallelize(
        model, None, optimizer, sample=sample, compute_loss=compute_loss, pins=config["pins"]
    )
    everything = {"model": model, "optimizer": optimizer, "loader": loader}
    starts = Path(config["folder"], "starts")
    if last := train.get_checkpoint():
        with last.as_directory() as folder:
            shoal.load(os.path.join(folder, "shoal"), **everything)
    if shoal.world().is_main:
        with starts.open("a") as file:
            file.write(f"{shoal.world().size} {loader.epoch}\n")
    for epoch in range(loader.epoch, EPOCHS):
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            if (epoch, step) == (1, STEP) and len(starts.read_text().splitlines()) == 1:
                happens(config, everything)
        report(epoch, everything)
    weights = model.state_dict()
    if shoal.world().is_main:
        torch.save(weights, Path(config["folder"], "weights.pt"))


def report(epoch: int, everything: dict[str, Any]) -> None:
    """Report an epoch, with a checkpoint that all ranks save and rank 0 writes."""
    train = import_module("ray.train")
    with tempfile.TemporaryDirectory() as folder:
        shoal.save(os.path.join(folder, "shoal"), **everything)
        kept = train.Checkpoint.from_directory(folder) if shoal.world().is_main else None
        train.report({"epoch": epoch}, checkpoint=kept)


def happens(config: dict[str, Any], everything: dict[str, Any]) -> None:
    """Die, or wait until Ray starts the loop anew on more workers."""
    if config["what"] == "dies":
        if shoal.world().rank == 1:
            time.sleep(5)  # until Ray has noted the checkpoint of the epoch before
            os._exit(1)
        return
    report(1, everything)
    if shoal.world().is_main:
        Path(config["folder"], "waits").touch()
    time.sleep(_WAIT_S)
    raise TimeoutError("Ray has not changed the number of workers")


def grow(address: str, folder: Path, nodes: list[subprocess.Popen[bytes]]) -> None:
    """Add a node with a core, once the workers wait for it.

    It is a process of its own, since Ray lets only the main thread start nodes.
    """
    while not (folder / "waits").exists():
        time.sleep(0.2)
    options = ["--num-cpus", "1", "--object-store-memory", str(_STORE_BYTES), "--block"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", address, *options]
    nodes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))


def main(folder: Path, what: str) -> None:
    """Start Ray on this machine alone, train, and end all of its processes."""
    ray, train = import_module("ray"), import_module("ray.train")
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    cluster = import_module("ray.cluster_utils").Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
        },
    )
    nodes: list[subprocess.Popen[bytes]] = []
    if what == "grows":
        given = cluster.address, folder, nodes
        threading.Thread(target=grow, args=given, daemon=True).start()
    try:
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
        )
        result = (
            import_module("ray.train.torch")
            .TorchTrainer(
                trained,
                train_loop_config={"folder": str(folder), "what": what, "pins": {"*": "sliced"}},
                scaling_config=train.ScalingConfig(
                    num_workers=(2, 4), elastic_resize_monitor_interval_s=2.0
                ),
                run_config=train.RunConfig(
                    storage_path=str(folder / "runs"),
                    failure_config=train.FailureConfig(max_failures=1),
                ),
            )
            .fit()
        )
        torch.save(result.metrics, folder / "metrics.pt")
    finally:
        ray.shutdown()
        for node in nodes:
            node.terminate()
            node.wait(timeout=60)
        cluster.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]), sys.argv[2])
