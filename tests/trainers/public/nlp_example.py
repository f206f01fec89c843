"""Accelerate's nlp_example: a model that returns its loss, windows by hand, metrics."""

from typing import Any

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

MAX_GPU_BATCH_SIZE = 8
EVAL_BATCH_SIZE = 5


def get_dataloaders(accelerator: Any, batch_size: int) -> Any:
    def collate_fn(examples: Any) -> Any:
        return BatchEncoding(padded(examples))

    train_dataloader = DataLoader(
        Pairs(48, 1), shuffle=True, collate_fn=collate_fn, batch_size=batch_size
    )
    eval_dataloader = DataLoader(
        Pairs(17, 2), shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE
    )
    return train_dataloader, eval_dataloader


def training_function(config: Any, args: Any) -> Any:
    accelerator = Accelerator(cpu=args.cpu, dataloader_config=args.order)
    lr, num_epochs, seed = config["lr"], config["num_epochs"], config["seed"]
    batch_size = config["batch_size"]
    metric = Metric()
    gradient_accumulation_steps = 1
    if batch_size > MAX_GPU_BATCH_SIZE // args.processes:
        gradient_accumulation_steps = batch_size * args.processes // MAX_GPU_BATCH_SIZE
        batch_size = MAX_GPU_BATCH_SIZE // args.processes
    set_seed(seed)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = AutoModelForSequenceClassification.from_config(bert_config()).double()
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=2 * args.processes,
        num_training_steps=(len(train_dataloader) * num_epochs) // gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    found = []
    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            outputs = model(**batch)
            loss = outputs.loss
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        for _step, batch in enumerate(eval_dataloader):
            batch.to(accelerator.device)
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
    batch_size = 16 // args.processes
    config = {"lr": 2e-2, "num_epochs": 3, "seed": 42, "batch_size": batch_size}
    return training_function(config, args)
