"""Accelerate's loop on all ranks: one import is another one.

torchrun --nproc-per-node 2 examples/trainers/accelerate_loop.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shoal.integrations.accelerate import ShoalAccelerator as Accelerator  # the changed line


def main() -> None:
    """Train a small classifier on made-up rows, and evaluate it."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    made = torch.randn(512, 16)
    rows = TensorDataset(made, (made @ torch.randn(16, 4)).argmax(1))
    loader, valid = DataLoader(rows, batch_size=16, shuffle=True), DataLoader(rows, batch_size=32)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    model, optimizer, loader, valid, scheduler = accelerator.prepare(
        model, optimizer, loader, valid, scheduler
    )
    for _ in range(5):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    right = []
    with torch.no_grad():
        for x, y in valid:
            right.append(accelerator.gather_for_metrics((model(x).argmax(1) == y).float()))
    found = torch.cat(right)
    accelerator.print(f"accuracy {found.mean():.3f} of {len(found)} rows")
    accelerator.end_training()


if __name__ == "__main__":
    main()
