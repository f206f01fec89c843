"""Where ranks meet: a key-value store in the launcher, and the environment variables that lead
there. Launchers write them (`variables`), ranks read them (`seat`).

Why here: under plain env:// rendezvous rank 0 holds the store, and all that was written is lost
when rank 0 dies. Torchrun's agent holds it instead, and one variable tells ranks so; Shoal's
launchers do the same.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

from shoal.contracts.launcher import (
    AGENT,
    BLAMED,
    GO,
    MARK,
    SERVERS,
    TAIL,
    TOKEN,
    VERDICT,
    Job,
    Meeting,
    Seat,
    scope,
)
from shoal.contracts.store import open_store
from shoal.contracts.store_values import Values
from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_RANKS, whole
from shoal.core.open_files import raise_limit

_MOST_PORT = 65535
_NO_RUN_ID = "none"  # as torchrun writes it, without --rdzv-id
_START = "start with torchrun, `shoal lab` or `shoal train --ranks N`, which set it"


@dataclass(frozen=True)
class _Fate:
    """What a launcher reads of the ranks' verdict."""

    what: str
    rank: int | None


def new_store(address: str) -> TCPStore:
    """A store on a free port of this address, and of no other, while it is referenced."""
    raise_limit()
    return open_store(address)


def token_of(job: Job) -> str:
    """The secret of a job: the one that it brings, else a new one."""
    return _token_in(job.environment) or secrets.token_hex(16)


def token() -> str:
    """The secret that this process has in common with the job's others, '' where there is none.

    Raises:
        UsageError: it is empty, or no text.
    """
    return _token_in(os.environ)


def _token_in(environment: Mapping[str, str]) -> str:
    found = environment.get(TOKEN)
    if found is None:
        return ""
    try:
        found.encode()
    except UnicodeEncodeError:  # Python reads bytes that are no UTF-8 into such a text
        got = "bytes that are no text in UTF-8"
    else:
        if found.strip():
            return found
        got = "nothing, or spaces only"
    raise UsageError(
        f"{TOKEN} is set, and is no secret",
        got=got,
        expected="a text that nobody guesses, the same on every host",
        do=f"export {TOKEN}=$(openssl rand -hex 16) on one host, and the same text on the others; "
        f"or unset {TOKEN}, to train without one",
    )


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


def memory_folder() -> str:
    """Return the folder in this host's memory, also where several hosts of a lab share one."""
    return os.environ.get("SHOAL_HOST_MEMORY") or "/dev/shm"


def interface() -> str:
    """The network interfaces that the user asks for, with commas, or ""."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def wants_frames() -> bool:
    """Whether errors are to be shown with all their frames."""
    return os.environ.get("SHOAL_TRACEBACK", "").lower() not in ("", "0", "false", "no", "off")


def servers() -> int:
    """How many ranks of this process's job are servers."""
    return _number(SERVERS, "0")


def attempt() -> str:
    """How often the launcher has started the ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def agent_variable(number: int) -> dict[str, str]:
    """Return the variable that leads a rank to its agent, by the number of its open socket."""
    return {AGENT: f"{number}:{os.fstat(number).st_ino}"}


def has_agent() -> bool:
    """Whether an agent has started this rank, and starts it again when hosts come or go."""
    return _agent_socket() is not None


def is_asked_to_end() -> bool:
    """Whether this host's agent asks for a checkpoint, so that other hosts can take part."""
    number = _agent_socket()
    if number is None:
        return False
    waiting = select.poll()
    waiting.register(number, select.POLLIN)
    return bool(waiting.poll(0))


def crew() -> tuple[str, int] | None:
    """Return the job and the number of the crew that an agent has started this rank for."""
    job, _, number = os.environ.get(MARK, "").rpartition("-")
    counted = whole(number)
    return (job, counted) if counted is not None and has_agent() else None


def _agent_socket() -> int | None:
    """Return the agent's socket, if this process has it: others only inherit the variable."""
    number, _, inode = os.environ.get(AGENT, "").partition(":")
    if (found := whole(number)) is None:
        return None
    try:
        return found if str(os.fstat(found).st_ino) == inode else None
    except OSError:
        return None


def seat(*, has_joined: bool = False) -> Seat:
    """This process's place in its job.

    Args:
        has_joined: the program has set up a process group, which says where the ranks meet.

    Raises:
        UsageError: a variable is missing, or is no number that fits.
    """
    return Seat(
        host_name(),
        servers=servers(),
        tail=_number(TAIL, "0"),
        holder=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
        restarts=bool(os.environ.get("TORCHELASTIC_RUN_ID")),
        job=_job(),
        token=token(),
        interface=os.environ.get("GLOO_SOCKET_IFNAME") or None,
        meeting=None if has_joined else _meeting(),
    )


def _job() -> str:
    """What tells this job from others, also from an earlier start of it, as launchers set it."""
    ids = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get(MARK, "")
    return "-".join(each for each in ids if each not in ("", _NO_RUN_ID))


def _meeting() -> Meeting:
    rank, size = _number("RANK"), _number("WORLD_SIZE", most=MOST_RANKS)
    port = _number("MASTER_PORT", most=_MOST_PORT)
    if rank >= size:
        raise UsageError(
            "RANK counts from 0 to WORLD_SIZE − 1", got=f"RANK={rank}, WORLD_SIZE={size}", do=_START
        )
    address = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    return Meeting(rank, size, address.removeprefix("[").removesuffix("]"), port)


def _number(variable: str, default: str = "", most: int = MOST_RANKS) -> int:
    text = os.environ.get(variable, default)
    number = whole(text)
    if number is None or number > most:
        problem = "is too large" if number is not None else "is not set to a number"
        raise UsageError(
            f"the environment variable {variable} {problem}",
            got=repr(text[:80]),
            expected=f"a whole number, at most {most}",
            do="set it to how many of the ranks are that" if default else _START,
        )
    return number


def blame(rank: int | None) -> None:
    """Tell a launcher that cannot read the store which rank failed, where it asks for that."""
    path = os.environ.get(BLAMED)
    if path and rank is not None:
        with suppress(OSError):  # the launcher is gone
            Path(path).write_text(str(rank))


def agreed(store: TCPStore, token: str, job: str) -> tuple[str, int | None] | None:
    """The verdict of a job's ranks, and the rank that failed, if one did; None if there is none."""
    values = Values(store, token, scope(job))
    start = values.read(GO, str)
    fate = start and values.within(f"{scope(job)}/{start}").read(VERDICT, _Fate)
    return (fate.what, fate.rank) if fate else None
