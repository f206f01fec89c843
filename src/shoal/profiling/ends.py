"""What comes to the first layers and becomes of the last: different ids that embeddings look up, and rows in a loss.

A linear layer whose output goes into a cross entropy and nowhere else can have its loss computed cut. Found by trying:
one forward in which every linear layer's output is what a cut layer would give (comm/logits.py), on a lone rank; logits
tell what is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.boundary import Rows
from shoal.comm.logits import CutLogits
from shoal.comm.threads import ThreadComm
from shoal.profiling.identity import Layer
from shoal.profiling.sample import Sample, tensors_in


@dataclass(frozen=True)
class Ends:
    """By layer, what one forward showed."""

    distinct: dict[str, int]  # of each call of an embedding the different ids, added up
    loss_rows: dict[str, int]  # of linear layers none of whose output would have to be gathered

    @classmethod
    def of(cls, sample: Sample, layers: Sequence[Layer]) -> Ends:
        """Run the sample forward."""
        distinct: dict[str, int] = {}
        told: dict[str, list[int]] = {}

        def count(name: str) -> Any:
            def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
                ids = next(tensors_in((args, kwargs)))
                distinct[name] = distinct.get(name, 0) + len(ids.unique())

            return enter

        def cut(name: str) -> Any:
            def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor:
                part = output.reshape(-1, output.shape[-1])
                numbers = torch.arange(len(part), device=part.device).view(output.shape[:-1])
                rows = Rows(ThreadComm(), (len(part),))
                return CutLogits.of(part, rows, (part.shape[1],), numbers, tell=told.setdefault(name, []).append)

            return leave

        with ExitStack() as hooks:
            for layer in layers:
                if type(layer.module) is nn.Embedding:
                    hook = layer.module.register_forward_pre_hook(count(layer.name), with_kwargs=True)
                    hooks.callback(hook.remove)
                elif type(layer.module) is nn.Linear:
                    hooks.callback(layer.module.register_forward_hook(cut(layer.name)).remove)
            try:
                sample.loss()
            except Exception:  # the model or the loss looks deeper into tensors than these go
                told.clear()
        return cls(distinct, {name: sum(rows) for name, rows in told.items() if rows and all(rows)})
