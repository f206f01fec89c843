"""Freed memory, which glibc keeps for later."""

from __future__ import annotations

import ctypes
import sys
from typing import Any


def give_back_freed() -> None:
    """Have glibc return freed memory to the system, which it keeps for later; elsewhere nothing."""
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
