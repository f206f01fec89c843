"""Checks of the ways between hosts: interfaces, routes, firewalls, full packets, rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from shoal.core.interfaces import is_loopback, stays_here
from shoal_tools.doctor import forms
from shoal_tools.doctor.facts import Host
from shoal_tools.doctor.finding import Finding
from shoal_tools.doctor.survey import Attempt, Reached, Survey
from shoal_tools.doctor.wire import ANOTHER, NO_ROUTE, REFUSED, UNPROVED

# above this rate a processor may limit a measurement, and not the link
_JUDGED_BYTES_PER_S = 2.5e9 / 8
_SMALLEST = 1280  # packet size that every IPv6 network passes

Way = tuple[str, str]  # ids of the host that sends, and of the host that receives


def interface(survey: Survey) -> Iterator[Finding]:
    """Find hosts that tell the others an address at which they cannot be reached."""
    for host in survey.hosts:
        problem = _interface_problem(survey, host)
        if problem:
            what, got = problem
            better = _reached_at(survey, host)
            mend = "unset GLOO_SOCKET_IFNAME"
            if better:
                mend = f"export GLOO_SOCKET_IFNAME={forms.interface(better)}"
            yield Finding("interface", what, host.name, got, mend)


def firewall(survey: Survey) -> Iterator[Finding]:
    """Find hosts that do not reach another one at any address."""
    blocked = dict[str, list[Host]]()
    for first, second in _once(survey):
        for sender, receiver in _blocked_ways(survey, first, second):
            blocked.setdefault(receiver.id, []).append(sender)
    for id, senders in blocked.items():
        yield _shut(survey, survey.host(id), senders)
    for sender, receiver in survey.pairs():
        failed = survey.attempts(sender, receiver)
        way, path = survey.way(sender, receiver), survey.path(sender, receiver)
        if way is None and any(attempt.outcome in (NO_ROUTE, ANOTHER) for attempt in failed):
            yield _no_route(sender, receiver, failed)
        elif way is None and any(attempt.outcome == UNPROVED for attempt in failed):
            yield _stranger(sender, receiver, failed)
        # a host that went silent has reported nothing
        if way is not None and path is None and sender.id in survey.paths:
            yield Finding(
                "firewall",
                f"connections from {sender.name} to {receiver.name} are made, and carry nothing",
                where=f"{sender.name} → {receiver.name}",
                got=f"no answer from {way.address}:{way.port} once it is connected",
                mend=_allow(receiver, [sender], "input"),
                on=receiver.name,
            )


def mtu(survey: Survey) -> Iterator[Finding]:
    """Find ways on which full packets are lost, and small ones pass."""
    passes = dict[Way, int]()
    for first, second in survey.pairs():
        path = survey.path(first, second)
        if path is not None:
            for way, size in (
                ((first.id, second.id), path.passes),
                ((second.id, first.id), path.passes_back),
            ):
                if size is not None:
                    passes[way] = min(size, passes.get(way, size))
    for host, ways in _by_host(survey, passes):
        size = min(passes[way] for way in ways) or _SMALLEST
        yield Finding(
            "mtu",
            "full packets are lost on the way, and small ones pass",
            where=", ".join(_arrow(survey, way) for way in ways),
            got=", ".join(
                f"{_arrow(survey, way)}: {passes[way] or 'less than 576'} bytes pass"
                for way in ways
            )
            + f"; {host.name} sends up to {host.interfaces.mtus.get(_way_of(survey, host), 0)}",
            mend=f"ip link set dev {forms.interface(_way_of(survey, host))} mtu {size}",
            on=host.name,
        )


def rate(survey: Survey) -> Iterator[Finding]:
    """Find links that carry less than half of the expected rate, or of the fastest link's."""
    slow = {way: survey.rates[way] for way in slow_pairs(survey)}
    fastest = max(survey.rates.values(), default=0.0)
    for host, ways in _by_host(survey, slow):
        device = _way_of(survey, host)
        sends = any(sender == host.id for sender, _ in ways)
        expected = f"{mbits(survey.expected_bytes_per_s)} expected"
        yield Finding(
            "rate",
            f"the link of {host.name} is slow",
            where=", ".join(_arrow(survey, way) for way in ways),
            got=", ".join(f"{_arrow(survey, way)} {mbits(slow[way])}" for way in ways)
            + f"; the fastest carries {mbits(fastest)}, {expected}",
            mend=f"tc qdisc del dev {forms.interface(device)} root"
            if sends and device in host.interfaces.shaped
            else f"ethtool -s {forms.interface(device)} autoneg on",
            on=host.name,
        )


def slow_pairs(survey: Survey) -> set[Way]:
    """Return the directions that carry less than half of the expected rate, or of the fastest."""
    fastest = max(survey.rates.values(), default=0.0)
    bound = min(max(survey.expected_bytes_per_s, fastest), _JUDGED_BYTES_PER_S) / 2
    return {way for way, rate in survey.rates.items() if rate < bound}


def mbits(bytes_per_s: float) -> str:
    """Write a rate for people."""
    return f"{bytes_per_s * 8e-6:,.0f} Mbit/s"


def _interface_problem(survey: Survey, host: Host) -> tuple[str, str] | None:
    """Describe the problem of the interface that a host uses, with the facts seen; None if there is
    none.
    """
    told = f"GLOO_SOCKET_IFNAME={','.join(host.interfaces.asked)}"
    others = [other for other in survey.hosts if other.id != host.id]
    if absent := set(host.interfaces.asked) - set(host.interfaces.names):
        there = ", ".join(host.interfaces.names)
        return f"{host.name} has no interface {', '.join(absent)}", f"{told}; it has {there}"
    if host.interfaces.asked and not host.announced:
        return "the interface that was asked for has no address, or is down", told
    if survey.size == 1:
        return None
    if not host.announced or is_loopback(host.announced):
        used = host.announced or "no address"
        return f"{host.name} uses an interface that leads to no other host", f"{told}; {used}"
    name = host.interface_of(host.announced)
    attempts = [a for other in others for a in survey.attempts(other, host)]
    tried = [attempt for attempt in attempts if attempt.address == host.announced]
    elsewhere = [
        attempt
        for attempt in attempts
        if not attempt.outcome and host.interface_of(attempt.address) != name
    ]
    missed = [attempt for attempt in tried if attempt.outcome]
    # if the user does not ask for an interface, the one that leads to the others is used
    if host.interfaces.asked and (elsewhere or stays_here(name)):
        got = f"{host.announced} ({name}): {missed[0].outcome if missed else 'of this host alone'}"
        if elsewhere:
            better = elsewhere[0].address
            got += f"; {better} ({host.interface_of(better)}): connects"
        return f"the others do not reach {host.name} at the interface that it uses", got
    return None


def _reached_at(survey: Survey, host: Host) -> str:
    """Return the interface at which others reach a host, or one that may lead to them."""
    attempts = [a for other in survey.hosts for a in survey.attempts(other, host)]
    addresses = [attempt.address for attempt in attempts if not attempt.outcome]
    addresses += [address.text for address in host.outer]
    return next((name for a in addresses if (name := host.interface_of(a))), "")


def _blocked_ways(survey: Survey, first: Host, second: Host) -> Iterator[tuple[Host, Host]]:
    """Yield the senders of two hosts from which nothing comes, each with its receiver."""
    both = [(first, second), (second, first)]
    failed = [
        (sender, receiver)
        for sender, receiver in both
        if (attempts := survey.attempts(sender, receiver))
        and all(attempt.outcome not in ("", NO_ROUTE, ANOTHER, UNPROVED) for attempt in attempts)
    ]
    if len(failed) < 2:
        yield from failed
        return
    # a connection needs both directions: the messages that came show which one is blocked
    for came in (_requests, _refusal, _datagrams):
        passes = [came(survey, *way) for way in both]
        if any(passes) and not all(passes):
            yield from (way for way, passed in zip(both, passes, strict=True) if not passed)
            return
    yield from both


def _requests(survey: Survey, sender: Host, receiver: Host) -> bool:
    """Return whether connection requests came, though the answers to them did not."""
    return sender.id in survey.reached.get(receiver.id, Reached()).asked


def _refusal(survey: Survey, sender: Host, receiver: Host) -> bool:
    """Return whether a refusal came, which answers a message of the other direction."""
    return any(attempt.outcome == REFUSED for attempt in survey.attempts(receiver, sender))


def _datagrams(survey: Survey, sender: Host, receiver: Host) -> bool:
    """Return whether datagrams came."""
    return sender.id in survey.reached.get(receiver.id, Reached()).heard


def _shut(survey: Survey, receiver: Host, senders: list[Host]) -> Finding:
    names = ", ".join(sender.name for sender in senders)
    tried = [a for sender in senders for a in survey.attempts(sender, receiver)]
    got = "; ".join(
        f"{sender.name} → {receiver.name} at {a.address}:{a.port}: {a.outcome}"
        for sender in senders
        for a in survey.attempts(sender, receiver)[:1]
    )
    back = [s.name for s in senders if survey.way(receiver, s) is not None]
    if back:
        got += f"; the other way, {receiver.name} → {', '.join(back)}, connects"
    at = receiver
    hooks = {chain.hook for chain in receiver.firewall.chains}
    sending = [s for s in senders if any(c.hook == "output" for c in s.firewall.chains)]
    if "input" not in hooks and len(senders) == 1 and sending:
        at = senders[0]
        mend = _allow(at, [receiver], "output")
    else:
        mend = _allow(at, senders, "input")
    return Finding(
        "firewall",
        f"what {names} sends to {receiver.name} does not come: a firewall drops it",
        where=f"{names} → {receiver.name}",
        got=got or f"{len(tried)} attempts",
        mend=mend,
        on=at.name,
    )


def _no_route(sender: Host, receiver: Host, failed: Iterable[Attempt]) -> Finding:
    device = next((address.interface for address in sender.outer), "eth0")
    return Finding(
        "firewall",
        f"no route leads from {sender.name} to {receiver.name}",
        where=f"{sender.name} → {receiver.name}",
        got="; ".join(f"{attempt.address}: {attempt.outcome}" for attempt in failed),
        mend=f"ip route add {forms.address(receiver.announced)} dev {forms.interface(device)}",
        on=sender.name,
    )


def _stranger(sender: Host, receiver: Host, failed: Iterable[Attempt]) -> Finding:
    return Finding(
        "firewall",
        f"somebody answers {sender.name} in place of {receiver.name}",
        where=f"{sender.name} → {receiver.name}",
        got="; ".join(f"{a.address}:{a.port}: {a.outcome}" for a in failed),
        mend=f"ip neigh show {forms.address(receiver.announced)}",
        on=sender.name,
    )


def _allow(host: Host, others: Iterable[Host], hook: str) -> str:
    """Return the command that lets packets from other hosts in, or to them out."""
    addresses = list(dict.fromkeys(forms.address(other.announced) for other in others))
    way = "from" if hook == "input" else "to"
    tools = host.firewall.tools
    if "ufw" in tools:
        return " && ".join(f"ufw insert 1 allow {way} {address}" for address in addresses)
    if "firewall-cmd" in tools:
        return " && ".join(
            f"firewall-cmd --zone=trusted --add-source={address}" for address in addresses
        )
    ends = "saddr" if hook == "input" else "daddr"
    chains = [chain for chain in host.firewall.chains if chain.hook == hook]
    if "nft" in tools and chains:
        return " && ".join(
            f"nft insert rule {' '.join(map(forms.name, (chain.family, chain.table, chain.name)))} "
            f"{'ip6' if ':' in address else 'ip'} {ends} {address} accept"
            for chain in chains
            for address in addresses
        )
    flag = "-s" if hook == "input" else "-d"
    program = {True: "ip6tables", False: "iptables"}
    return " && ".join(
        f"{program[':' in address]} -I {hook.upper()} {flag} {address} -j ACCEPT"
        for address in addresses
    )


def _by_host(survey: Survey, ways: Mapping[Way, float]) -> Iterator[tuple[Host, list[Way]]]:
    """Yield bad ways, grouped by the host that most of them share, or by the sender."""
    left = list(ways)
    while left:
        counts = Counter(host for way in left for host in way)
        most = max(counts.values())
        worst = next((way[0] for way in left if counts[way[0]] == most), None)
        worst = worst or next(way[1] for way in left if counts[way[1]] == most)
        yield survey.host(worst), [way for way in left if worst in way]
        left = [way for way in left if worst not in way]


def _way_of(survey: Survey, host: Host) -> str:
    """Return the interface by which a host talks to the others."""
    return host.interface_of(host.announced) or _reached_at(survey, host)


def _arrow(survey: Survey, way: Way) -> str:
    return f"{survey.host(way[0]).name} → {survey.host(way[1]).name}"


def _once(survey: Survey) -> Iterator[tuple[Host, Host]]:
    """Yield every pair of hosts once."""
    for number, first in enumerate(survey.hosts):
        for second in survey.hosts[number + 1 :]:
            yield first, second
