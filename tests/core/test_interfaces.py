"""This host's interfaces: every host has a loopback, and reaches itself by it."""

from __future__ import annotations

import sys

import pytest

from shoal.core.interfaces import (
    Address,
    interface_of,
    is_loopback,
    mtu,
    names,
    own_addresses,
    source_towards,
    stays_here,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux")


def test_the_loopback_is_an_interface_that_stays_here() -> None:
    assert Address("lo", "127.0.0.1") in own_addresses()
    assert "lo" in names() and stays_here("lo")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert (mtu("lo") or 0) > 1500
    assert mtu("eth99") is None


def test_no_address_needs_its_interface_beside_it() -> None:
    assert not [each for each in own_addresses() if each.text.startswith("fe80")]


def test_this_host_reaches_itself_by_its_loopback() -> None:
    assert source_towards("127.0.0.1") == "127.0.0.1"
    assert source_towards("localhost") in ("127.0.0.1", "::1")
    assert source_towards("no such host") is None


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_loopback_addresses_are_known(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1", "fe80::1%eth0", "", "h0"])
def test_other_addresses_are_known(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize("name", ["docker0", "br-0123456789ab", "virbr0", "veth1a2b", "lo"])
def test_interfaces_of_containers_lead_nowhere_else(name: str) -> None:
    assert stays_here(name)


@pytest.mark.parametrize("name", ["eth0", "enp3s0f1", "wlan0", "bond0", "br-lan", "ib0", "wg0"])
def test_interfaces_of_a_network_lead_on(name: str) -> None:
    assert not stays_here(name)
