"""Methods that torch.compile leaves alone. Programs that compile nothing pay nothing for them.

`torch.compiler.disable` imports Dynamo, which takes longer than the rest of Shoal. So a method is
marked when its class is made, and disabled when the first model is parallelised. By then torch
itself has imported Dynamo, for the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast, final

import torch

F = TypeVar("F", bound=Callable[..., Any])


def eager(method: F) -> F:
    """Mark a method that `keep_eager` will disable. Use it in the body of a class."""
    return cast(F, _Marked(method))


def keep_eager() -> None:
    """Make torch.compile leave all marked methods alone from now on."""
    while _MARKED:
        owner, name = _MARKED.pop()
        setattr(owner, name, torch.compiler.disable(vars(owner)[name]))


@final
class _Marked:
    """Placeholder in the body of a class, which replaces itself by the method."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self._method)
        _MARKED.append((owner, name))


_MARKED: list[tuple[type, str]] = []
