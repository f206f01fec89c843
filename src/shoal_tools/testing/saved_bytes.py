"""Counts the bytes that autograd keeps for backward, which are mostly activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor


@final
class SavedBytes:
    """Bytes that autograd keeps, without parameters. Memory that several tensors share counts once.

    Args:
        parameters: the parameters.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self.now, self.peak = 0, 0
        with torch._C.DisableTorchFunctionSubclass():
            self._apart = {p.untyped_storage().data_ptr() for p in parameters if p.numel()}
        self._users: dict[int, int] = {}  # number of kept tensors, by memory

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what autograd keeps of functions inside."""
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: _SavedTensor(self, t), _SavedTensor.give
        ):
            yield

    def keep(self, tensor: Tensor) -> None:
        """Count a tensor that is kept."""
        memory = tensor.untyped_storage()
        if (at := memory.data_ptr()) in self._apart:
            return
        self._users[at] = self._users.get(at, 0) + 1
        if self._users[at] == 1:
            self.now += memory.nbytes()
            self.peak = max(self.peak, self.now)

    def forget(self, tensor: Tensor) -> None:
        """Count a tensor no more."""
        memory = tensor.untyped_storage()
        if (at := memory.data_ptr()) in self._apart:
            return
        self._users[at] -= 1
        if not self._users[at]:
            self.now -= memory.nbytes()


@final
class _SavedTensor:
    def __init__(self, count: SavedBytes, tensor: Tensor) -> None:
        self._count, self._tensor = count, tensor.detach()
        count.keep(self._tensor)

    def give(self) -> Tensor:
        return self._tensor

    def __del__(self) -> None:
        self._count.forget(self._tensor)
