"""The interfaces of a job are those by which its ranks meet, and no other of the machine's."""

from __future__ import annotations

import pytest

from shoal.comm.threads import ThreadComm, run
from shoal_tools.commands import job_interfaces as of_job
from shoal_tools.commands.job_interfaces import job_interfaces, sent_to_other_hosts

COUNTED = {
    "eth0, sent": 7,
    "eth0, received": 9,
    "eth1, sent": 100,
    "docker0, sent": 50,
    "lo, sent": 3,
}


def asked(monkeypatch: pytest.MonkeyPatch, named: str, hosts: tuple[str, ...]) -> list[object]:
    monkeypatch.setattr(of_job, "carried", lambda: COUNTED)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)

    def work(comm: ThreadComm) -> tuple[tuple[str, ...], int]:
        return job_interfaces(comm), sent_to_other_hosts(comm)

    return list(run(len(hosts), work, hosts=hosts))


def test_each_host_uses_the_interface_that_leads_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asked(monkeypatch, "eth0", ("one", "other")) == [(("eth0",), 7)] * 2


def test_ranks_of_one_host_also_use_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, alone = (("eth0", "lo"), 7), (("eth0",), 7)
    assert asked(monkeypatch, "eth0", ("one", "one", "other")) == [shared, shared, alone]


def test_of_unknown_interfaces_those_count_that_lead_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asked(monkeypatch, "", ("one", "other")) == [((), 107)] * 2
