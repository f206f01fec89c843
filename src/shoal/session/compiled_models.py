"""Models that `torch.compile` has had before `parallelize`: they run uncompiled while it works.

Everything compiled keeps its options, so that the next call compiles it anew. Code that was
compiled before is dropped, because it has no guards on hooks.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import final

import torch
from torch import nn


def without_compilation(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` was given; any other module itself."""
    while isinstance(original := vars(model).get("_modules", {}).get("_orig_mod"), nn.Module):
        model = original
    return model


@final
class _Uncompiled:
    """A context in which everything runs uncompiled. Ranks that are threads share torch's state."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._stance = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                torch.compiler.reset()
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._stance.close()


all_uncompiled = _Uncompiled()
