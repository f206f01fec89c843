"""Hugging Face's Trainer, with `ShoalTrainer`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from contract import GLOBAL_BATCH, Net, Rows, Task, Watch, compute_loss, optimizer_of
from contract import Host as AnyHost
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

import shoal
from shoal.integrations.transformers import ShoalMixin

SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Own(Trainer):
    """A trainer that computes the contract's loss, on the rows in their order."""

    def __init__(self, watch: Watch, task: Task, **options: Any) -> None:
        self.watch, self.task = watch, task
        super().__init__(**options)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return compute_loss(model, inputs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        self.watch.batch(model, inputs)
        loss = super().training_step(model, inputs, *args, **named)
        self.watch.backward(self.model)
        return loss

    def get_train_dataloader(self) -> Any:
        size = GLOBAL_BATCH // SIZE
        loader: Any = DataLoader(self.train_dataset, batch_size=size)
        if self.task.sharded and SIZE > 1:
            loader = shoal.shard(loader)
        return self.accelerator.prepare(loader)

    def _save(self, *args: Any, **named: Any) -> None:
        with noted(self.watch, Path(self.args.output_dir)):
            super()._save(*args, **named)

    def _save_optimizer_and_scheduler(self, *args: Any, **named: Any) -> None:
        with noted(self.watch, Path(self.args.output_dir)):
            super()._save_optimizer_and_scheduler(*args, **named)


class OwnOnRanks(ShoalMixin, Own):
    """The same trainer, on ranks."""


class AtEnd(TrainerCallback):
    """Notes the plan and the weights."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.watch.end(model, model)


class Host(AnyHost):
    """Hugging Face's Trainer. Alone it trains by itself."""

    def train(self, task: Task, folder: Path) -> Watch:
        watch = Watch()
        if task.stop_at is None:
            trainer_of(task, watch, folder).train()
            return watch
        trainer = trainer_of(task, watch, folder, max_steps=task.stop_at)
        trainer.train()
        trainer.accelerator.free_memory()
        last = folder / f"checkpoint-{task.stop_at}"
        trainer_of(task, watch, folder).train(resume_from_checkpoint=str(last))
        return watch

    def twice(self) -> str:
        trainer: Any = trainer_of(Task(), Watch(), Path(os.environ.get("TMPDIR", "/tmp")) / "twice")
        net = trainer.model
        shoal.parallelize(net, None, optimizer_of(net), compute_loss=compute_loss)
        try:
            trainer.train()
        except shoal.UsageError as error:
            return str(error)
        finally:
            shoal.unparallelize(net)
        return ""


def trainer_of(task: Task, watch: Watch, folder: Path, **limits: Any) -> Any:
    net = Net()
    options = {"pins": task.pins} if SIZE > 1 else {}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=task.epochs,
        per_device_train_batch_size=GLOBAL_BATCH // SIZE,
        gradient_accumulation_steps=task.accumulate,
        max_grad_norm=task.clip or 0.0,
        lr_scheduler_type="constant",
        save_strategy="steps" if limits else "no",
        save_steps=limits.get("max_steps", 500),
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **limits,
    )
    return (Own if SIZE == 1 else OwnOnRanks)(
        watch,
        task,
        model=net,
        args=arguments,
        train_dataset=Rows(),
        optimizers=(optimizer_of(net), None),
        callbacks=[AtEnd(watch)],
        **options,
    )


@contextmanager
def noted(watch: Watch, folder: Path) -> Iterator[None]:
    """Note which files this rank has written."""
    writes = torch.save

    def save(value: Any, path: Any, *args: Any, **named: Any) -> None:
        watch.files.append(str(path))
        writes(value, path, *args, **named)

    torch.save = save
    try:
        yield
    finally:
        torch.save = writes
