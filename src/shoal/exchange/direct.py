"""Every slice goes straight to its owner, which adds them and sends the sum straight back.

    reduce   rank r ── slice o of its own ──▶ owner o        for every r ≠ o; the owner adds in
    gather   rank r ◀── slice o, summed ───── owner o        rank order

2 steps, whatever P. Each rank sends and receives 2·n·(P−1)/P bytes, to the byte as the slices fall;
empty slices (fewer elements than ranks) are sent by nobody and awaited by nobody. Added in the
order of the ranks, so that the bits depend neither on which message comes first nor on how
parameters are put into buckets.

Source: CaffeOnSpark's socket exchange, in which every node is master of a slice; the pairwise
exchange for reduce-scatter of Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005.
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
from shoal.core.host_copies import to_host


@final
@dataclass(frozen=True)
class Direct(SplitExchange):
    """Slices to their owners and back, each in one message."""

    name: ClassVar[str] = "direct"

    @property
    def serves(self) -> bool:
        """Its messages are each worker's own."""
        return True

    def at_once(self, topology: Topology) -> int:
        """One to every other rank."""
        return max(1, topology.size - 1)

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """A worker sends foreign slices once and its own to all workers; a server sends its own.

        As much comes in.
        """
        return self.coding_traffic(bucket, bucket, bucket, topology)

    def coding_traffic(
        self, bucket: Bucket, there: Bucket, back: Bucket, topology: Topology
    ) -> Traffic:
        """Likewise: there and back each slice is as long as its message."""
        workers, size = topology.workers, topology.size
        sizes, returned = there.slice_bytes(size), back.slice_bytes(size)
        sent, received, leaving = [0] * size, [0] * size, [0] * size
        all_there, all_back = sum(sizes), sum(returned)
        for ranks in topology.ranks_on.values():
            beside, training = sum(sizes[r] for r in ranks), sum(r < workers for r in ranks)
            for r in ranks:
                trains = r < workers
                sent[r] = (all_there - sizes[r]) * trains + (workers - trains) * returned[r]
                received[r] = (workers - trains) * sizes[r] + (all_back - returned[r]) * trains
                leaving[r] = (all_there - beside) * trains + (workers - training) * returned[r]
        rounds = 2 if size > 1 and there.numel else 0
        return Traffic(tuple(sent), tuple(received), rounds, tuple(leaving))

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Send foreign slices to their owners; add up one's own, in the order of the ranks."""
        own = slices[comm.rank]
        # a server's begins with rank 0's
        home = comm.rank if comm.rank < comm.workers else 0
        landing = iter(own.new_empty(comm.workers - 1, own.numel()).unbind())
        parts = [own if r == home else next(landing) for r in range(comm.workers)]
        receives, sends = _deliver(slices, parts, comm)  # gradient 9
        total = parts[0]
        for r, part in enumerate(parts):
            if r in receives:
                receives[r].wait()
            if r == home and r > 0:
                # a + b has the bits of b + a, and from here on the sum stands in its place
                total = own.add_(total)
            elif r > 0:
                total.add_(part)
        for send in sends:
            send.wait()

    def reduce_codes(self, coding: Coding, comm: Comm) -> None:
        """Likewise. Codes are added as they come, in the order of the ranks."""
        rank, nothing = comm.rank, coding.landing(comm.rank)[:0]
        trains = rank < comm.workers
        outgoing = [
            coding.message(r) if trains and r != rank else nothing for r in range(comm.size)
        ]
        landing = [coding.landing(rank) if r != rank else nothing for r in range(comm.workers)]
        receives, sends = _deliver(outgoing, landing, comm)

        def arrive() -> Iterator[Tensor | None]:
            for r, part in enumerate(landing):
                if r in receives:
                    receives[r].wait()
                yield None if r == rank else part

        coding.add(rank, arrive())
        for send in sends:
            send.wait()

    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Send one's own slice to all workers, and receive the other slices in place."""
        own = slices[comm.rank]
        pending = [
            comm.receive(slices[r], r)
            for r in comm.others
            if comm.rank < comm.workers and slices[r].numel()
        ]
        at_host = to_host(own)  # once for all, where it lies on a GPU
        pending += comm.send_in_turn(
            (r, [at_host]) for r in comm.others if r < comm.workers and own.numel()
        )
        comm.finish(pending)


def _deliver(
    outgoing: Sequence[Tensor], landing: Sequence[Tensor], comm: Comm
) -> tuple[dict[int, Pending], list[Pending]]:
    """Start to receive one message from each worker, and to send one to each owner.

    Args:
        outgoing: this rank's part of each owner's slice. A server sends nothing.
        landing: the place for each worker's part. Nothing comes from this rank itself, and nothing
            if there is no element.
        comm: the ranks.

    Returns:
        The receives by rank, and the sends; `outgoing` may change once these have ended.
    """
    trains = comm.rank < comm.workers
    receives = {
        r: comm.receive(landing[r], r)
        for r in comm.others
        if r < comm.workers and landing[r].numel()
    }
    sends = comm.send_in_turn(
        (r, [outgoing[r]]) for r in comm.others if trains and outgoing[r].numel()
    )
    return receives, sends
