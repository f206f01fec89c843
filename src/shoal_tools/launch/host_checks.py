"""Checks hosts before anything starts on them, beside one another, and names all that fail at once.

    1  contact   ssh gets in without a password (ssh_failures.py), and the interpreter is there
    2  look      tools, folder, releases, script and its digest, and the first host's free port
    3  reach     every host reaches that port at the first host's address

Why before the start: a rank that cannot start is otherwise a rank that is missing after a minute.

Cost: one round trip for each of the three, and the reading of the script.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.contracts.versions import install_shoal
from shoal.core.errors import UsageError
from shoal.core.interfaces import is_loopback, source_towards
from shoal.core.numbers import how_many
from shoal.core.printable import printable
from shoal_tools.launch.connection import Connection, gathered
from shoal_tools.launch.host_end import REACH_S
from shoal_tools.launch.host_list import SshHost
from shoal_tools.launch.processes import Interrupts
from shoal_tools.launch.ssh_failures import failure_of

_CONTACT_S = 60.0
_OTHER_REMEDY = "make this work first: ssh -o BatchMode=yes {login} true"


@dataclass(frozen=True)
class HostNeeds:
    """Needs of a job on each host."""

    python: str
    folder: str
    program: str
    port: int  # the meeting place on the first host; 0 for any
    address: str = ""  # the first host's, if the user gives it
    ssh: tuple[str, ...] = ("ssh",)
    path: tuple[str, ...] = ()  # the folders of PYTHONPATH
    same: tuple[str, ...] = ()  # files that must be there, equal
    sent: tuple[str, ...] = ()  # files that are put there
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReadyHosts:
    """Hosts that can start, and the place where their ranks meet."""

    connections: tuple[Connection, ...]
    address: str
    port: int
    sources: Mapping[Connection, str]  # the address of each, towards that place


@dataclass(frozen=True)
class UnfitHost:
    """A host that cannot start.

    Args:
        login: the host as ssh calls it.
        problems: all problems, each with its remedy.

    Examples:
        >>> print(UnfitHost("ann@a", (("it has no torch", "install it"),)))
        ann@a: it has no torch
             do this: install it
    """

    login: str
    problems: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n  ".join(
            f"{self.login}: {problem}\n     do this: {do}" for problem, do in self.problems
        )


class HostsCannotStart(UsageError):
    """Error about hosts that cannot start, so that too few are left."""

    hosts: tuple[UnfitHost, ...] = ()

    @classmethod
    def among(cls, number: int, hosts: Sequence[UnfitHost]) -> HostsCannotStart:
        """Return the error that names these hosts, of a number that were looked at."""
        lines = "".join(f"\n  {host}" for host in hosts)
        of = f"{len(hosts)} of {how_many(number, 'host')}"
        error = cls(f"{of} cannot start, and nothing was started{lines}")
        error.hosts = tuple(hosts)
        return error

    @property
    def list_of_hosts(self) -> str:
        """The hosts with their problems, without the sentence above them."""
        return printable("\n  ".join(map(str, self.hosts)), keep="\n\t")


@dataclass
class _Problems:
    """All that is wrong, by host."""

    found: dict[Connection, list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, connection: Connection, problem: str, do: str) -> None:
        host = connection.host
        remedy = do.replace("{login}", host.login).replace("{name}", host.name)
        self.found.setdefault(connection, []).append((problem, remedy))

    def error(self, of: int) -> HostsCannotStart:
        """Return one error that names every host and every problem."""
        hosts = [UnfitHost(c.host.login, tuple(problems)) for c, problems in self.found.items()]
        return HostsCannotStart.among(of, hosts)


def ready_hosts(
    connections: Sequence[Connection], needs: HostNeeds, least: int, interrupts: Interrupts
) -> tuple[ReadyHosts, str]:
    """Return the hosts that can start, and a line about all others.

    Args:
        connections: to all hosts, just begun.
        needs: the same for each host.
        least: fewer hosts than this are an error.
        interrupts: one that comes ends the checks.

    Raises:
        HostsCannotStart: too few hosts can start. It names each of the others, and the way out.
    """
    problems, all_hosts = _Problems(), len(connections)
    facts = _look_at_hosts(connections, needs, problems, interrupts)
    _judge_alike(facts, needs, problems)
    sound = [connection for connection in facts if connection not in problems.found]
    if not sound or len(sound) < least or facts[sound[0]].get("port") is None:
        raise problems.error(all_hosts)
    first = sound[0]
    address = needs.address or _address(sound, needs.ssh)
    if not address:
        do = "name it as the others reach it, or give --master-addr ADDRESS"
        problems.add(first, "it has no address that leads to it from the others", do)
        raise problems.error(all_hosts)
    place = address, facts[first]["port"]
    sources = _sources(sound, place, facts[first]["proof"], problems, interrupts)
    if first not in sources or len(sources) < least:
        raise problems.error(all_hosts)
    said = problems.error(all_hosts).what if problems.found else ""
    return ReadyHosts(tuple(sources), *place, sources), said


def _sources(
    connections: Sequence[Connection],
    place: tuple[str, int],
    proof: str,
    problems: _Problems,
    interrupts: Interrupts,
) -> dict[Connection, str]:
    """Return the address of each host that reaches the place where ranks meet."""
    for connection in connections:
        connection.order(reach=[*place, proof])
    reached = gathered(connections, "reached", REACH_S + _CONTACT_S, interrupts)
    (address, port), first, sources = place, connections[0].host.name, {}
    for connection in connections:
        answer = reached.get(connection, {"problem": "no answer"})
        if "by" in answer:
            sources[connection] = answer["by"]
        else:
            problems.add(
                connection,
                f"it does not reach {first} at {address} port {port}: {answer['problem']}",
                f"open port {port} in {first}'s firewall, or give --master-addr the address of "
                f"{first} on a network that both are on",
            )
    return sources


def _look_at_hosts(
    connections: Sequence[Connection],
    needs: HostNeeds,
    problems: _Problems,
    interrupts: Interrupts,
) -> dict[Connection, dict[str, Any]]:
    """Return the facts of the hosts that have any; the first of them listens."""
    sent = {path: base64.b64encode(Path(path).read_bytes()).decode() for path in needs.sent}
    proof = secrets.token_hex(8)
    for place, connection in enumerate(connections):
        connection.order(
            look={
                "chdir": needs.folder,
                "path": needs.path,
                "files": needs.same,
                "modules": needs.modules,
                "program": needs.program,
                "send": sent,
                "listen": [needs.port, proof] if place == 0 else None,
            }
        )
    facts = dict(gathered(connections, "facts", _CONTACT_S, interrupts))
    for connection in connections:
        if connection not in facts:
            problems.add(connection, *_no_contact(connection, needs))
    ordered = {c: {**facts[c], "proof": proof} for c in connections if c in facts}
    for connection, fact in ordered.items():
        for problem, do in _lacks(fact, needs):
            problems.add(connection, problem, do)
    return ordered


def _no_contact(connection: Connection, needs: HostNeeds) -> tuple[str, str]:
    if connection.code == 255 and not connection.has_come:
        failure, line = failure_of(connection.complaints.decode(errors="replace"))
        return f"{failure.problem}: {line}", failure.do
    if connection.code in (126, 127):
        return (
            f"the interpreter is not there: {needs.python}",
            "install it under that path, or name another one with --python PATH",
        )
    if connection.code is not None:
        said = connection.complaint() or "nothing"
        return (
            f"{needs.python} ended with exit code {connection.code}, and said: {said}",
            "give a Python 3.11 or newer with --python PATH",
        )
    return f"no answer within {_CONTACT_S:g} s", _OTHER_REMEDY


def _lacks(fact: Mapping[str, Any], needs: HostNeeds) -> Iterator[tuple[str, str]]:
    """List the problems of one host by itself."""
    if fact["lacks"]:
        yield f"programs are not there: {', '.join(fact['lacks'])}", "install util-linux there"
    if "folder" in fact:
        yield (
            f"the working folder cannot be used: {fact['folder']}",
            "make it there, or name another one with --chdir FOLDER",
        )
        return
    if not fact["torch"]:
        yield f"{needs.python} has no torch", "install torch there, or give another --python PATH"
    if not fact["shoal"]:
        yield f"{needs.python} has no Shoal", f"{install_shoal()}; or give another --python PATH"
    for module, is_there in fact["modules"].items():
        if not is_there:
            yield f"there is no module {module}", f"put it into {needs.folder}, or install it"
    if not fact["program"]:
        yield f"there is no program {needs.program}", "install it there"
    if "taken" in fact:
        yield (
            f"port {needs.port} is taken: {fact['taken']}",
            "end what has it, or give another one: --master-port 29501",
        )


def _judge_alike(
    facts: Mapping[Connection, Mapping[str, Any]], needs: HostNeeds, problems: _Problems
) -> None:
    """Find hosts that differ from the first one, or from the file that is here."""
    machines = Counter(fact["machine"] for fact in facts.values())
    usable = {connection: fact for connection, fact in facts.items() if "files" in fact}
    for connection, fact in facts.items():
        if machines[fact["machine"]] > 1:
            same = [c for c, other in facts.items() if other["machine"] == fact["machine"]]
            if connection is not same[0]:
                slots = sum(each.host.slots for each in same)
                name = same[0].host.login
                do = f"name it once, with its ranks: {name}:{slots}"
                problems.add(connection, f"it is the same machine as {name}", do)
    for package, name in (("torch", "torch"), ("shoal", "Shoal")):
        there = {c: fact[package] for c, fact in usable.items() if fact[package]}
        first = next(iter(there), None)
        for connection, release in there.items():
            if first is not None and release != there[first]:
                problems.add(
                    connection,
                    f"{name} is {release}, and {there[first]} on {first.host.name}",
                    f"install {name} {there[first]} there",
                )
    for path in needs.same:
        _judge_file(path, {c: fact["files"][path] for c, fact in usable.items()}, needs, problems)


def _judge_file(
    path: str, digests: Mapping[Connection, str], needs: HostNeeds, problems: _Problems
) -> None:
    here, where = _digest(path), "this machine"
    if not here:
        first = next((c for c, digest in digests.items() if digest), None)
        here, where = (digests[first], first.host.name) if first else ("", "")
    far = str(Path(needs.folder, path))
    for connection, digest in digests.items():
        copy = f"copy the one that {where} has" if where else "put it there, or look at the path"
        copy = "let --send copy it" if _digest(path) else copy
        if not digest:
            problems.add(connection, f"the file is not there: {far}", copy)
        elif digest != here:
            problems.add(connection, f"{far} differs from the file on {where}", copy)


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _address(connections: Sequence[Connection], ssh: Sequence[str]) -> str:
    """Return the address at which the other hosts reach the first one; '' where none is known."""
    first, *others = [connection.host for connection in connections]
    if not others and first.is_here:
        return "127.0.0.1"
    if not first.is_loopback:
        return _name_of(first, ssh)
    for other in others:
        source = source_towards(_name_of(other, ssh))
        if source and not is_loopback(source):
            return source
    return ""


def _name_of(host: SshHost, ssh: Sequence[str]) -> str:
    """Return the name or address that ssh connects to, which ~/.ssh/config may say."""
    if host.is_here:
        return host.name
    said = subprocess.run(
        (*ssh, "-G", "--", host.login), capture_output=True, text=True, check=False
    )
    for line in said.stdout.splitlines():
        key, _, value = line.partition(" ")
        if key == "hostname" and value:
            return value
    return host.name
