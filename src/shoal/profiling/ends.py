"""What is done with what: different ids that embeddings look up; outputs that go into a loss, or to
one other layer.

A linear layer whose output goes into a cross entropy and nowhere else can have its loss computed
cut; one whose output goes to one other linear layer, with element-wise work between, can leave it
cut for that. Found by trying, whatever the modules between: one forward in which every linear
layer's output is what a cut layer would give (comm/cut_output.py), on a lone rank; outputs tell
what is done with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.boundary import Rows
from shoal.comm.cut_output import CutOutput, Use
from shoal.comm.threads import ThreadComm
from shoal.profiling.identity import Layer
from shoal.profiling.sample import Sample, tensors_in


@dataclass(frozen=True)
class Ends:
    """By layer, what one forward showed."""

    # of linear layers whose output goes into a loss and would not have to be gathered
    losses: dict[str, list[Use]]
    # of linear layers: the one that takes all of their output, and takes nothing else
    feeds: dict[str, str]

    @classmethod
    def of(cls, sample: Sample, layers: Sequence[Layer], rowwise: Mapping[str, bool]) -> Ends:
        """Run the sample forward; `rowwise` says which layers can be cut by outputs."""
        uses: dict[str, list[Use]] = {}
        taken: dict[str, list[str]] = {}  # by linear layer, whose output it was called with

        def take(name: str) -> Any:
            def enter(module: nn.Linear, args: Any) -> Any:
                given = args[0] if args else None
                if isinstance(given, CutOutput):
                    found = given.taken_by(name, (module.in_features,))
                    if found is not None:
                        return (found[1].view(given.shape), *args[1:])
                taken.setdefault(name, []).append("")
                return None

            return enter

        def cut(name: str) -> Any:
            def tell(use: Use) -> None:
                uses.setdefault(name, []).append(use)
                if use.layer:
                    taken.setdefault(use.layer, []).append(name)

            def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor:
                part = output.reshape(-1, output.shape[-1])
                numbers = torch.arange(len(part), device=part.device).view(output.shape[:-1])
                rows = Rows(ThreadComm(), (len(part),))
                return CutOutput.of(part, rows, (part.shape[1],), numbers, tell=tell)

            return leave

        with ExitStack() as hooks:
            for layer in layers:
                if type(layer.module) is nn.Linear:
                    hooks.callback(layer.module.register_forward_pre_hook(take(layer.name)).remove)
                if isinstance(layer.module, nn.Linear) and rowwise[layer.name]:
                    hooks.callback(layer.module.register_forward_hook(cut(layer.name)).remove)
            try:
                sample.loss()
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
            losses, {name: by for name, by in alone.items() if by and set(taken[by]) == {name}}
        )


@contextmanager
def ids_counted(layers: Sequence[Layer]) -> Iterator[dict[str, int]]:
    """Of each call of an embedding inside, the different ids, added up by layer."""
    distinct: dict[str, int] = {}

    def count(name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            ids = next(tensors_in((args, kwargs)))
            distinct[name] = distinct.get(name, 0) + len(ids.unique())

        return enter

    with ExitStack() as hooks:
        for layer in layers:
            if type(layer.module) is nn.Embedding:
                hook = layer.module.register_forward_pre_hook(count(layer.name), with_kwargs=True)
                hooks.callback(hook.remove)
        yield distinct
