"""Runs all checks on a survey."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from shoal_tools.doctor import checks_host, checks_network
from shoal_tools.doctor.finding import Finding
from shoal_tools.doctor.survey import Survey

_CHECKS: tuple[Callable[[Survey], Iterator[Finding]], ...] = (
    checks_host.lost,
    checks_host.names,
    checks_host.ipv6,
    checks_network.interface,
    checks_network.firewall,
    checks_host.ports,
    checks_network.mtu,
    checks_network.rate,
    checks_host.versions,
    checks_host.processor,
    checks_host.clocks,
    checks_host.files,
    checks_host.memory,
)


def judged(
    survey: Survey, met: Collection[Finding] = (), ignored: Collection[str] = ()
) -> list[Finding]:
    """Return the findings. Faults that prevent a start come first.

    Args:
        survey: the results of the examination.
        met: findings about the meeting of the hosts.
        ignored: checks that are left out.
    """
    findings = [*met, *(finding for check in _CHECKS for finding in check(survey))]
    return [finding for finding in dict.fromkeys(findings) if finding.check not in ignored]
