"""Weighing: what this rank's rows weigh in the running backward, where gradients leave the rank.

A layer that is cut over the ranks, or served by other hosts, has gradients of the rows of all
ranks. So a rank multiplies what its own rows bring before it is sent. What comes back to them is
divided by that again: to the layers before, it is this rank's own gradient.

Known only while a backward runs; a strategy is given it when the model is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch


@final
class Weighing:
    """What a rank's rows weigh: nothing, until an engine says it."""

    def __init__(self) -> None:
        # what to multiply by in the running backward; given the call that it is of, if known
        self.of_backward: Callable[[Any], float | None] = lambda call: None
        # the model's last call
        self.call: Callable[[], Any] = lambda: None

    def __call__(self, call: Any = None) -> float | None:
        """What to multiply by in the backward that is running, or None."""
        return self.of_backward(call)


UNWEIGHED = Weighing()


class OwnHook:
    """A hook on a parameter that is none of the user's."""


def accumulates(nodes: Iterable[Any]) -> bool:
    """Whether the running backward brings gradients into `.grad`, at any of autograd's nodes.

    Not one that torch.autograd.grad captures.
    """
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return False
