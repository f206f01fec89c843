"""The digits by Ray Train. Ray starts the workers; each runs an ordinary script of Shoal.

python examples/trainers/ray_digits.py      # 2 workers on this machine, without a GPU
"""

import os
import tempfile

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal


def train_loop_per_worker(config):
    shoal.init()
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), config["batch_size"])
    loader = shoal.shard(loader, batch="global")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sample = images[:32], torch.tensor(digits.target[:32])
    model, loss_fn, optimizer = shoal.parallelize(model, F.cross_entropy, optimizer, sample=sample)
    everything = {"model": model, "optimizer": optimizer, "loader": loader}
    if last := ray.train.get_checkpoint():
        with last.as_directory() as folder:
            shoal.load(os.path.join(folder, "shoal"), **everything)
    for epoch in range(loader.epoch, config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            shoal.save(os.path.join(folder, "shoal"), **everything)  # all ranks save, one writes
            is_main = shoal.world().is_main
            ray.train.report(
                {"epoch": epoch, "loss": shoal.mean(loss, weight=len(y)).item()},
                checkpoint=Checkpoint.from_directory(folder) if is_main else None,
            )


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"batch_size": 64, "epochs": 4},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=2)),
    )
    print(trainer.fit().metrics)
