"""Accelerate's cv_example: a frozen backbone with batch norm, a loss in the loop, OneCycleLR."""

from typing import Any

import torch
from accelerate.utils import set_seed
from made import ConvNet, Images
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

# author: from accelerate import Accelerator
from shoal.integrations.accelerate import ShoalAccelerator as Accelerator  # shoal


def training_function(config: Any, args: Any) -> Any:
    # author: accelerator = Accelerator(cpu=True, dataloader_config=args.split)
    accelerator = Accelerator(cpu=True, dataloader_config=args.split, sync_batchnorm=True)  # shoal
    lr, num_epochs, seed = config["lr"], config["num_epochs"], config["seed"]
    batch_size = config["batch_size"]
    set_seed(seed)
    train_dataset = Images(38, 3, ("image", "label"))
    eval_dataset = Images(13, 4, ("image", "label"))
    train_dataloader = DataLoader(train_dataset, shuffle=True, batch_size=batch_size, num_workers=0)
    eval_dataloader = DataLoader(eval_dataset, shuffle=False, batch_size=batch_size, num_workers=0)
    model = ConvNet()
    model = model.to(accelerator.device)
    for param in model.parameters():
        param.requires_grad = False
    for param in model.get_classifier().parameters():
        param.requires_grad = True
    mean = torch.tensor([0.1, 0.2, 0.3])[None, :, None, None].to(accelerator.device)
    std = torch.tensor([1.0, 2.0, 3.0])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=lr / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer,
        max_lr=lr,
        epochs=num_epochs,
        steps_per_epoch=len(train_dataloader),
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    found = []
    for epoch in range(num_epochs):
        model.train()
        for _step, batch in enumerate(train_dataloader):
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            inputs = (batch["image"] - mean) / std
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate, num_elems = 0, 0
        for _, batch in enumerate(eval_dataloader):
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            inputs = (batch["image"] - mean) / std
            with torch.no_grad():
                outputs = model(inputs)
            predictions = outputs.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        eval_metric = accurate.item() / num_elems
        accelerator.print(f"epoch {epoch}: {100 * eval_metric:.2f}")
        found.append({"accuracy": eval_metric, "count": num_elems})
    accelerator.end_training()
    return model, found


def main(args: Any) -> Any:
    config = {"lr": 3e-2, "num_epochs": 3, "seed": 42, "batch_size": 8}
    return training_function(config, args)
