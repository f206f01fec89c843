"""What is done with a layer's output: it goes into a loss, or to one other layer.

A linear layer whose output goes into a cross entropy and nowhere else can have its loss computed
cut; one whose output goes to one other linear layer, with element-wise work between, can leave it
cut for that. Found by trying, whatever the modules between: one forward in which every linear
layer's output is what a cut layer would give (tensors/cut_output.py), on a lone rank; outputs tell
what is done with them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.threads import ThreadComm
from shoal.contracts.probe import Trial
from shoal.profiling.rowwise import rowwise
from shoal.tensors.boundary import CallRows
from shoal.tensors.cut_output import CutOutput
from shoal.tensors.functions_of_cut import Use


@dataclass(frozen=True)
class Ends:
    """By layer, what one forward showed."""

    # of linear layers whose output goes into a loss and would not have to be gathered
    losses: dict[str, list[Use]]
    # of linear layers: the one that takes all of their output, and takes nothing else
    feeds: dict[str, str]

    @classmethod
    def of(cls, trial: Trial) -> Ends:
        """Run the sample forward."""
        by_outputs = trial.once(rowwise)
        uses: dict[str, list[Use]] = {}
        sources: dict[str, list[str]] = {}  # by linear layer: whose outputs it was called with

        def take(name: str) -> Any:
            def enter(module: nn.Linear, args: Any) -> Any:
                first_input = args[0] if args else None
                if isinstance(first_input, CutOutput):
                    found = first_input.taken_by(name, (module.in_features,))
                    if found is not None:
                        return (found[1].view(first_input.shape), *args[1:])
                sources.setdefault(name, []).append("")
                return None

            return enter

        def cut(name: str) -> Any:
            def tell(use: Use) -> None:
                uses.setdefault(name, []).append(use)
                if use.layer:
                    sources.setdefault(use.layer, []).append(name)

            def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor:
                part = output.reshape(-1, output.shape[-1])
                numbers = torch.arange(len(part), device=part.device).view(output.shape[:-1])
                rows = CallRows(ThreadComm(), (len(part),))
                return CutOutput.of(part, rows, (part.shape[1],), numbers, tell=tell)

            return leave

        with ExitStack() as hooks:
            for layer in trial.layers:
                if type(layer.module) is nn.Linear:
                    hooks.callback(layer.module.register_forward_pre_hook(take(layer.name)).remove)
                if isinstance(layer.module, nn.Linear) and by_outputs[layer.name]:
                    hooks.callback(layer.module.register_forward_hook(cut(layer.name)).remove)
            try:
                trial.sample.loss()
            except Exception:  # the model or the loss looks deeper into tensors than these go
                uses.clear()
        losses = {
            name: own
            for name, own in uses.items()
            if any(use.loss_rows for use in own)
            and all(use.loss_rows or use.softmax_rows for use in own)
        }
        alone = {name: own[0].layer for name, own in uses.items() if len(set(own)) == 1}
        return cls(
            losses, {name: by for name, by in alone.items() if by and set(sources[by]) == {name}}
        )
