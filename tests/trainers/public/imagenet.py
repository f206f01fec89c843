"""Lightning's imagenet: a batch size divided by the processes, metrics, a best checkpoint."""

from typing import Any

import torch
import torch.nn.functional as F
import torch.optim as optim
import torch.optim.lr_scheduler as lr_scheduler
from made import ConvNet, Images, Mixed
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.strategies import ParallelStrategy
from torchmetrics import Accuracy

from shoal.integrations.lightning import ShoalStrategy  # shoal


class ImageNetLightningModel(LightningModule):
    """A convolutional net, its rows and its metrics."""

    def __init__(self, lr: float = 0.1, momentum: float = 0.9, batch_size: int = 8) -> None:
        super().__init__()
        self.lr, self.momentum, self.batch_size = lr, momentum, batch_size
        self.model = ConvNet()
        self.train_dataset: Any = None
        self.eval_dataset: Any = None
        self.train_acc1 = Accuracy(task="multiclass", num_classes=5, top_k=1)
        self.eval_acc1 = Accuracy(task="multiclass", num_classes=5, top_k=1)

    def forward(self, x: Any) -> Any:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, target = batch
        output = self.model(images)
        loss_train = F.cross_entropy(output, target)
        self.log("train_loss", loss_train)
        self.train_acc1(output, target)
        self.log("train_acc1", self.train_acc1, prog_bar=True, on_epoch=True)
        return loss_train

    def eval_step(self, batch: Any, batch_idx: int, prefix: str) -> Any:
        images, target = batch
        output = self.model(images)
        loss_val = F.cross_entropy(output, target)
        self.log(f"{prefix}_loss", loss_val, sync_dist=True)
        self.eval_acc1(output, target)
        self.log(f"{prefix}_acc1", self.eval_acc1, prog_bar=True)
        return loss_val

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.eval_step(batch, batch_idx, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.eval_step(batch, batch_idx, "test")

    def configure_optimizers(self) -> Any:
        optimizer = optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1**epoch)
        return [optimizer], [scheduler]

    def setup(self, stage: str) -> None:
        if isinstance(self.trainer.strategy, ParallelStrategy):
            num_processes = max(1, self.trainer.strategy.num_processes)
            self.batch_size = int(self.batch_size / num_processes)
        if stage == "fit":
            self.train_dataset = Images(35, 5)
        self.eval_dataset = Images(14, 6)

    def train_dataloader(self) -> Any:
        rows = self.train_dataset
        return torch.utils.data.DataLoader(rows, batch_size=self.batch_size, sampler=Mixed(rows))

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.eval_dataset, batch_size=self.batch_size)

    def test_dataloader(self) -> Any:
        return self.val_dataloader()


def main(args: Any) -> Any:
    cli = LightningCLI(
        ImageNetLightningModel,
        trainer_defaults={
            "sync_batchnorm": True,
            "callbacks": [ModelCheckpoint(monitor="val_acc1", mode="max", save_weights_only=True)],
            "strategy": ShoalStrategy(),  # shoal
            **args.own,
        },
        seed_everything_default=42,
        save_config_kwargs={"overwrite": True},
        args=["fit"],
    )
    found = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    return cli.model, {name: found[name] for name in ("train_acc1_epoch", "val_acc1", "val_loss")}
