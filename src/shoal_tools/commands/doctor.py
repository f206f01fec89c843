"""`shoal doctor`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import click

from shoal.comm import rendezvous
from shoal.core.errors import UsageError
from shoal.front import text
from shoal_tools.commands.options import Finite, bytes_per_s
from shoal_tools.doctor import meet
from shoal_tools.doctor.examine import examine
from shoal_tools.doctor.finding import CHECKS
from shoal_tools.doctor.judge import judged
from shoal_tools.doctor.meet import Met
from shoal_tools.doctor.show import show

_TOLD_S = 10.0  # seconds until the first host has printed
_EXAMINED_S = 120.0  # seconds until the doctor of this host's lowest rank has finished


@dataclass(frozen=True)
class _Told:
    """A host's message after it has printed its findings."""

    findings: int


@click.command()
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="HOST",
    help="Another host, where a doctor runs too; can be given often.",
)
@click.option(
    "--port",
    default=meet.PORT,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="With --peer: where doctors listen, the same on all hosts.",
)
@click.option(
    "--wait",
    "wait_s",
    default=60.0,
    show_default=True,
    type=Finite(0, 3600),
    help="Seconds to wait for other hosts.",
)
@click.option(
    "--rate",
    default="100mbit",
    show_default=True,
    envvar="SHOAL_LINK_RATE",
    help="What links should carry; less than half of it is a finding.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="CHECK",
    type=click.Choice(tuple(CHECKS)),
    help="Leave a check out.",
)
@click.option("--verbose", is_flag=True, help="Say of every check how it came out.")
@click.argument("more", nargs=-1, metavar="[HOST]...")
def doctor(
    peers: tuple[str, ...],
    port: int,
    wait_s: float,
    rate: str,
    ignore: tuple[str, ...],
    verbose: bool,
    more: tuple[str, ...],
) -> None:
    """Find faults of hosts and of their network, and say how to fix them.

    Under torchrun or `shoal lab` it looks at the hosts of the ranks. Without a launcher, run
    `shoal doctor --peer HOST` on every host, with the names of the others or of all. Alone it looks
    at this host.

    The exit code is 0 if all is sound, and 1 if there are findings.
    """
    expected = bytes_per_s(rate)
    began = time.monotonic()
    met = _meet((*peers, *more), port, wait_s)
    if not met.takes_part:
        sys.exit(_as_told(met))
    survey = examine(met, rendezvous.token(), expected)
    findings = judged(survey, met.findings, ignore)
    if met.speaks or met.hosts[0].id in survey.lost:
        took_s = time.monotonic() - began
        show(text.console(), survey, findings, took_s, ignore, verbose=verbose)
    if met.circle is not None:
        met.circle.gather("told", _Told(len(findings)), _TOLD_S)
    sys.exit(1 if findings else 0)


def _meet(peers: tuple[str, ...], port: int, wait_s: float) -> Met:
    name, asked, secret = rendezvous.host_name(), rendezvous.interface(), rendezvous.token()
    for peer in peers:
        if not any(name.strip() for name in peer.split(",")):
            raise UsageError(
                "a peer is a host's name or address", got=repr(peer), do="write --peer HOST"
            )
    peers = tuple(each.strip() for peer in peers for each in peer.split(",") if each.strip())
    if peers:
        return meet.among_peers(name, peers, asked, secret, wait_s, port)
    if rendezvous.is_alone():
        return meet.alone(name, asked, secret)
    return meet.among_ranks(rendezvous.seat(), secret, wait_s, rendezvous.attempt())


def _as_told(met: Met) -> int:
    """Return the exit code that the doctor of this host's lowest rank tells."""
    deadline, first = time.monotonic() + _EXAMINED_S, met.hosts[0].id
    while met.board is not None and time.monotonic() < deadline:
        told = met.board.read([first], "told", _Told).get(first)
        if told is not None:
            return 1 if told.findings or met.findings else 0
        time.sleep(0.2)
    return 1
