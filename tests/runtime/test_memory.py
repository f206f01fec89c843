"""What the process keeps of the memory that a step frees."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import torch
from shoal.profiling.processor import page_faults
from shoal.runtime.memory import keep_freed

{first}
step = lambda: [torch.ones(1 << 18) for _ in range(20)]  # 20 MB, all freed
step()
before = page_faults()
for _ in range(5):
    step()
print((page_faults() - before) / 5)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a matter of glibc")
def test_memory_is_taken_once_and_not_in_every_step() -> None:
    faults = {
        first: float(subprocess.check_output([sys.executable, "-c", STEPS.format(first=first)], text=True, timeout=100))
        for first in ("", "keep_freed()")
    }
    assert faults["keep_freed()"] < 0.05 * faults[""]
