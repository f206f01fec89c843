"""Accelerate's by_feature/gradient_accumulation, with the older `no_sync` in place of a window."""

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


def training_function(config: Any, args: Any) -> Any:
    accelerator = Accelerator(cpu=args.cpu, dataloader_config=args.order)
    lr, num_epochs, seed = config["lr"], config["num_epochs"], config["seed"]
    batch_size, gradient_accumulation_steps = config["batch_size"], 2
    metric = Metric()

    def collate_fn(examples: Any) -> Any:
        return BatchEncoding(padded(examples))

    set_seed(seed)
    train_dataloader = DataLoader(
        Pairs(38, 1), shuffle=True, collate_fn=collate_fn, batch_size=batch_size
    )
    eval_dataloader = DataLoader(Pairs(17, 2), collate_fn=collate_fn, batch_size=5)
    model = AutoModelForSequenceClassification.from_config(bert_config()).double()
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=2 * args.processes,
        num_training_steps=config["steps"],
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    found = []
    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            if step % gradient_accumulation_steps != 0:
                with accelerator.no_sync(model):
                    output = model(**batch)
                    loss = output.loss / gradient_accumulation_steps
                    accelerator.backward(loss)
            else:
                output = model(**batch)
                loss = output.loss / gradient_accumulation_steps
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
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
    accelerator.end_training()
    return model, found


def main(args: Any) -> Any:
    config = {"lr": 2e-2, "num_epochs": 2, "seed": 42, "batch_size": 8 // args.processes}
    config["steps"] = 20 * args.processes
    return training_function(config, args)
