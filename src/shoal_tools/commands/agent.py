"""`shoal rendezvous` and `shoal agent`: hosts that come and go."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from shoal.comm import rendezvous as variables
from shoal.core.errors import UsageError
from shoal.core.numbers import (
    MOST_COUNTED,
    MOST_RANKS,
    MOST_RANKS_HERE,
    MOST_SECONDS,
    whole,
)
from shoal_tools.commands.options import LOST_AFTER, WAIT_FOR, Finite, check_script
from shoal_tools.elastic.agent import Agent, AgentOptions
from shoal_tools.elastic.messages import CrewTerms
from shoal_tools.elastic.place import PORT, MeetingPlace
from shoal_tools.launch.agent import LAUNCHER
from shoal_tools.launch.processes import Interrupts, missing_tools

_PASSING = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_MOST_PORT = 65535


@click.command()
@click.option(
    "--address", default="", help="Address of this host to listen at; by default all of them."
)
@click.option(
    "--port",
    default=PORT,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Where agents call.",
)
@LOST_AFTER
def rendezvous(address: str, port: int, lost_after_s: float) -> None:
    """Keep the list of hosts that train, for `shoal agent`.

    It trains nothing, and may run on any host. If it ends, ranks go on: start it again.
    """
    token = variables.token()
    with Interrupts() as interrupts:
        place = MeetingPlace(address, port, token, lost_after_s, _says("rendezvous"))
        say = _says("rendezvous")
        say(f"listens at port {place.port}")
        if not token:
            say("there is no SHOAL_TOKEN, so whoever reaches this port can take part")
        over = place.run(interrupts.received)
    sys.exit(over.code if over else 0)


@click.command(context_settings=_PASSING)
@click.option(
    "--rendezvous",
    "place",
    required=True,
    metavar="HOST:PORT",
    help="Where `shoal rendezvous` listens; - for a launcher on standard input.",
)
@click.option(
    "--address", default="", help="Of this host, for others; by default as the meeting place sees."
)
@click.option(
    "--min",
    "least",
    default=1,
    show_default=True,
    type=click.IntRange(1, MOST_RANKS),
    help="Fewest hosts that train.",
)
@click.option(
    "--max",
    "most",
    default=64,
    show_default=True,
    type=click.IntRange(1, MOST_RANKS),
    help="Most hosts that train; more of them wait for a place.",
)
@click.option(
    "--nproc-per-node",
    "slots",
    default=1,
    show_default=True,
    type=click.IntRange(1, MOST_RANKS_HERE),
    help="Ranks on this host.",
)
@WAIT_FOR
@click.option(
    "--max-restarts",
    "restarts",
    default=3,
    show_default=True,
    type=click.IntRange(0, MOST_COUNTED),
    help="Starts after a rank has failed by itself. Hosts that come or go do not count.",
)
@click.option(
    "--grace",
    "grace_s",
    default=30.0,
    show_default=True,
    type=Finite(0, MOST_SECONDS),
    help="Seconds for ranks to commit, once this host is told to leave.",
)
@click.option(
    "--fork/--no-fork",
    "forks",
    default=True,
    show_default=True,
    help="Fork ranks from a process that has imported PyTorch, which saves seconds a start.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def agent(
    command: tuple[str, ...],
    place: str,
    address: str,
    slots: int,
    grace_s: float,
    forks: bool,
    **terms: Any,
) -> None:
    """Run COMMAND with all hosts that are there, as they come and go.

    COMMAND is a script with its arguments, or -m and a module. It trains with `shoal.Checkpoints`.
    SIGTERM or Ctrl-C: ranks commit with all the others, this host leaves, and the others go on.

    For instance: shoal agent --rendezvous h0:29480 --min 2 script.py
    """
    if (lacks := missing_tools("setpriv")) is not None:
        raise UsageError("an agent cannot run here", got=lacks)
    agreed = CrewTerms(**terms)
    if agreed.most < agreed.least:
        got = f"--min {agreed.least} --max {agreed.most}"
        do = f"give for instance --min {agreed.least} --max {agreed.least}"
        raise UsageError("--max is less than --min", got=got, do=do)
    check_script(command[0], "shoal agent")
    if command[0] != "-m" and not os.path.isfile(command[0]):
        raise UsageError(
            "there is no such script", got=command[0], do="give a script's path, or -m MODULE"
        )
    if command == ("-m",):
        raise UsageError("-m stands before a module", do="give for instance: -m package.train")
    options = AgentOptions(command, slots, agreed, grace_s, forks, address)
    with Interrupts() as interrupts:
        own = Agent(_place(place), variables.token(), options, interrupts.received, _says("agent"))
        code = own.run()
        if not code and signal.SIGINT not in interrupts.received:
            interrupts.received.clear()  # it has left, as it was told to
    sys.exit(code)


def _place(text: str) -> tuple[str, int] | None:
    if text == LAUNCHER:
        return None
    host, colon, port = text.rpartition(":")
    number = whole(port if colon else str(PORT))
    host = (host if colon else text).removeprefix("[").removesuffix("]")
    if not host or number is None or not 0 < number <= _MOST_PORT:
        raise UsageError(
            "a meeting place is a host and a port", got=repr(text), do="give for instance h0:29480"
        )
    return host, number


def _says(who: str) -> Callable[[str], None]:
    """Return a function that prints a line with the time of day."""

    def say(line: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')} {who}] {line}", file=sys.stderr, flush=True)

    return say
