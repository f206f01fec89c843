"""Methods that torch.compile leaves alone, without a price for programs that compile nothing.

`torch.compiler.disable` imports Dynamo, which takes longer than all else of Shoal. So a method is
marked as its class is made, and disabled when the first model is parallelised: by then torch itself
has imported Dynamo, for the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast, final

import torch

F = TypeVar("F", bound=Callable[..., Any])


def eager(method: F) -> F:
    """Mark a method that `keep_eager` is to disable. To be used in the body of a class."""
    return cast(F, _Marked(method))


def keep_eager() -> None:
    """Have torch.compile leave all marked methods alone, from here on."""
    while _MARKED:
        owner, name = _MARKED.pop()
        setattr(owner, name, torch.compiler.disable(vars(owner)[name]))


@final
class _Marked:
    """In the body of a class; the class itself has the method."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self._method)
        _MARKED.append((owner, name))


_MARKED: list[tuple[type, str]] = []
