"""Rendezvous of ranks: a key-value store in the launcher, and the environment variables that lead
there. Launchers write them (`variables`), ranks read them (`seat`).

Why here: under plain env:// rendezvous rank 0 holds the store, and its contents are lost when rank
0 dies. Torchrun's agent holds it instead, and one variable tells ranks so. Shoal's launchers do the
same.
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
_NO_RUN_ID = "none"  # value of torchrun without --rdzv-id
_START = "start with torchrun, `shoal lab` or `shoal train --ranks N`, which set it"


@dataclass(frozen=True)
class _Fate:
    """Verdict of the ranks, as a launcher reads it."""

    what: str
    rank: int | None


def new_store(address: str) -> TCPStore:
    """Open a store on a free port of this address only. It lives while it is referenced."""
    raise_limit()
    return open_store(address)


def token_of(job: Job) -> str:
    """Return the secret of a job: its own, or a new one."""
    return _token_in(job.environment) or secrets.token_hex(16)


def token() -> str:
    """Return the secret that this process shares with the job's other processes; '' if there is
    none.

    Raises:
        UsageError: it is empty, or not a text.
    """
    return _token_in(os.environ)


def _token_in(environment: Mapping[str, str]) -> str:
    found = environment.get(TOKEN)
    if found is None:
        return ""
    try:
        found.encode()
    except UnicodeEncodeError:  # Python reads bytes that are not UTF-8 into such a text
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
    """Return the variables that torchrun would set for this rank, with the store at `address`,
    `port`.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank joins the store, and none makes one
        "TORCHELASTIC_RUN_ID": "",  # cleared, because it may be set if another job starts this one
    }


def is_rank() -> bool:
    """Return whether a launcher has started this process as a rank."""
    return "RANK" in os.environ


def is_first() -> bool:
    """Return whether this process is rank 0, or not a rank."""
    return os.environ.get("RANK", "0") == "0"


def is_alone() -> bool:
    """Return whether no launcher names other ranks."""
    return os.environ.get("WORLD_SIZE", "" if is_rank() else "1") == "1"


def host_name() -> str:
    """Return this host's name. It differs between hosts of a lab, though they share one machine."""
    return os.environ.get("SHOAL_HOST") or socket.gethostname()


def memory_folder() -> str:
    """Return the folder in this host's memory, which differs between hosts of a lab, too."""
    return os.environ.get("SHOAL_HOST_MEMORY") or "/dev/shm"


def interface() -> str:
    """Return the network interfaces that the user asks for, with commas, or ""."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def wants_frames() -> bool:
    """Return whether errors should show all their frames."""
    return os.environ.get("SHOAL_TRACEBACK", "").lower() not in ("", "0", "false", "no", "off")


def servers() -> int:
    """Return the number of servers among this process's ranks."""
    return _number(SERVERS, "0")


def attempt() -> str:
    """Return the number of times that the launcher has started the ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def agent_variable(number: int) -> dict[str, str]:
    """Return the variable that leads a rank to its agent, by the number of its open socket."""
    return {AGENT: f"{number}:{os.fstat(number).st_ino}"}


def has_agent() -> bool:
    """Return whether an agent has started this rank, and starts it again when hosts come or go."""
    return _agent_socket() is not None


def is_asked_to_end() -> bool:
    """Return whether this host's agent asks for a checkpoint, so that other hosts can take part."""
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
    """Return the agent's socket if this process has it: other processes only inherit the
    variable.
    """
    number, _, inode = os.environ.get(AGENT, "").partition(":")
    if (found := whole(number)) is None:
        return None
    try:
        return found if str(os.fstat(found).st_ino) == inode else None
    except OSError:
        return None


def seat(*, has_joined: bool = False) -> Seat:
    """Return this process's place in its job.

    Args:
        has_joined: whether the program has set up a process group, so that no meeting is needed.

    Raises:
        UsageError: a variable is missing, or is not a number in its range.
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
    """Return an id that tells this job from others, and from its earlier starts, as launchers set
    it.
    """
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
    """Tell a launcher that cannot read the store which rank failed, if it asks for that."""
    path = os.environ.get(BLAMED)
    if path and rank is not None:
        with suppress(OSError):  # the launcher is gone
            Path(path).write_text(str(rank))


def agreed(store: TCPStore, token: str, job: str) -> tuple[str, int | None] | None:
    """Return the verdict of a job's ranks, and the rank that failed, if one did; None if there is
    none.
    """
    values = Values(store, token, scope(job))
    start = values.read(GO, str)
    fate = start and values.within(f"{scope(job)}/{start}").read(VERDICT, _Fate)
    return (fate.what, fate.rank) if fate else None
