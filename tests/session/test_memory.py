"""What the process keeps of the memory that a step frees."""

from __future__ import annotations

import mmap
import platform
import subprocess
import sys

import pytest

STEPS = """
import torch
from shoal.profiling.processor import page_faults
from shoal.session.memory import keep_free_memory

keep_free_memory()
step = lambda: [torch.ones(1 << 18) for _ in range(20)]  # 20 MB, all freed
step()
before = page_faults()
for _ in range(5):
    step()
print((page_faults() - before) / 5)
"""
# that a step takes anew in most processes, were it not for `keep_free_memory`
PAGES = 20 * (1 << 20) / mmap.PAGESIZE


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a matter of glibc")
def test_memory_is_taken_once_and_not_in_every_step() -> None:
    faults = float(subprocess.check_output([sys.executable, "-c", STEPS], text=True, timeout=100))
    assert faults < 0.05 * PAGES
