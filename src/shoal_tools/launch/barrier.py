"""A rank's place in a barrier stage of Spark: which rank a task is, and where all of them meet.

Every task calls `seat_of` at once. Task 0's host has the store. Its port is bound before the others
are told, and kept bound until task 0 is over, so that no other program gets it meanwhile.
Roles go by number, as everywhere: workers first, then servers or tail hosts.

Cost: one `allGather` of Spark's, about a tenth of a second.
"""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.comm.rendezvous import variables
from shoal.contracts.launcher import MARK

_VISIBLE = "CUDA_VISIBLE_DEVICES"
EXECUTOR = "SHOAL_SPARK_EXECUTOR"  # a variable of a rank's process: its place, in words


@dataclass(frozen=True)
class TaskSeat:
    """A task's seat: which rank it is."""

    rank: int
    host: str
    executor: str  # the executor, described in words
    settings: dict[str, str]  # variables of its process
    port: socket.socket | None = None  # the port of the store, if this is rank 0

    def close(self) -> None:
        """Let go of the port."""
        if self.port is not None:
            self.port.close()


def seat_of(context: Any) -> TaskSeat:
    """Return the seat of this task, by its BarrierTaskContext."""
    rank = int(context.partitionId())
    hosts = [info.address.rpartition(":")[0] or info.address for info in context.getTaskInfos()]
    held = _held_port() if rank == 0 else None
    try:
        number = held.getsockname()[1] if held else 0
        told = context.allGather(f"{number} {uuid.uuid4().hex}")
    except BaseException:
        if held is not None:
            held.close()
        raise
    port, job = told[0].split()  # the job's id marks this start of the stage
    local = hosts[:rank].count(hosts[rank])
    executor = f"rank {rank}, executor on host {hosts[rank]}, in {Path.cwd()}"
    settings = variables(hosts[0], int(port), rank, len(hosts), local, hosts.count(hosts[rank]))
    del settings["TORCHELASTIC_USE_AGENT_STORE"]  # rank 0 holds the store
    settings |= {MARK: job, "SHOAL_HOST": hosts[rank], EXECUTOR: executor, **_gpus_of(context)}
    return TaskSeat(rank, hosts[rank], executor, settings, held)


def _gpus_of(context: Any) -> dict[str, str]:
    """Return variables by which a rank sees the GPUs that Spark has given its task, and no others.

    They are its first ones then, whatever their addresses. An executor that sees only some GPUs
    already is left alone.
    """
    gpus = context.resources().get("gpu")
    if gpus is None or not gpus.addresses or _VISIBLE in os.environ:
        return {}
    return {_VISIBLE: ",".join(gpus.addresses), "LOCAL_RANK": "0"}


def _held_port() -> socket.socket:
    """Bind a port that is free, for rank 0's store.

    The store binds it as well, which Linux allows where both allow it and the first does not
    listen.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def local_folder() -> str | None:
    """Return the folder where an executor keeps its own files; None for the system's."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or None
