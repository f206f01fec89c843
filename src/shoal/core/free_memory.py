"""Free memory, of the host or of a GPU."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes a process can still take there; None where nobody says so."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAv")), None)
