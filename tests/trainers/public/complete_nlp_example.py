"""Accelerate's complete_nlp_example: checkpoints in mid-epoch, and a second start that goes on."""

import os
from types import SimpleNamespace
from typing import Any

import torch
from made import Metric, Pairs, bert_config, padded
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    BatchEncoding,
    get_linear_schedule_with_warmup,
    set_seed,
)

# author: from accelerate import Accelerator
from shoal.integrations.accelerate import ShoalAccelerator as Accelerator  # shoal

EVAL_BATCH_SIZE = 5


def training_function(config: Any, args: Any) -> Any:
    if args.with_tracking:
        accelerator = Accelerator(
            cpu=args.cpu, dataloader_config=args.split, project_dir=args.project_dir
        )
    else:
        accelerator = Accelerator(cpu=args.cpu, dataloader_config=args.split)
    checkpointing_steps = int(args.checkpointing_steps)
    lr, num_epochs, seed = config["lr"], config["num_epochs"], config["seed"]
    batch_size = config["batch_size"]
    if args.with_tracking:
        accelerator.init_trackers("run", config)
    metric = Metric()

    def collate_fn(examples: Any) -> Any:
        return BatchEncoding(padded(examples))

    set_seed(seed)
    train_dataloader = DataLoader(
        Pairs(35, 1), shuffle=True, collate_fn=collate_fn, batch_size=batch_size
    )
    eval_dataloader = DataLoader(
        Pairs(17, 2), shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE
    )
    model = AutoModelForSequenceClassification.from_config(bert_config()).double()
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=2, num_training_steps=30
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        path = os.path.basename(args.resume_from_checkpoint)
        training_difference = os.path.splitext(path)[0]
        resume_step = int(training_difference.replace("step_", ""))
        starting_epoch = resume_step // len(train_dataloader)
        resume_step -= starting_epoch * len(train_dataloader)

    found = []
    for epoch in range(starting_epoch, num_epochs):
        model.train()
        if args.with_tracking:
            total_loss = 0
        train_dataloader.set_epoch(epoch)
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        else:
            active_dataloader = train_dataloader
        for _step, batch in enumerate(active_dataloader):
            batch.to(accelerator.device)
            outputs = model(**batch)
            loss = outputs.loss
            if args.with_tracking:
                total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % checkpointing_steps == 0:
                output_dir = os.path.join(args.output_dir, f"step_{overall_step}")
                accelerator.save_state(output_dir)
                if args.stop_at == overall_step:
                    accelerator.free_memory()
                    return model, found

        model.eval()
        for _step, batch in enumerate(eval_dataloader):
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        eval_metric = metric.compute()
        accelerator.print(f"epoch {epoch}:", eval_metric)
        found.append(eval_metric)
        if args.with_tracking:
            accelerator.log(
                {"accuracy": eval_metric["accuracy"], "train_loss": total_loss, "epoch": epoch},
                step=epoch,
            )
    accelerator.end_training()
    return model, found


def main(args: Any) -> Any:
    config = {"lr": 2e-2, "num_epochs": 3, "seed": 42, "batch_size": 8}
    told = {"checkpointing_steps": "4", "with_tracking": True, "project_dir": args.folder}
    common = {**vars(args), **told, "output_dir": args.folder}
    training_function(config, SimpleNamespace(**common, resume_from_checkpoint=None, stop_at=8))
    last = os.path.join(args.folder, "step_8")
    return training_function(
        config, SimpleNamespace(**common, resume_from_checkpoint=last, stop_at=None)
    )
