"""Run every task of a host in this process, which may be one of several ranks.

python ranks.py HOST FOLDER [TASK …]
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # `contract` and `hosts`, imported by name

from contract import TASKS, Host


def main(name: str, folder: Path, *titles: str) -> None:
    """Write this rank's records of the tasks, or of all, into a file of the folder."""
    host: Host = import_module(f"hosts.{name}").Host()
    rank, size = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
    records: dict[str, Any] = {}
    for title in titles or TASKS:
        checkpoints = folder / f"{title}-{size}"
        checkpoints.mkdir(exist_ok=True)
        records[title] = asdict(host.train(TASKS[title], checkpoints))
    records["twice"] = host.twice() if size > 1 else ""
    torch.save(records, folder / f"{size}-{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
