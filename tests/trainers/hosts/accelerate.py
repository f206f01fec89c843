"""Accelerate's loop, with `ShoalAccelerator`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from contract import GLOBAL_BATCH, Net, Rows, Task, Watch, compute_loss, optimizer_of
from contract import Host as AnyHost
from torch.utils.data import DataLoader

import shoal
from shoal.integrations.accelerate import ShoalAccelerator

SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Host(AnyHost):
    """Accelerate. Alone it trains by `Accelerator` itself."""

    def train(self, task: Task, folder: Path) -> Watch:
        watch = Watch()
        self._trained(task, watch, folder, going_on=False)
        if task.stop_at is not None:
            self._trained(task, watch, folder, going_on=True)
        return watch

    def _trained(self, task: Task, watch: Watch, folder: Path, *, going_on: bool) -> None:
        accelerator = accelerator_of(task)
        model = Net()
        loader: Any = DataLoader(Rows(), batch_size=GLOBAL_BATCH)
        if task.sharded and SIZE > 1:
            loader = shoal.shard(loader, batch="global")
        model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
        stop, first, skipped = task.stop_at, 0, 0
        if going_on and stop is not None:
            accelerator.load_state(folder / "state")
            first, skipped = divmod(stop, len(loader))
        steps = first * len(loader) + skipped
        for epoch in range(first, task.epochs):
            batches = loader
            if going_on and epoch == first:
                batches = accelerator.skip_first_batches(loader, skipped)
            for batch in batches:
                watch.batch(model, batch)
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(accelerator, task, model, batch))
                    watch.backward(accelerator.unwrap_model(model))
                    if accelerator.sync_gradients and task.clip is not None:
                        accelerator.clip_grad_norm_(model.parameters(), task.clip)
                    optimizer.step()
                    optimizer.zero_grad()
                steps += 1
                if steps == stop and not going_on:
                    before = set(files_of(folder))
                    accelerator.save_state(folder / "state")
                    if accelerator.is_main_process:
                        watch.files += sorted(set(files_of(folder)) - before)
                    return
        watch.end(model, accelerator.unwrap_model(model))
        accelerator.free_memory()

    def twice(self) -> str:
        accelerator = ShoalAccelerator(cpu=True)
        model = Net()
        optimizer = optimizer_of(model)
        shoal.parallelize(model, None, optimizer, compute_loss=compute_loss)
        try:
            accelerator.prepare(model, optimizer)
        except shoal.UsageError as error:
            return str(error)
        finally:
            shoal.unparallelize(model)
        return ""


def accelerator_of(task: Task) -> Any:
    options: dict[str, Any] = {
        "cpu": True,
        "gradient_accumulation_steps": task.accumulate,
        "dataloader_config": DataLoaderConfiguration(split_batches=True),
    }
    if SIZE == 1:
        return Accelerator(**options)
    if _knows_loss(task):
        options["compute_loss"] = compute_loss
    return ShoalAccelerator(pins=task.pins, **options)


def loss_of(accelerator: Any, task: Task, model: Any, batch: Any) -> Any:
    """Compute the loss in the loop itself, unless the plan must know it."""
    if SIZE > 1 and _knows_loss(task):
        return accelerator.compute_loss(model, batch)
    return compute_loss(model, batch)


def _knows_loss(task: Task) -> bool:
    return any(strategy in ("head", "pipeline") for strategy in (task.pins or {}).values())


def files_of(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file()]


torch.set_num_threads(1)
