"""Loops of scripts with a compute_loss."""

from __future__ import annotations

from typing import Any

from one_process import Batch
from torch.nn.utils import clip_grad_norm_


def plain(model: Any, compute: Any, optimizer: Any, batches: list[Batch]) -> list[float]:
    """The ordinary loop with a compute_loss; returns the losses."""
    losses = []
    for each in batches:
        optimizer.zero_grad()
        loss = compute(model, each)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return losses


def clipped(model: Any, compute: Any, optimizer: Any, batches: list[Batch]) -> None:
    """Adds up the gradients of two batches, scales the losses, and clips."""
    for first in range(len(batches)):
        for each in (batches[first], batches[first - 1]):
            (compute(model, each) / 2).backward()
        assert clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
        optimizer.zero_grad()
