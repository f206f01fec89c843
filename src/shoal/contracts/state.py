"""State that a forward may change and that is not trained: buffers, and frozen parameters.

A state has the dotted name of its tensor in the model. If it belongs to the loss, a module, its
name begins with "(loss).".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import Tensor, nn

OF_LOSS = "(loss)."


@dataclass(frozen=True, eq=False)
class TensorSlot:
    """Place of one tensor in a module, where it can be replaced. It keeps neither alive."""

    name: str
    module: ref[nn.Module]
    leaf: str
    is_buffer: bool

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that is there now; None if there is none, or if the module is gone."""
        module = self.module()
        return None if module is None else self._table(module).get(self.leaf)

    def put(self, tensor: Tensor) -> None:
        """Replace the tensor."""
        module = self.module()
        if module is not None:
            self._table(module)[self.leaf] = (
                tensor if self.is_buffer else nn.Parameter(tensor, requires_grad=False)
            )

    def _table(self, module: nn.Module) -> dict[str, Any]:
        return module._buffers if self.is_buffer else module._parameters


def states(model: nn.Module, loss_fn: object) -> dict[str, TensorSlot]:
    """Return all states of a model and its loss by name, each once, in the same order on every
    rank.
    """
    found: dict[str, TensorSlot] = {}
    seen: set[int] = set()
    loss = loss_fn if isinstance(loss_fn, nn.Module) else nn.Module()
    for prefix, root in (("", model), (OF_LOSS, loss)):
        for path, module in root.named_modules():
            members = [(leaf, tensor, True) for leaf, tensor in module._buffers.items()]
            members += [
                (leaf, parameter, False)
                for leaf, parameter in module._parameters.items()
                if parameter is not None and not parameter.requires_grad
            ]
            for leaf, tensor, is_buffer in members:
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                name = prefix + (f"{path}.{leaf}" if path else leaf)
                found[name] = TensorSlot(name, ref(module), leaf, is_buffer)
    return found
