"""Chunks on their way from one rank: some receives are posted ahead, so the link stays busy.

Why here: gloo sends nothing before the receiver has said that it is ready, and says so behind
whatever the same connection has still to send. Who posts a receive only when it needs the chunk
waits for a way to the sender and back. Costs no byte; the memory of the chunks ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from torch import Tensor

from shoal.contracts.comm import Comm, Pending

AHEAD = 3


def arrivals(comm: Comm, source: int, landing: Iterable[Tensor]) -> Iterator[Tensor]:
    """Receive into each of `landing` in turn, and give it out when it has come.

    The first are posted at once.

    What is given out is the caller's until it asks for the next.
    """
    places = iter(landing)
    pending = deque((place, comm.receive(place, source)) for place in islice(places, AHEAD - 1))

    def arrive() -> Iterator[Tensor]:
        while pending:
            pending.extend((place, comm.receive(place, source)) for place in islice(places, 1))
            place, receive = pending.popleft()
            receive.wait()
            yield place

    return arrive()


def landing_beside(chunks: Sequence[Tensor]) -> list[Tensor]:
    """Where chunks of these sizes may land for a while.

    As many buffers as there are receives ahead, taking turns.
    """
    if not chunks:
        return []
    buffers = chunks[0].new_empty(AHEAD, max(chunk.numel() for chunk in chunks))
    return [buffers[i % AHEAD, : chunk.numel()] for i, chunk in enumerate(chunks)]


def after_sending(chunks: Sequence[Tensor], sends: Sequence[Pending]) -> Iterator[Tensor]:
    """Each chunk as soon as it has been sent: then a total may land there.

    `sends` may grow, `AHEAD` before its use.
    """
    for index, chunk in enumerate(chunks):
        sends[index].wait()
        yield chunk
