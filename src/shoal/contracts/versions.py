"""What a rank runs: versions, and the processor's instructions, which decide how sums round.

Why here: ranks on unlike hosts get on badly, or drift apart by rounding, and both are found best
before the first step. The roll call compares them (comm/roll_call.py).
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
# instructions that torch's kernels choose between, as Linux names them on x86 and ARM
_ROUNDING = re.compile(r"fma4?|f16c|avx\w*|amx\w*|asimd\w*|bf16|i8mm|sve\w*|sme\w*")


@dataclass(frozen=True)
class Versions:
    """What a process runs, and runs on."""

    python: str
    torch: str
    shoal: str
    processor: str  # its name
    flags: tuple[str, ...]  # its instructions that decide how sums round
    vendor: str = ""  # by which libraries choose their kernels, beside the instructions
    kernels: str = ""  # those that torch uses: AVX2, AVX512 …

    @property
    def rounding(self) -> str:
        """Ranks for which this is equal round alike."""
        return " ".join((self.vendor, self.kernels, *self.flags))


@cache
def versions() -> Versions:
    """Those of this process."""
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

    A package of that name in an index is somebody else's.

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
    except metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


def _processor() -> dict[str, str]:
    """What Linux says of the first processor; there may be hundreds."""
    found: dict[str, str] = {}
    with suppress(OSError), _PROCESSORS.open() as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if not key.strip():
                break
            found[key.strip()] = value.strip()
    return found
