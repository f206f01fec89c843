"""The digits by Lightning's Trainer. The strategy is the one line that spreads it.

python examples/trainers/lightning_digits.py                          # alone
torchrun --nproc-per-node 2 examples/trainers/lightning_digits.py     # two processes
"""

import os

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shoal.integrations.lightning import ShoalStrategy


class Digits(pl.LightningModule):
    """A classifier of 8 by 8 pixels."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


pl.seed_everything(0)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
data = TensorDataset(images, labels)

trainer = pl.Trainer(
    strategy=ShoalStrategy(batch="global"),
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    accelerator="cpu",
    max_epochs=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Digits(), DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, 256))
if trainer.is_global_zero:
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})
