"""Faults planted in a lab: the doctor finds each, and only that; and its command mends it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hosts import Hosts, hosts_of_a_lab, needs_lab, only

from shoal.contracts.versions import versions
from shoal_tools.doctor.facts import Limits

pytestmark = [pytest.mark.lab, needs_lab]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with hosts_of_a_lab(monkeypatch) as made:
        yield made


def test_a_sound_lab_of_four_hosts_has_nothing_within_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hosts_of_a_lab(monkeypatch, 4) as hosts:
        began = time.monotonic()
        heard = hosts.doctors()
        assert time.monotonic() - began < 10
        assert [each.findings for each in heard] == [[]] * 4
        survey = heard[0].survey
        assert len(list(survey.pairs())) == len(survey.rates) == 12
        for sender, receiver in survey.pairs():
            assert survey.path(sender, receiver) is not None
            assert 0.5 * 200e6 < survey.rates[sender.id, receiver.id] * 8 < 1.2 * 200e6


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("eth9", "has no interface eth9"),
        pytest.param("lo", "leads to no other host", marks=pytest.mark.slow),
        pytest.param("docker0", "do not reach h1 at the interface", marks=pytest.mark.slow),
        ("eth1", "do not reach h1 at the interface"),
    ],
)
def test_a_wrong_interface(hosts: Hosts, asked: str, said: str) -> None:
    for number, name in ((0, "docker0"), (1, "docker0"), (1, "eth1")):
        address = "172.17.0.1/16" if name == "docker0" else "192.168.7.1/24"
        hosts.do(number, f"ip link add {name} type bridge && ip link set {name} up")
        hosts.do(number, f"ip address add {address} dev {name}")
    hosts.asked[1] = asked
    for heard in hosts.doctors():
        finding = only(heard, "interface")
        assert said in finding.what and finding.where == "h1"
        assert finding.mend == "export GLOO_SOCKET_IFNAME=eth0"
    hosts.asked[1] = finding.mend.partition("=")[2]
    assert not any(heard.findings for heard in hosts.doctors())


def test_a_name_that_leads_to_the_loopback(hosts: Hosts) -> None:
    hosts.name(1, "127.0.1.1 h1")
    for heard in hosts.doctors():
        finding = only(heard, "names")
        assert (finding.where, finding.got.split(",")[0]) == ("h1", "h1 is 127.0.1.1")
        assert "10.0.0.2 h1" in finding.mend and "/etc/hosts" in finding.mend


@pytest.mark.slow
def test_a_name_of_another_host_that_leads_to_the_loopback(hosts: Hosts) -> None:
    hosts.name(1, "127.0.0.1 h0")
    finding = only(hosts.doctors()[0], "names")
    assert (finding.where, finding.got.split(",")[0]) == ("h1", "h0 is 127.0.0.1")


@pytest.mark.parametrize(
    "rule",
    [
        "ip saddr 10.0.0.1 drop",
        pytest.param("ip saddr 10.0.0.1 ct state new drop", marks=pytest.mark.slow),
        "ip saddr 10.0.0.1 tcp dport 1024-65535 drop",
        pytest.param("ip saddr 10.0.0.1 tcp dport 1024-65535 reject", marks=pytest.mark.slow),
    ],
)
def test_a_firewall_in_one_direction(hosts: Hosts, rule: str) -> None:
    hosts.filter(1, rule)
    for heard in hosts.doctors():
        finding = only(heard, "firewall")
        assert finding.where == "h0 → h1" and finding.on == "h1"
        assert "h0 sends to h1" in finding.what
    hosts.do(1, finding.mend)
    assert not any(heard.findings for heard in hosts.doctors())


def test_full_packets_that_are_lost(hosts: Hosts) -> None:
    for number in (0, 1):  # what leaves a host is a packet, and not several in one
        hosts.do(number, "ip link set dev eth0 gso_max_segs 1")
    hosts.filter(1, "meta length > 1300 drop")
    for heard in hosts.doctors():
        finding = only(heard, "mtu")
        assert "h0 → h1: 1280 bytes pass" in finding.got
        assert finding.mend == "ip link set dev eth0 mtu 1280"
        number = int(finding.on.removeprefix("h"))
    hosts.do(number, finding.mend)
    assert not any(heard.findings for heard in hosts.doctors())


@pytest.mark.slow
def test_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosts_of_a_lab(monkeypatch, 3) as hosts:
        slow = "tc qdisc replace dev eth0 root tbf rate 40mbit burst 128kb latency 50ms"
        hosts.do(2, slow)
        finding = only(hosts.doctors()[0], "rate")
        assert finding.on == "h2" and "h2 → h0" in finding.where and "h2 → h1" in finding.where
        hosts.do(2, finding.mend)
        assert not any(heard.findings for heard in hosts.doctors())


@pytest.mark.slow
def test_a_port_that_another_program_has(hosts: Hosts) -> None:
    hosts.port, hosts.address = 29500, "10.0.0.1"
    with hosts.program_at(0, 29500):
        heard = hosts.doctors(wait_s=1)
        assert [each.checks for each in heard] == [["ports"], ["ports"]]
        assert all("29500" in each.findings[0].what for each in heard)
        assert "socket.create_server" in heard[0].findings[0].got
        assert heard[0].findings[0].mend == "export MASTER_PORT=29501"
        hosts.port = 29501
        assert "29500" in only(hosts.doctors()[0], "ports").what, "which torchrun takes by default"


def test_a_host_with_ipv6_only(hosts: Hosts) -> None:
    for number in (0, 1):
        hosts.do(number, f"ip address add fd00::{number + 1}/64 dev eth0 nodad")
    hosts.do("switch", "ip address add fd00::fe/64 dev bridge nodad")
    hosts.do(1, "ip -4 address flush dev eth0")
    hosts.address = "fd00::fe"
    for heard in hosts.doctors():
        finding = only(heard, "ipv6")
        assert finding.where == "h1" and "fd00::2 (eth0)" in finding.got
        assert finding.mend == "ip address add 10.0.0.2/24 dev eth0"
    hosts.do(1, finding.mend)
    assert not any(heard.findings for heard in hosts.doctors())


def test_hosts_that_cannot_open_files_or_share_memory(hosts: Hosts) -> None:
    hosts.stand_ins[1] = {"limits": Limits(256, 256, 64 << 20, 64 << 20)}
    for heard in hosts.doctors():
        assert heard.checks == ["files", "memory"]
        assert {finding.where for finding in heard.findings} == {"h1"}


def test_other_versions_and_processors(hosts: Hosts) -> None:
    own = versions()
    other = replace(own, torch="2.9.1", flags=("avx2",), processor="Old, AVX2")
    hosts.stand_ins[1] = {"versions": other}
    for heard in hosts.doctors():
        assert heard.checks == ["processor", "versions"]
        mends = {finding.check: finding.mend for finding in heard.findings}
        assert mends["versions"] == f"pip install torch=={own.torch}"
        assert "ATEN_CPU_CAPABILITY=avx2" in mends["processor"]
    hosts.stand_ins[0] = {"pinned": "ATEN_CPU_CAPABILITY=avx2"}
    hosts.stand_ins[1]["pinned"] = "ATEN_CPU_CAPABILITY=avx2"
    assert hosts.doctors()[0].checks == ["versions"]


def test_a_rank_that_does_not_come(hosts: Hosts) -> None:
    finding = only(hosts.doctors(ranks=[0], wait_s=1)[0], "start")
    assert "rank 1 of 2 did not come" in finding.what


def test_a_link_that_is_down(hosts: Hosts) -> None:
    hosts.do("switch", "ip link set h1 down")
    here, there = hosts.doctors(wait_s=2)
    assert here.checks == ["start"] and there.checks == ["firewall"]
