"""Versions of the software that a rank runs, and the processor's instructions, which decide
rounding.

Why here: ranks on unlike hosts may fail to work together, or drift apart by rounding. Both are best
found before the first step. The roll call compares them (comm/roll_call.py).
"""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

_PROCESSORS = Path("/proc/cpuinfo")
# instructions that torch's kernels choose from, under their Linux names on x86 and ARM
_ROUNDING = re.compile(r"fma4?|f16c|avx\w*|amx\w*|asimd\w*|bf16|i8mm|sve\w*|sme\w*")


@dataclass(frozen=True)
class Versions:
    """Versions of a process's software, and its processor."""

    python: str
    torch: str
    shoal: str
    processor: str  # the processor's name
    flags: tuple[str, ...]  # the processor's instructions that decide how sums round
    # the processor's vendor: libraries choose their kernels by it, and by the instructions
    vendor: str = ""
    kernels: str = ""  # the kernels that torch uses: AVX2, AVX512 …

    @property
    def rounding(self) -> str:
        """Text that is equal on two ranks if their sums round alike."""
        return " ".join((self.vendor, self.kernels, *self.flags))


@cache
def versions() -> Versions:
    """Return the versions of this process."""
    found = _processor()
    words = (found.get("flags") or found.get("Features", "")).split()
    return Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),
        shoal=_own_version(),
        processor=found.get("model name") or platform.processor() or platform.machine(),
        flags=tuple(sorted(word for word in words if _ROUNDING.fullmatch(word))),
        vendor=found.get("vendor_id") or found.get("CPU implementer", ""),
        kernels=torch.backends.cpu.get_cpu_capability(),
    )


def install_shoal(extra: str = "", version: str = "") -> str:
    """Write how to install Shoal: from a clone, because no package index has it.

    A package of that name in an index is not this project.

    Examples:
        >>> from shoal.contracts.versions import install_shoal
        >>> install_shoal("spark")
        "in a clone of Shoal: pip install -e '.[spark]'"
    """
    named = f"Shoal {version}" if version else "Shoal"
    return f"in a clone of {named}: pip install -e " + (f"'.[{extra}]'" if extra else ".")


def _own_version() -> str:
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:  # runs from its sources
        return "unknown"


def _processor() -> dict[str, str]:
    """Read Linux's report about the first processor. There may be hundreds more."""
    found: dict[str, str] = {}
    with suppress(OSError), _PROCESSORS.open() as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if not key.strip():
                break
            found[key.strip()] = value.strip()
    return found
