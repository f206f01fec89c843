"""Lightning's backbone_image_classifier: a command line, a data module, test and predict."""

from typing import Any

import torch
from made import Images
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.cli import LightningCLI
from torch.nn import functional as F
from torch.utils.data import DataLoader, random_split


class Backbone(torch.nn.Module):
    """A small classifier."""

    def __init__(self, hidden_dim: int = 16) -> None:
        super().__init__()
        self.l1 = torch.nn.Linear(3 * 8 * 8, hidden_dim)
        self.l2 = torch.nn.Linear(hidden_dim, 5)

    def forward(self, x: Any) -> Any:
        x = x.view(x.size(0), -1)
        x = torch.relu(self.l1(x))
        return self.l2(x)


class LitClassifier(LightningModule):
    """The classifier, and how it trains."""

    def __init__(self, backbone: Backbone | None = None, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["backbone"])
        if backbone is None:
            backbone = Backbone()
        self.backbone = backbone

    def forward(self, x: Any) -> Any:
        return self.backbone(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("valid_loss", loss, on_step=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("test_loss", loss, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> Any:
        x, _ = batch
        return self(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class MyDataModule(LightningDataModule):
    """Its rows."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.mnist_test = Images(9, 6)
        self.mnist_train, self.mnist_val = random_split(
            Images(45, 5), [35, 10], generator=torch.Generator().manual_seed(42)
        )
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(self.mnist_train, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.mnist_val, batch_size=self.batch_size)

    def test_dataloader(self) -> Any:
        return DataLoader(self.mnist_test, batch_size=self.batch_size)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.mnist_test, batch_size=self.batch_size)


def cli_main(args: Any) -> Any:
    cli = LightningCLI(
        LitClassifier,
        MyDataModule,
        seed_everything_default=1234,
        save_config_kwargs={"overwrite": True},
        run=False,
        args=args.command_line,
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    (tested,) = cli.trainer.test(ckpt_path="best", datamodule=cli.datamodule, verbose=False)
    predictions = cli.trainer.predict(ckpt_path="best", datamodule=cli.datamodule)
    return cli.model, {**tested, "count": len(predictions)}


def main(args: Any) -> Any:
    """Shoal changes a word of the command line, and no line here."""
    args.command_line = [
        "--trainer.max_epochs=2",
        "--trainer.accelerator=cpu",
        f"--trainer.devices={args.processes}",
        "--trainer.logger=false",
        f"--trainer.default_root_dir={args.folder}",
        "--trainer.enable_progress_bar=false",
        f"--data.batch_size={8 // args.processes}",
    ]
    if args.processes > 1:
        args.command_line += [
            "--trainer.strategy.class_path=shoal.integrations.lightning.ShoalStrategy"
        ]
    return cli_main(args)
