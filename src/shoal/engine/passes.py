"""Passes through the end of a model on one of its hosts, and the workers that they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Some rows of a pass, with their worker and micro-batch."""

    worker: int
    index: int
    rows: int
    back: bool  # its gradient goes to the worker
    coded: bool = False  # it came as a code, and its gradient is sent as a code, too


@dataclass
class TailPass:
    """Pass through the tail with one micro-batch of each of this host's workers, or with all of
    them.
    """

    blocks: list[Block]
    activation: Tensor
    put_out: Tensor

    def outputs(self, of: Tensor) -> list[tuple[Block, Tensor]]:
        """Return the blocks' parts of a tensor that has the output's rows."""
        more, less = len(self.put_out), max(len(self.activation), 1)
        return list(
            zip(
                self.blocks,
                of.split([block.rows * more // less for block in self.blocks]),
                strict=True,
            )
        )


@dataclass
class TailRun:
    """Forward of the model, with the rows of all of this host's workers."""

    of_gradients: bool  # whether a loss may follow
    # blocks that wait for others to join with
    waiting: list[tuple[Block, Tensor]] = field(default_factory=list)
    passes: list[TailPass] = field(default_factory=list)
    # output of each worker, apart from the tail's graph
    whole: dict[int, Tensor] = field(default_factory=dict)
    # losses of each worker, by number
    losses: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def alike(self) -> list[list[tuple[Block, Tensor]]]:
        """Return the waiting blocks, in groups that may go through the tail together. None waits
        afterwards.

        If a worker's micro-batches differ in shape, each goes alone. Otherwise they would change
        their order.
        """
        forms: dict[int, set[Any]] = {}
        for block, activation in self.waiting:
            forms.setdefault(block.worker, set()).add(_form(activation))
        by_index = any(len(sizes) > 1 for sizes in forms.values())
        groups: dict[Any, list[tuple[Block, Tensor]]] = {}
        for block, activation in self.waiting:
            key = block.index if by_index else 0, _form(activation)
            groups.setdefault(key, []).append((block, activation))
        self.waiting.clear()
        return list(groups.values())


def _form(activation: Tensor) -> tuple[torch.Size, torch.dtype]:
    return activation.shape[1:], activation.dtype
