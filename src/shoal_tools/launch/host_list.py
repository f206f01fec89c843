"""The hosts of a job as people write them: a list in an option, or a file with one host a line.

    a,b:2,me@c            a list: two ranks on b, and another user on c
    a slots=2   # fast    a line of a file, as Open MPI writes it
    b:2                   or as MPICH writes it

A host that stands there twice has the sum of the slots.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_RANKS_HERE, whole

_HERE = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][^@\s:,]*)@)?"
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*))"
    r"(?::(?P<slots>[0-9]+))?"
)
_FORM = "name, user@name or name:slots; an IPv6 address in brackets, as [fe80::1]:2"


@dataclass(frozen=True)
class SshHost:
    """A host by the name that leads to it, and the number of ranks that it takes."""

    name: str
    user: str = ""
    slots: int = 1

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, so that no ssh is needed."""
        return not self.user and self.name in (*_HERE, socket.gethostname())

    @property
    def is_loopback(self) -> bool:
        """Whether its name means another machine on every host."""
        return not self.user and self.name in _HERE

    @property
    def login(self) -> str:
        """The word that ssh takes."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def word(self) -> str:
        """The host as a list has it."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        return f"{self.user}@{name}:{self.slots}" if self.user else f"{name}:{self.slots}"


def hosts_in(text: str) -> tuple[SshHost, ...]:
    """Read a list of hosts with commas.

    Raises:
        UsageError: a word is no host, or there is none.

    Examples:
        >>> [(host.login, host.slots) for host in hosts_in("a,me@b:2")]
        [('a', 1), ('me@b', 2)]
    """
    words = [word.strip() for word in text.split(",")]
    return _join_repeated((_host(word, f"the list {text!r}") for word in words if word), text)


def hosts_in_file(path: Path) -> tuple[SshHost, ...]:
    """Read a file of hosts, one a line. `#` begins a comment.

    Raises:
        UsageError: the file cannot be read, a line is no host, or there is none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "the file of hosts cannot be read", got=f"{path}: {error}", do="check the path"
        ) from None
    return _join_repeated(_of_lines(lines, path), str(path))


def _of_lines(lines: Iterable[str], path: Path) -> Iterator[SshHost]:
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        host = _host(words[0], where)
        for word in words[1:]:
            name, _, value = word.partition("=")
            slots = _slots(value, where) if name in ("slots", "max_slots", "max-slots") else None
            if slots is None:
                raise UsageError(
                    f"a line of the file has a word that says nothing: {word!r}",
                    where=where,
                    expected="a host, then slots=N",
                    do="take the word out, or put # before it",
                )
            if name == "slots":
                host = replace(host, slots=slots)
        yield host


def _host(word: str, where: str) -> SshHost:
    found = _HOST.fullmatch(word)
    if found is None:
        raise UsageError(
            f"{word!r} is no host", where=where, expected=_FORM, do="write the host so"
        )
    slots = 1 if found["slots"] is None else _slots(found["slots"], where)
    return SshHost(found["name"] or found["address"], found["user"] or "", slots)


def _slots(text: str, where: str) -> int:
    number = whole(text)
    if number is None or not 0 < number <= MOST_RANKS_HERE:
        raise UsageError(
            "the slots of a host are the number of its ranks",
            where=where,
            got=repr(text),
            expected=f"a whole number from 1 to {MOST_RANKS_HERE}",
            do="leave the host out if it is to have none",
        )
    return number


def _join_repeated(hosts: Iterable[SshHost], where: str) -> tuple[SshHost, ...]:
    """Join hosts that stand there twice, in the order of their first place."""
    found: dict[str, SshHost] = {}
    for host in hosts:
        before = found.get(host.login)
        slots = host.slots + (before.slots if before else 0)
        found[host.login] = replace(host, slots=slots)
    if not found:
        raise UsageError("no host is named", got=where or "nothing", expected=_FORM)
    return tuple(found.values())


def filled(hosts: Sequence[SshHost], ranks: int) -> tuple[SshHost, ...]:
    """Return the hosts with as many slots as `ranks` fill, the first hosts first.

    Raises:
        UsageError: there are fewer slots.
    """
    room = sum(host.slots for host in hosts)
    if ranks > room:
        raise UsageError(
            "the hosts have fewer slots than the job has ranks",
            got=f"{room} slots, {ranks} ranks",
            do="name more hosts, or give a host more slots: name:2",
        )
    taken: list[SshHost] = []
    for host in hosts:
        slots = min(host.slots, ranks - sum(before.slots for before in taken))
        taken += [replace(host, slots=slots)] if slots else []
    return tuple(taken)
