"""`shoal doctor --peer`: hosts that no launcher has brought together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hosts import Hosts, hosts_of_a_lab, needs_lab, only

from shoal_tools.doctor.meet import PORT

pytestmark = [pytest.mark.lab, needs_lab]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with hosts_of_a_lab(monkeypatch) as made:
        yield made


@pytest.mark.parametrize(
    "named", [{0: ["h1"], 1: ["10.0.0.1"]}, {0: ["h0", "h1"], 1: ["h0", "h1"]}], ids=str
)
def test_peers_name_the_others_or_all(hosts: Hosts, named: dict[int, list[str]]) -> None:
    for heard in hosts.peers(named):
        assert heard.findings == []
        assert len(heard.survey.rates) == 2 and len(heard.survey.hosts) == 2


@pytest.mark.slow
def test_three_peers_with_one_that_is_deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosts_of_a_lab(monkeypatch, 3) as hosts:
        hosts.filter(1, "ip saddr 10.0.0.1 ct state new drop")
        everybody = ["h0", "h1", "h2"]
        for heard in hosts.peers(dict.fromkeys(range(3), everybody), wait_s=30.0):
            # hosts of a busy machine are slow, and their rates are measured
            others = [finding for finding in heard.findings if finding.check != "rate"]
            finding = only(replace(heard, findings=others), "firewall")
            assert finding.where == "h0 → h1" and finding.on == "h1"


def test_a_peer_without_a_doctor(hosts: Hosts) -> None:
    (heard,) = hosts.peers({0: ["h1"]}, wait_s=0.5)
    finding = only(heard, "start")
    assert "no doctor listens on h1" in finding.what and finding.on == "h1"
    assert finding.mend == "shoal doctor --peer h0"


def test_a_peer_whose_name_leads_back(hosts: Hosts) -> None:
    hosts.name(0, "127.0.1.1 h1")
    (heard,) = hosts.peers({0: ["h1"]}, wait_s=0.5)
    assert "h1 is 127.0.1.1" in only(heard, "names").got


def test_a_peer_whose_name_leads_nowhere(hosts: Hosts) -> None:
    (heard,) = hosts.peers({0: ["h77.invalid"]}, wait_s=0.5)
    assert "the name h77.invalid leads nowhere" in only(heard, "names").what


def test_a_port_of_doctors_that_is_taken(hosts: Hosts) -> None:
    with hosts.program_at(0, PORT):
        heard, other = hosts.peers({0: ["h1"], 1: ["h0"]}, wait_s=1)
    assert only(heard, "ports").mend == f"shoal doctor --port {PORT + 1} --peer h1"
    assert f"another program has port {PORT} on h0" in only(other, "ports").what


@pytest.mark.slow
def test_a_peer_with_another_token_does_not_pass_for_a_host(hosts: Hosts) -> None:
    for heard in hosts.peers({0: ["h1"], 1: ["h0"]}, wait_s=4, tokens=("one", "another")):
        assert len(heard.survey.hosts) == 1
        finding = only(heard, "start")
        assert "has another SHOAL_TOKEN than" in finding.what and "stranger" in finding.what
        assert finding.mend == "export SHOAL_TOKEN=…"
