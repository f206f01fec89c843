"""A model whose end runs on hosts of its own: its parameters, as a worker sees them.

To all but the layers they look whole (tensors/cut.py), and whatever is done with them is done by
all workers together. What goes on in a step: stage_output.py. Guarded by
tests/equivalence/test_stage.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from shoal.contracts.row_weights import UNWEIGHED, Weighing
from shoal.core.errors import UsageError
from shoal.core.names import pins
from shoal.remote.far_parameters import FarParameters
from shoal.remote.tail_hosts import (
    TailHosts,
    has_hooks,
    modes,
    modules_of,
    parameters_of,
    plain_settings,
)
from shoal.remote.tail_messages import Modes
from shoal.tensors.row_crossing import EXACT, RowCrossing


@dataclass(frozen=True)
class TailFeed:
    """The way in which a worker feeds its batches to the tail."""

    micro_batches: int  # that a batch is cut into
    crossing: RowCrossing = EXACT  # of activations and their gradients
    # every rank calls the body as often as the others, however few rows it has
    alike: bool = False


@final
class FarTail(FarParameters):
    """The tail of one model, as its workers have it.

    Args:
        hosts: the way to them.
        model: all of it.
        modules: those that make the tail, in the order in which they are called, by dotted name.
        loss_fn: what goes with it.
        feed: how batches go there.
    """

    hosts: TailHosts

    def __init__(
        self,
        hosts: TailHosts,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        loss_fn: Any,
        feed: TailFeed,
    ) -> None:
        super().__init__(hosts, parameters_of(modules))
        self.model, self.modules, self.feed = model, modules, feed
        self.weighs: Weighing = UNWEIGHED  # this rank's rows, once an engine says it
        self._modules = modules_of(modules.values(), loss_fn)
        self._settings = [plain_settings(module) for module in self._modules]
        self._runs = 0
        # that somebody has still
        self._alive: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.anchor = torch.zeros((), dtype=torch.float32, requires_grad=True, device="cpu")
        self.running: Any = None  # the forward that runs (stage_output.py)

    def begin(self, run: Any) -> tuple[int, Modes]:
        """A forward of the model begins: its number, and what is set."""
        for name, module in self.modules.items():
            hooked = next(
                (type(inner).__name__ for inner in module.modules() if has_hooks(inner)), None
            )
            if hooked is not None:
                raise UsageError(
                    f"a {hooked} has a hook, which would not be called, as it runs on tail hosts",
                    where=f"module {name}",
                    do=f"take it away, or give parallelize {pins(self.layers)}",
                )
        before, self._settings = (
            self._settings,
            [plain_settings(module) for module in self._modules],
        )
        changed = [
            None if old == new else new for old, new in zip(before, self._settings, strict=True)
        ]
        self._runs += 1
        self.running = run
        self._alive[run] = self._runs
        return self._runs, modes(self._modules, self.parameters.values(), changed)

    @property
    def layers(self) -> list[str]:
        """The layers whose parameters are at the tail."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.parameters))

    @property
    def oldest(self) -> int:
        """The number of the first run that somebody has still."""
        return min(self._alive.values(), default=self._runs)
