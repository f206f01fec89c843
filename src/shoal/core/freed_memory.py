"""Freed memory, which glibc keeps for later."""

from __future__ import annotations

import ctypes
import sys
from typing import Any


def return_free_memory() -> None:
    """Make glibc return the freed memory that it keeps to the system; on other systems do
    nothing.
    """
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
