"""Finds out where a layer's output goes: into a loss, or to one other layer.

If a linear layer's output goes into a cross entropy and nowhere else, the loss can be computed on
the cut output. If it goes to one other linear layer, with element-wise work between, the output can
stay cut until there. A trial finds this whatever modules stand between: one forward on a lone rank
in which every linear layer returns the output that a cut layer would return
(tensors/cut_output.py). These outputs report each use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.threads import ThreadComm
from shoal.contracts.probe import Trial
from shoal.profiling.row_layers import rowwise
from shoal.profiling.weight_use import WeightUse, own_forward, weight_uses
from shoal.tensors.boundary import CallRows
from shoal.tensors.cut_output import CutOutput
from shoal.tensors.functions_of_cut import Use
from shoal.tensors.weight_products import Product, Products


@dataclass(frozen=True)
class Ends:
    """Uses of layers' outputs, by the layer's name, as one forward showed them."""

    # linear layers with an output that goes into a loss and need not be gathered
    losses: dict[str, list[Use]]
    # linear layers, with the one layer that takes all of their output and has no other input
    feeds: dict[str, str]

    @classmethod
    def of(cls, trial: Trial) -> Ends:
        """Run the sample forward and note the uses."""
        by_outputs = trial.once(rowwise)
        uses: dict[str, list[Use]] = {}
        # layers that produced the inputs of a linear layer, by its name
        sources: dict[str, list[str]] = {}

        def take(name: str) -> Any:
            def enter(module: nn.Module, args: Any) -> Any:
                first_input = args[0] if args else None
                if isinstance(first_input, CutOutput):
                    found = first_input.taken_by(name, (first_input.shape[-1],))
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
                module, use = layer.module, weight_uses(trial)[layer.name]
                leave = cut(layer.name) if isinstance(module, nn.Linear) else None
                if type(module) is nn.Linear:
                    hooks.callback(module.register_forward_pre_hook(take(layer.name)).remove)
                elif use.served:  # inside its own forward
                    leaves = None if by_outputs[layer.name] else cut(layer.name)
                    ends = partial(_EndsOfCall, module, use, take(layer.name), leaves)
                    hooks.enter_context(own_forward(module, _calling(ends)))
                if leave is not None and by_outputs[layer.name]:
                    hooks.callback(module.register_forward_hook(leave).remove)
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


@final
class _EndsOfCall(Products):
    """Follows one call of a layer that multiplies inside its own forward."""

    def __init__(
        self,
        module: nn.Module,
        use: WeightUse,
        take: Callable[[nn.Module, Any], Any],
        leave: Callable[[nn.Module, Any, Tensor], Tensor] | None,
    ) -> None:
        weight = module._parameters[use.weight]
        assert weight is not None
        super().__init__(weight, module._parameters.get(use.bias), use.turned, use.adds_late)
        self._module, self._take, self._leave = module, take, leave

    def multiply(self, product: Product, plain: Callable[[], Any]) -> Any:
        taken = self._take(self._module, (product.x,))
        x = product.x if taken is None else taken[0]
        output = F.linear(x, self.weight if not product.turned else self.weight.t(), self.bias)
        return output if self._leave is None else self._leave(self._module, (x,), output)


def _calling(ends: Callable[[], Products]) -> Callable[..., Any]:
    """Return a replacement for a layer's own forward. Each call gets a new watcher."""
    return lambda forward, *args, **kwargs: ends().run(forward, args, kwargs)
