"""Inside each host first, then one slice a host across: a shared link carries no slice twice.

    host a, ranks 0 1; host b, ranks 2 3. Slice 0 belongs to rank 0, its collector on b is rank 2.

    reduce 1   1 ── slice 0 ──▶ 0    3 ── slice 0 ──▶ 2     every rank to its host's collector,
                                                            which adds in rank order
           2   0 ◀─── b's slice 0, summed ─────────── 2     collectors to the owner,
                                                            which adds the hosts' sums
                                                            in order
    gather 1   0 ──── slice 0 ──────────────────────▶ 2     the owner to collectors,
                                                            and to the ranks beside it
           2   0 ── slice 0 ──▶ 1    2 ── slice 0 ──▶ 3     collectors to the ranks beside them

On its own host an owner collects its slice itself; on another the rank does that has the owner's
place there, counted round where that host has fewer. 4 steps; 2 where each rank has a host of its
own (then these are the messages of `direct`) or all share one. On H hosts of equally many ranks,
2·n·(H−1)/H bytes leave each, where `direct` sends P/H times as many; a rank sends and receives
2·n·(P−1)/P in all, like there. Hosts may have different numbers of ranks, in any numbering. Empty
slices are sent by nobody and awaited by nobody.

Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 4 (sum within a server,
all-reduce between servers, broadcast within), cut into slices so that all of a host's ranks take
part, as in Horovod's hierarchical all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from shoal.contracts.comm import Comm, Pending
from shoal.contracts.exchange import Bucket, Coding, SplitExchange
from shoal.core.cost import Traffic
from shoal.core.facts import Topology


@final
@dataclass(frozen=True)
class Hierarchical(SplitExchange):
    """Slices to their owners and back by way of one collector on every host."""

    name: ClassVar[str] = "hierarchical"

    def fits(self, topology: Topology) -> bool:
        """Return whether some hosts have several ranks. Without such a host it is `direct`."""
        return 1 < len(topology.ranks_on) < topology.size

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Return the bytes: foreign slices there and the own one back, as under `direct`.

        Between hosts a rank sends for all slices that it collects.
        """
        return self.coding_traffic(bucket, bucket, bucket, topology)

    def coding_traffic(
        self, bucket: Bucket, there: Bucket, back: Bucket, topology: Topology
    ) -> Traffic:
        """Return the bytes if codes cross between hosts on the way to owners.

        Inside a host values go as they are then. Codes go all the way back, because all ranks must
        read the same values.
        """
        ranks, other_hosts = range(topology.size), len(topology.ranks_on) - 1
        plain, sizes, returned = (b.slice_bytes(topology.size) for b in (bucket, there, back))
        beside = [len(topology.ranks_on[host]) - 1 for host in topology.hosts]
        inside, across, home = (_collected_bytes(s, topology) for s in (plain, sizes, returned))
        crossing = [across[r] - sizes[r] + other_hosts * returned[r] for r in ranks]
        sent = (sum(plain) - inside[r] + crossing[r] + beside[r] * home[r] for r in ranks)
        received = (
            beside[r] * inside[r] + other_hosts * sizes[r] + sum(returned) - returned[r]
            for r in ranks
        )
        rounds = 2 * ((other_hosts > 0) + any(beside)) if there.numel else 0
        return Traffic(tuple(sent), tuple(received), rounds, tuple(crossing))

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Add up collected slices inside the host, then the hosts' sums of one's own slice."""
        own, own_host = slices[comm.rank], comm.topology.hosts[comm.rank]
        hosts, sends = list(comm.topology.ranks_on), list[Pending]()
        afar = [_collector(comm.rank, host, comm.topology) for host in hosts if host != own_host]
        across = _receive(comm, own, afar) if own.numel() else []
        for owner in _summed_inside(slices, comm, sends):
            if owner != comm.rank:
                sends.append(comm.send(slices[owner], owner))
        _add(own, across, place=hosts.index(own_host))
        for send in sends:
            send.wait()

    def reduce_codes(self, coding: Coding, comm: Comm) -> None:
        """Add up slices as `reduce_scatter` does, but send hosts' sums as codes."""
        rank, sends = comm.rank, list[Pending]()
        across: list[tuple[Tensor, Pending] | None] = [None]
        if coding.slices[rank].numel():
            across = [
                None
                if host == comm.topology.hosts[rank]
                else _landing(comm, coding.landing(rank), _collector(rank, host, comm.topology))
                for host in comm.topology.ranks_on
            ]
        for owner in _summed_inside(coding.slices, comm, sends):
            if owner != rank:
                sends.append(comm.send(coding.message(owner), owner))
        coding.add(rank, (None if part is None else _wait_for_flight(part) for part in across))
        for send in sends:
            send.wait()

    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Send one's own slice to all collectors, and collected ones to the host's other ranks."""
        hosts = comm.topology.ranks_on
        own, own_host = slices[comm.rank], comm.topology.hosts[comm.rank]
        beside = [r for r in hosts[own_host] if r != comm.rank]
        afar = [_collector(comm.rank, host, comm.topology) for host in hosts if host != own_host]
        collected = _owners_for(slices, comm)[::-1]  # its own first, then as the owners send

        across = {o: comm.receive(slices[o], o) for o in collected if o != comm.rank}
        pending = [
            comm.receive(slices[o], r) for r in beside for o in _owners_for(slices, comm, r)[::-1]
        ]
        pending += [comm.send(own, r) for r in afar if own.numel()]
        for o in collected:
            if o != comm.rank:
                across[o].wait()
            pending += [comm.send(slices[o], r) for r in beside]
        for transmission in pending:
            transmission.wait()


def _collector(owner: int, host: str, topology: Topology) -> int:
    """Return the rank that collects the owner's slice on a host: at home the owner itself."""
    ranks = topology.ranks_on[host]
    return ranks[topology.local_ranks[owner] % len(ranks)]


def _collected_bytes(sizes: Sequence[int], topology: Topology) -> list[int]:
    """Bytes of the slices that each rank collects."""
    # bytes of all slices, by the places of their owners on their hosts
    at_place = [0] * topology.ranks_per_host
    for place, size in zip(topology.local_ranks, sizes, strict=True):
        at_place[place] += size
    return [
        sum(at_place[place :: len(topology.ranks_on[host])])
        for place, host in zip(topology.local_ranks, topology.hosts, strict=True)
    ]


def _summed_inside(slices: Sequence[Tensor], comm: Comm, sends: list[Pending]) -> Iterator[int]:
    """Give the owners of the slices that this rank collects, each when its slice is the host's sum.

    Adds to `sends` the messages that are under way to the host's other ranks.
    """
    topology, rank = comm.topology, comm.rank
    beside = [r for r in topology.ranks_on[topology.hosts[rank]] if r != rank]
    inside = {o: _receive(comm, slices[o], beside) for o in _owners_for(slices, comm)}
    sends += [comm.send(slices[o], r) for r in beside for o in _owners_for(slices, comm, r)]
    for owner, parts in inside.items():
        _add(slices[owner], parts, place=topology.local_ranks[rank])
        yield owner


def _landing(comm: Comm, part: Tensor, source: int) -> tuple[Tensor, Pending]:
    return part, comm.receive(part, source)


def _wait_for_flight(part: tuple[Tensor, Pending]) -> Tensor:
    part[1].wait()
    return part[0]


def _owners_for(slices: Sequence[Tensor], comm: Comm, rank: int | None = None) -> list[int]:
    """Return the owners of the slices that a rank collects, by default this rank.

    Empty slices are left out. Owners come from the next rank on, and the rank itself is last.
    """
    topology, rank = comm.topology, comm.rank if rank is None else rank
    owners = [(rank + step) % comm.size for step in range(1, comm.size + 1)]
    return [
        o
        for o in owners
        if slices[o].numel() and _collector(o, topology.hosts[rank], topology) == rank
    ]


def _receive(comm: Comm, like: Tensor, sources: Sequence[int]) -> list[tuple[Tensor, Pending]]:
    """Start receiving a tensor from each source."""
    parts = like.new_empty(len(sources), like.numel()).unbind()
    return [(part, comm.receive(part, source)) for part, source in zip(parts, sources, strict=True)]


def _add(own: Tensor, addends: Sequence[tuple[Tensor, Pending]], place: int) -> None:
    """Add the messages to `own`, which has its `place` among them, in that order.

    So the bits depend on no owner.
    """
    total: Tensor | None = None
    for part, pending in addends[:place]:
        pending.wait()
        total = part if total is None else total.add_(part)
    if total is not None:
        own.add_(total)
    for part, pending in addends[place:]:
        pending.wait()
        own.add_(part)
