"""Doctors on hosts of a lab, as threads of this process: each in a network of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal.contracts.launcher import Meeting, Seat
from shoal.contracts.store import open_store
from shoal_tools.doctor import facts, meet
from shoal_tools.doctor.examine import examine
from shoal_tools.doctor.finding import Finding
from shoal_tools.doctor.judge import judged
from shoal_tools.doctor.survey import Survey
from shoal_tools.launch.lab import SWITCH_ADDRESS, Lab
from shoal_tools.launch.namespaces import SETTINGS, attempt, inside

RATE = "200mbit"
needs_lab = pytest.mark.skipif(
    Lab().missing() is not None, reason=f"no lab here: {Lab().missing()}"
)


@dataclass(frozen=True)
class Heard:
    """What one doctor came to."""

    survey: Survey
    findings: list[Finding]

    @property
    def checks(self) -> list[str]:
        """The checks that found something, in order, each once."""
        return sorted({finding.check for finding in self.findings})


@dataclass
class Hosts:
    """A lab that stands, and what the test has planted on its hosts."""

    lab: Lab
    asked: dict[int, str] = field(default_factory=dict)  # GLOO_SOCKET_IFNAME, by host
    stand_ins: dict[int, dict[str, Any]] = field(default_factory=dict)  # of facts, by host
    port: int = 0  # where rank 0 holds the store; 0: the launcher does
    address: str = SWITCH_ADDRESS

    def do(self, host: int | str, command: str) -> None:
        """Run a shell command on a host, by its number, or on the switch."""
        namespace = self.lab.namespaces[-1 if host == "switch" else int(host)]
        shell = ("ip", "netns", "exec", namespace, "sh", "-c", command)
        assert not (complaint := attempt(*shell)), complaint

    @contextmanager
    def program_at(self, host: int, port: int) -> Iterator[None]:
        """Have another program listen at a port of a host, which accepts and says nothing."""
        script = (
            f"import socket; s = socket.create_server(('', {port})); print(flush=True); input()"
        )
        enter = ("ip", "netns", "exec", self.lab.namespaces[host], sys.executable, "-c", script)
        pipe = subprocess.PIPE
        with subprocess.Popen(enter, stdin=pipe, stdout=pipe, text=True) as program:
            assert program.stdout is not None and program.stdout.readline() == "\n"
            yield
            program.kill()

    def filter(self, host: int, rule: str) -> None:
        """Add a rule of nftables' for what comes to a host; skip the test where there are none."""
        if shutil.which("nft") is None:
            pytest.skip("no nft here: apt install nftables")
        chain = "{ type filter hook input priority 0; policy accept; }"
        self.do(host, "nft add table inet test")
        self.do(host, f"nft 'add chain inet test coming {chain}'")
        self.do(host, f"nft 'add rule inet test coming {rule}'")

    def name(self, host: int, line: str) -> None:
        """Put a line before the others in a host's /etc/hosts."""
        path = SETTINGS / self.lab.namespaces[host] / "hosts"
        path.write_text(f"{line}\n{path.read_text()}")

    def doctors(self, ranks: list[int] | None = None, wait_s: float = 10.0) -> list[Heard]:
        """Run a doctor on each host at once; what each came to."""
        store = None
        port = self.port
        if not port:
            store = inside(self.lab.namespaces[-1], partial(open_store, self.address))
            port = store.port
        meeting = partial(Meeting, size=self.lab.hosts, address=self.address, port=port)
        seats = {
            rank: Seat(
                f"h{rank}",
                holder=None if store else 0,
                interface=self.asked.get(rank, "eth0"),
                meeting=meeting(rank),
            )
            for rank in (range(self.lab.hosts) if ranks is None else ranks)
        }
        work = {rank: partial(meet.among_ranks, seat, "", wait_s) for rank, seat in seats.items()}
        return self._at_once(work)

    def peers(
        self, named: dict[int, list[str]], wait_s: float = 6.0, tokens: tuple[str, ...] = ("", "")
    ) -> list[Heard]:
        """Run `shoal doctor --peer …` on hosts at once; what each came to."""
        asked = [self.asked.get(host, "") for host in range(self.lab.hosts)]
        work = {
            host: partial(
                meet.among_peers, f"h{host}", peers, asked[host], (*tokens, "")[host], wait_s
            )
            for host, peers in named.items()
        }
        return self._at_once(work)

    def _at_once(self, work: dict[int, Any]) -> list[Heard]:
        found = dict[int, Heard]()

        def one(host: int) -> None:
            standing_in.facts = self.stand_ins.get(host, {})
            met = work[host]()
            survey = examine(met, "", 1e8 / 8)
            found[host] = Heard(survey, judged(survey, met.findings))
            met.responder.close()

        threads = [
            threading.Thread(target=inside, args=(self.lab.namespaces[host], partial(one, host)))
            for host in work
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[host] for host in work]


standing_in = threading.local()


@contextmanager
def hosts_of_a_lab(
    monkeypatch: pytest.MonkeyPatch, count: int = 2, rate: str = RATE
) -> Iterator[Hosts]:
    """A lab whose hosts can stand in for others."""
    here = facts.here

    def here_or_stand_in(*args: Any, **options: Any) -> facts.Host:
        return replace(here(*args, **options), **getattr(standing_in, "facts", {}))

    monkeypatch.setattr(meet, "here", here_or_stand_in)
    with Lab(hosts=count, rate=rate) as lab:
        yield Hosts(lab)


def only(heard: Heard, check: str) -> Finding:
    """The one finding there is, which is of that check."""
    assert heard.checks == [check], [str(finding) for finding in heard.findings]
    assert len(heard.findings) == 1, heard.findings
    return heard.findings[0]


def open_files() -> int:
    """Files that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
