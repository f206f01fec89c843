"""Copies of layers whose class a strategy has changed: whoever loads one needs no shoal."""

from __future__ import annotations

import copyreg
from typing import Any

from torch import nn


def plain(module: nn.Module, kind: type[nn.Module], slot: str) -> tuple[Any, ...]:
    """How to copy or pickle a served layer: as torch's own, without what is kept in `slot`."""
    state = {name: value for name, value in vars(module).items() if name != slot}
    return copyreg._reconstructor, (kind, object, None), state  # type: ignore[attr-defined]
