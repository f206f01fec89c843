"""Text for people: the hosts, the ways between them, and each finding with its cure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.core.numbers import how_many
from shoal.core.printable import printable
from shoal_tools.doctor.checks_network import mbits
from shoal_tools.doctor.facts import Host
from shoal_tools.doctor.finding import CHECKS, Finding
from shoal_tools.doctor.survey import Survey

_MOST_WAYS = 20  # most rows of a table, so that it fits one screen


def show(
    console: Console,
    survey: Survey,
    findings: Sequence[Finding],
    seconds: float,
    ignored: Sequence[str] = (),
    *,
    verbose: bool = False,
) -> None:
    """Print the hosts, the ways between them, and the findings.

    Args:
        console: the terminal.
        survey: all facts of the hosts.
        findings: faults, each with its cure.
        seconds: duration of the examination.
        ignored: checks that are left out.
        verbose: whether every check gets a line.
    """
    console.print(_hosts(survey))
    if len(survey.hosts) > 1:
        console.print(_ways(survey))
    for finding in findings:
        _show_finding(console, finding)
    if verbose:
        for check, outcome in outcomes(findings, ignored).items():
            console.print(_show(f"{check}: {CHECKS[check]}? {outcome}"))
    found = how_many(len(findings), "finding") if findings else "sound"
    checks = how_many(len(CHECKS.keys() - set(ignored)), "check")
    hosts = how_many(len(survey.hosts), "host")
    console.print(f"{found}: {checks} on {hosts} in {seconds:.1f} s")


def outcomes(findings: Sequence[Finding], ignored: Sequence[str]) -> dict[str, str]:
    """Return the outcome of every check, by its name."""
    found = Counter(finding.check for finding in findings)
    return {
        check: "left out"
        if check in ignored
        else (how_many(found[check], "finding") if found[check] else "yes")
        for check in CHECKS
    }


def _hosts(survey: Survey) -> Table:
    table = _table("host", "address", "interface", "mtu", "python", "torch", "processor", "files")
    for host in survey.hosts:
        name = host.interface_of(host.announced)
        versions = host.versions
        _add(
            table,
            host.name,
            host.announced or "none",
            name,
            str(host.interfaces.mtus.get(name, "")),
            versions.python,
            versions.torch,
            versions.processor.rpartition(", ")[2],
            str(host.limits.files),
        )
    return table


def _ways(survey: Survey) -> Table:
    table = _table("from", "to", "at", "there and back", "rate", "full packets")
    for number, (sender, receiver) in enumerate(survey.pairs()):
        if number < _MOST_WAYS:
            _add(table, sender.name, receiver.name, *_way(survey, sender, receiver))
        elif number == _MOST_WAYS:
            table.add_row("…")
    return table


def _way(survey: Survey, sender: Host, receiver: Host) -> tuple[str, str, str, str]:
    way, path = survey.way(sender, receiver), survey.path(sender, receiver)
    rate = survey.rates.get((sender.id, receiver.id))
    if way is None:
        attempts = survey.attempts(sender, receiver)
        return (
            attempts[0].outcome if attempts else "not tried",
            "",
            mbits(rate) if rate else "",
            "",
        )
    latency = f"{path.latency_s * 1e3:.2f} ms" if path else ""
    packets = "" if path is None else "pass" if path.passes is None else "lost"
    return way.address, latency, mbits(rate) if rate is not None else "", packets


def _show_finding(console: Console, finding: Finding) -> None:
    console.print(_show(f"{finding.check}: {finding.what}", style="bold"))
    # text to copy is not wrapped, because a line break would break a command
    for key, value in {
        "where": finding.where,
        "got": finding.got,
        f"mend it{f', on {finding.on}' if finding.on else ''}": finding.mend,
    }.items():
        console.print(_show(f"  {key}: {value}"), soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _add(table: Table, *texts: str) -> None:
    table.add_row(*map(_show, texts))


def _show(text: str, style: str = "") -> Text:
    """Return a text from another host, without markup and characters that a terminal obeys."""
    return Text(printable(text), style=style)
