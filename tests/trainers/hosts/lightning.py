"""Lightning's Trainer, with `ShoalStrategy`."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from contract import (
    GLOBAL_BATCH,
    Net,
    Rows,
    Task,
    Watch,
    compute_loss,
    optimizer_of,
)
from contract import Host as AnyHost
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

import shoal
from shoal.integrations.lightning import EpochLoader, ShoalStrategy

SIZE = int(os.environ.get("WORLD_SIZE", "1"))
QUIET = {
    "accelerator": "cpu",
    "devices": SIZE,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(pl.LightningModule):
    """The contract's net, with a log in each step."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.net, self.watch = Net(), watch

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = compute_loss(self, batch)  # a pipeline needs the module itself to be called
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.net)


class Watching(pl.Callback):
    """Tells the watch, and sees that only real batches are logged."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.watch.batch(module, batch)

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.watch.backward(module.net)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.watch.end(module, module.net)


class Noted(pl.plugins.io.TorchCheckpointIO):
    """Writes checkpoints, and notes which this rank has written."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def save_checkpoint(self, checkpoint: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        self.watch.files.append(str(path))
        super().save_checkpoint(checkpoint, path, *args, **kwargs)


def loader_of(size: int = GLOBAL_BATCH) -> Any:
    return DataLoader(Rows(), batch_size=size)


class Host(AnyHost):
    """Lightning."""

    def train(self, task: Task, folder: Path) -> Watch:
        watch = Watch()
        if task.stop_at is None:
            self._trained(task, watch, folder, None)
        else:
            self._trained(task, watch, folder, None, max_steps=task.stop_at)
            self._trained(task, watch, folder, folder / "half.ckpt")
        return watch

    def _trained(
        self, task: Task, watch: Watch, folder: Path, ckpt: Path | None, **limits: Any
    ) -> Any:
        strategy: Any = "auto"
        if SIZE > 1:
            strategy = ShoalStrategy(pins=task.pins, batch="global")
        loader = loader_of()
        if task.sharded and SIZE > 1:
            shoal.init()
            loader = shoal.shard(loader, batch="global")
        elif SIZE == 1:
            shoal.init()
            loader = shoal.shard(loader)  # so that it can go on in the middle of an epoch
            loader = EpochLoader(loader)
        saving = []
        if limits:
            steps = limits["max_steps"]
            saving = [ModelCheckpoint(folder, "half", every_n_train_steps=steps)]
        trainer = pl.Trainer(
            strategy=strategy,
            max_epochs=task.epochs,
            accumulate_grad_batches=task.accumulate,
            gradient_clip_val=task.clip,
            callbacks=[Watching(watch), *saving],
            plugins=[Noted(watch)],
            enable_checkpointing=bool(saving),
            **QUIET,
            **limits,
        )
        module = Module(watch)
        with quiet():
            trainer.fit(module, loader, ckpt_path=ckpt)
        return trainer

    def twice(self) -> str:
        module = Module(Watch())
        optimizer = optimizer_of(module)
        shoal.init()
        shoal.parallelize(module, None, optimizer, compute_loss=lambda m, b: m.training_step(b, 0))
        trainer = pl.Trainer(strategy=ShoalStrategy(), max_epochs=1, **QUIET)
        try:
            trainer.fit(module, loader_of())
        except shoal.UsageError as error:
            return str(error)
        return ""


@contextlib.contextmanager
def quiet() -> Any:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
