"""Weighing: the weight of this rank's rows in the running backward, where gradients leave the rank.

A layer that is cut over the ranks, or served by other hosts, has gradients of the rows of all
ranks. So a rank multiplies the gradients of its own rows by their weight before it sends them. A
gradient that comes back to these rows is divided by it again. So the layers before see this rank's
own gradient.

The weight is known only while a backward runs. A strategy gets this object when the model is
rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch


@final
class Weighing:
    """Weight of a rank's rows: None, until an engine sets the functions."""

    def __init__(self) -> None:
        # returns the factor in the running backward; takes its call of the model, if known
        self.of_backward: Callable[[Any], float | None] = lambda call: None
        # returns the model's last call
        self.call: Callable[[], Any] = lambda: None

    def __call__(self, call: Any = None) -> float | None:
        """Return the factor in the backward that is running, or None."""
        return self.of_backward(call)


UNWEIGHED = Weighing()


class OwnHook:
    """Hook on a parameter that Shoal sets, not the user."""


def accumulates(nodes: Iterable[Any]) -> bool:
    """Return whether the running backward puts gradients into `.grad`, at any of autograd's nodes.

    A backward of torch.autograd.grad does not: it captures them.
    """
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return False
