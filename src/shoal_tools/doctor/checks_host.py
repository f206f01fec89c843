"""Checks of the hosts' reports about themselves, and of differences between hosts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from shoal.contracts.versions import install_shoal
from shoal.core.interfaces import is_loopback
from shoal_tools.doctor import forms
from shoal_tools.doctor.facts import Host
from shoal_tools.doctor.finding import Finding
from shoal_tools.doctor.survey import Reached, Survey

# open files and connections that a rank needs, and the limit that it should be able to ask for
FILES, MOST_FILES = 1024, 4096
SHARED_BYTES = 65 << 20  # a little more than 64 MiB, which a container gets by default
CLOCKS_S = 1.0
_ENOUGH_FILES = 65536


def names(survey: Survey) -> Iterator[Finding]:
    """Find names that lead nowhere, or back to the host that asks."""
    if survey.size == 1:
        return
    addresses = {host.name: host.announced for host in survey.hosts}
    for host in survey.hosts:
        others = survey.reached.get(host.id, Reached()).names
        # the others' names need not lead anywhere, but they must not lead to a wrong place
        wrong = {name: found for name, found in others.items() if found} | host.names
        for name, found in wrong.items():
            word = forms.name(name)
            address = addresses.get(name) or ""
            address = forms.address(address) if address else f"ADDRESS-OF-{word}"
            if not found:
                yield Finding(
                    "names",
                    f"the name {name} leads nowhere",
                    where=host.name,
                    got="no address",
                    mend=f"echo '{address} {word}' >> /etc/hosts",
                )
            elif is_loopback(found[0]):
                forget = f"/^127\\.\\|^::1/s/\\b{word}\\b//"
                yield Finding(
                    "names",
                    f"the name {name} leads back to the host that asks for it",
                    where=host.name,
                    got=f"{name} is {', '.join(found)}",
                    mend=f"sed -i '{forget}; $ a {address} {word}' /etc/hosts",
                )


def ipv6(survey: Survey) -> Iterator[Finding]:
    """Find hosts without an IPv4 address."""
    ipv4 = [a.text for host in survey.hosts for a in host.outer if not a.is_ipv6]
    network = (ipv4 or ["10.77.0.0"])[0].rpartition(".")[0]
    for host in survey.hosts:
        if host.outer and all(address.is_ipv6 for address in host.outer):
            interface = host.outer[0].interface
            free = (f"{network}.{number}" for number in range(host.rank + 1, 255))
            address = next((each for each in free if each not in ipv4), f"{network}.254")
            ipv4.append(address)
            yield Finding(
                "ipv6",
                f"{host.name} has only IPv6 addresses, which many tools and defaults do not take",
                where=host.name,
                got=", ".join(f"{a.text} ({a.interface})" for a in host.outer),
                mend=f"ip address add {forms.address(address)}/24 dev {forms.interface(interface)}",
            )


def ports(survey: Survey) -> Iterator[Finding]:
    """Find ports that a start needs and another program has taken."""
    for host in survey.hosts:
        for taken in host.taken:
            yield Finding(
                "ports",
                f"port {taken.port}, where torchrun's ranks meet by default, is taken",
                where=host.name,
                got=f"process {taken.pid}: {taken.program}" if taken.pid else taken.program,
                mend=f"export MASTER_PORT={taken.port + 1}",
                on="every host",
            )


def versions(survey: Survey) -> Iterator[Finding]:
    """Find hosts with different versions."""
    install = {
        "torch": "pip install torch=={}",
        "shoal": install_shoal(version="{}"),
        "python": "uv venv --python {}",
    }
    for what, command in install.items():
        found = {host.name: _version(host, what) for host in survey.hosts}
        usual = _usual(list(found.values()))
        for host, version in found.items():
            if version != usual:
                others = next(name for name, each in found.items() if each == usual)
                yield Finding(
                    "versions",
                    f"{host} has another version of {what} than {others}",
                    where=host,
                    got=f"{version} here, {usual} on {others}",
                    mend=command.format(forms.version(str(usual))),
                )


def processor(survey: Survey) -> Iterator[Finding]:
    """Find processors that round differently without a setting that makes them equal."""
    kinds = {host.versions.rounding for host in survey.hosts}
    pinned = {host.pinned for host in survey.hosts}
    if len(kinds) == 1 or (len(pinned) == 1 and pinned != {""}):
        return
    usual = _usual([host.versions.rounding for host in survey.hosts])
    unlike = [host for host in survey.hosts if host.versions.rounding != usual]
    like = next(host for host in survey.hosts if host.versions.rounding == usual)
    for host in unlike:
        own, theirs = set(host.versions.flags), set(like.versions.flags)
        more, less = " ".join(sorted(own - theirs)), " ".join(sorted(theirs - own))
        got = f"{host.name}: {host.versions.processor}; {like.name}: {like.versions.processor}"
        got += f"; more here: {more}" if more else ""
        got += f"; lacking here: {less}" if less else ""
        yield Finding(
            "processor",
            f"the processors of {host.name} and {like.name} may round sums unlike",
            where=host.name,
            got=got,
            mend="export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2",
            on="every host",
        )


def clocks(survey: Survey) -> Iterator[Finding]:
    """Find clocks that are off."""
    ahead = {survey.hosts[0].id: 0.0}
    for host in survey.hosts[1:]:
        there, back = (survey.path(*p) for p in ((survey.hosts[0], host), (host, survey.hosts[0])))
        if there is not None:
            ahead[host.id] = there.ahead_s
        elif back is not None:
            ahead[host.id] = -back.ahead_s
    usual = statistics.median_low(ahead.values())
    for id, seconds in ahead.items():
        off = seconds - usual
        if abs(off) > CLOCKS_S:
            yield Finding(
                "clocks",
                f"the clock of {survey.host(id).name} differs from the others'",
                where=survey.host(id).name,
                got=f"it is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}",
                mend="timedatectl set-ntp true",
            )


def files(survey: Survey) -> Iterator[Finding]:
    """Find hosts on which a process may open too few files; each connection counts as one."""
    for host in survey.hosts:
        limits = host.limits
        if limits.files < FILES or limits.most_files < MOST_FILES:
            enough = _ENOUGH_FILES if limits.most_files < MOST_FILES else limits.most_files
            yield Finding(
                "files",
                "a process may open too few files and connections",
                where=host.name,
                got=f"{limits.files} at once, {limits.most_files} if it asks; "
                f"{FILES} and {MOST_FILES} are needed",
                mend=f"ulimit -n {min(enough, _ENOUGH_FILES)}",
            )


def memory(survey: Survey) -> Iterator[Finding]:
    """Find hosts with too little shared memory, through which loaders' workers pass batches."""
    for host in survey.hosts:
        limits = host.limits
        if min(limits.shared_bytes, limits.shared_free_bytes) < SHARED_BYTES:
            yield Finding(
                "memory",
                "there is too little shared memory for data loaders with workers",
                where=host.name,
                got=f"{limits.shared_free_bytes / 1e6:.0f} MB of "
                f"{limits.shared_bytes / 1e6:.0f} MB are free in /dev/shm",
                mend="mount -o remount,size=50% /dev/shm",
            )


def lost(survey: Survey) -> Iterator[Finding]:
    """Find hosts that went silent during the examination."""
    for id, key in survey.lost.items():
        host = survey.host(id)
        yield Finding(
            "start",
            f"{host.name} went silent",
            where=host.name,
            got=f"nothing came from it after: {key}",
            mend="shoal doctor",
        )


def _version(host: Host, what: str) -> str:
    version: str = getattr(host.versions, what)
    # a patch release of Python changes nothing that ranks share
    return ".".join(version.split(".")[:2]) if what == "python" else version


def _usual(values: Sequence[str | tuple[str, ...]]) -> str | tuple[str, ...]:
    return Counter(values).most_common(1)[0][0]
