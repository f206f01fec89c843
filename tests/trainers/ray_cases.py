"""Train by Ray Train on two workers. One of them dies once, and the others go on from a checkpoint.

python ray_cases.py FOLDER
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from contract import Net, Rows, compute_loss, optimizer_of
from torch.utils.data import DataLoader

import shoal

EPOCHS = 3


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
            dies = epoch == 1 and step == 2 and shoal.world().rank == 1
            if dies and len(starts.read_text().splitlines()) == 1:
                time.sleep(5)  # until Ray has noted the checkpoint of the epoch before
                os._exit(1)
        with tempfile.TemporaryDirectory() as folder:
            shoal.save(os.path.join(folder, "shoal"), **everything)
            kept = train.Checkpoint.from_directory(folder) if shoal.world().is_main else None
            train.report({"epoch": epoch}, checkpoint=kept)
    weights = model.state_dict()
    if shoal.world().is_main:
        torch.save(weights, Path(config["folder"], "weights.pt"))


def main(folder: Path) -> None:
    """Start Ray on this machine alone, train, and end all of its processes."""
    ray, train = import_module("ray"), import_module("ray.train")
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    try:
        result = (
            import_module("ray.train.torch")
            .TorchTrainer(
                trained,
                train_loop_config={"folder": str(folder), "pins": {"*": "sliced"}},
                scaling_config=train.ScalingConfig(num_workers=(2, 4)),
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


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]))
