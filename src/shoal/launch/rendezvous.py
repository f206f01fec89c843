"""Where ranks meet: a key-value store in the launcher, and the environment variables that lead
there. Launchers write them (`variables`), ranks read them (`seat`).

Why here: under plain env:// rendezvous rank 0 holds the store, and all that was written is lost
when rank 0 dies. Torchrun's agent holds it instead, and one variable tells ranks so; Shoal's
launchers do the same.
"""

from __future__ import annotations

import json
import os
import socket

from torch.distributed import TCPStore

from shoal.contracts.launcher import GO, MARK, VERDICT, Meeting, Seat, scope
from shoal.contracts.store_values import Values
from shoal.core.errors import UsageError

_NO_RUN_ID = "none"  # as torchrun writes it, without --rdzv-id
_START = "start with torchrun, `shoal lab` or `shoal train --ranks N`, which set it"


def new_store(address: str) -> TCPStore:
    """A store on a free port of every address here, `address` too, while it is referenced."""
    return TCPStore(address, 0, is_master=True, wait_for_workers=False)


def variables(
    address: str, port: int, rank: int, ranks: int, local_rank: int, local_ranks: int
) -> dict[str, str]:
    """What torchrun would set for this rank, with the store at `address` and `port`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank joins the store, and none makes one
        "TORCHELASTIC_RUN_ID": "",  # as it may be set where this job is started from another
    }


def is_rank() -> bool:
    """Whether a launcher has started this process as a rank."""
    return "RANK" in os.environ


def is_first() -> bool:
    """Whether this process is rank 0, or no rank."""
    return os.environ.get("RANK", "0") == "0"


def is_alone() -> bool:
    """Whether no launcher speaks of other ranks."""
    return os.environ.get("WORLD_SIZE", "" if is_rank() else "1") == "1"


def host_name() -> str:
    """What this host is called, also where several hosts of a lab share one name."""
    return os.environ.get("SHOAL_HOST") or socket.gethostname()


def seat(*, has_joined: bool = False) -> Seat:
    """This process's place in its job.

    Args:
        has_joined: the program has set up a process group, which says where the ranks meet.

    Raises:
        UsageError: a variable is missing, or is no number that fits.
    """
    return Seat(
        host_name(),
        servers=_number("SHOAL_SERVERS", "0"),
        tail=_number("SHOAL_TAIL", "0"),
        holder=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
        restarts=bool(os.environ.get("TORCHELASTIC_RUN_ID")),
        job=_job(),
        interface=os.environ.get("GLOO_SOCKET_IFNAME") or None,
        meeting=None if has_joined else _meeting(),
    )


def _job() -> str:
    """What tells this job from others, also from an earlier start of it, as launchers set it."""
    ids = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get(MARK, "")
    return "-".join(each for each in ids if each not in ("", _NO_RUN_ID))


def _meeting() -> Meeting:
    rank, size, port = _number("RANK"), _number("WORLD_SIZE"), _number("MASTER_PORT")
    if rank >= size:
        raise UsageError(
            "RANK counts from 0 to WORLD_SIZE − 1", got=f"RANK={rank}, WORLD_SIZE={size}", do=_START
        )
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return Meeting(rank, size, address.removeprefix("[").removesuffix("]"), port)


def _number(variable: str, default: str = "") -> int:
    text = os.environ.get(variable, default)
    if not text.isdigit():
        do = "set it to how many of the ranks are that" if default else _START
        raise UsageError(
            f"the environment variable {variable} is not set to a number", got=repr(text), do=do
        )
    return int(text)


def agreed(store: TCPStore, job: str) -> tuple[str, int | None] | None:
    """The verdict of a job's ranks, and the rank that failed, if one did; None if there is none."""
    start = Values(store, scope=scope(job)).read(GO, str)
    key = f"{scope(job)}/{start}/{VERDICT}"
    if start is None or not store.check([key]):
        return None
    verdict = json.loads(store.get(key))
    return verdict["what"], verdict["rank"]
