"""What a rank runs: versions, and the processor's instructions, which decide how sums round.

Why here: ranks on unlike hosts get on badly, or drift apart by rounding, and both are found best
before the first step. The roll call compares them (comm/roll_call.py).
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

_PROCESSORS = Path("/proc/cpuinfo")
# instructions that torch's kernels choose between, as Linux names them on x86 and ARM
_ROUNDING = re.compile(r"fma4?|f16c|avx\w*|amx\w*|asimd\w*|bf16|i8mm|sve\w*|sme\w*")


@dataclass(frozen=True)
class Versions:
    """What a process runs, and runs on."""

    python: str
    torch: str
    shoal: str
    processor: str  # its name, and the instructions of it that torch uses
    flags: tuple[str, ...]  # its instructions that decide how sums round

    @property
    def rounding(self) -> tuple[str, ...]:
        """Ranks for which this is equal round alike."""
        return (self.processor.rpartition(", ")[2], *self.flags)


@cache
def versions() -> Versions:
    """Those of this process."""
    name, flags = _processor()
    return Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),
        shoal=_own_version(),
        processor=f"{name}, {torch.backends.cpu.get_cpu_capability()}",
        flags=flags,
    )


def _own_version() -> str:
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


def _processor() -> tuple[str, tuple[str, ...]]:
    """The first processor's name, and its instructions that decide how sums round."""
    found: dict[str, str] = {}
    try:
        with _PROCESSORS.open() as lines:  # those of one: there may be hundreds
            for line in lines:
                key, _, value = line.partition(":")
                found[key.strip()] = value.strip()
                if not key.strip():
                    break
    except OSError:
        pass
    name = found.get("model name") or platform.processor() or platform.machine()
    words = (found.get("flags") or found.get("Features", "")).split()
    return name, tuple(sorted(word for word in words if _ROUNDING.fullmatch(word)))
