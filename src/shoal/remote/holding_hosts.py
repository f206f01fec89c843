"""Hosts that hold layers of a model and bring no rows, and the ways of orders to them.

The first rank that trains sends all orders (station_messages.py). Each rank that trains gets the
answers. The hosts' own side: servers/stations.py.
"""

from __future__ import annotations

from typing import Any, final

from torch import nn

from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError
from shoal.remote.channel import Channel
from shoal.remote.station_messages import StationOrder
from shoal.remote.verbs import End

_UNDER_WAY = 16  # tensors at most that a rank has sent and that have not gone yet


@final
class HoldingHosts:
    """The hosts that hold layers and bring no rows, as every rank sees them.

    Args:
        comm: all ranks. All of them open these ways at once.
    """

    def __init__(self, comm: Comm) -> None:
        workers = comm.workers
        self.is_one = comm.rank >= workers
        self.orders = comm.channel("orders", idle=self.is_one)
        self.peers = range(workers, comm.size) if self.is_one else range(workers)
        self.trainers, self.hosts = range(workers), comm.topology.hosts[workers:]
        self.calls = 0  # calls of parallelize: the hosts take part in the first
        self._comm, self._stations = comm, list[Comm]()
        ends = () if self.is_one else range(workers, comm.size)
        self._ways = [Channel[Any](self.orders, host, most=_UNDER_WAY) for host in ends]
        self._ended = self.is_one

    def open_stations(self) -> Comm:
        """Open the channel of a pipeline's values among all ranks (a collective)."""
        if not self._stations:
            self._stations.append(self._comm.channel("stations"))
        return self._stations[0]

    def tell_all(self, order: StationOrder) -> None:
        """Send each of these hosts an order. The first rank that trains calls this."""
        for number in range(len(self.hosts)):
            self.way(number).post(order)

    def way(self, number: int) -> Channel[Any]:
        """Return this rank's end of the way to one host.

        Raises:
            UsageError: the session has ended.
        """
        if self._ended:
            raise UsageError(
                "the session that the model was parallelised in has ended",
                do="train within the session",
            )
        return self._ways[number]

    def drain(self) -> None:
        """Tell the hosts that this rank asks no more."""
        if not self._ended:
            self.tell_all(End())
            for way in self._ways:
                way.settle()
            self._ended = True

    def abandon(self) -> None:
        """Leave everything: no thread of this rank works for these hosts."""

    def close(self) -> None:
        """Do the same as `abandon`."""


def plain_settings(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes that are plain values."""
    return {
        n: v
        for n, v in vars(module).items()
        if not n.startswith("_") and n != "training" and _is_plain(v)
    }


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, int | float | str)
        or (isinstance(value, tuple) and all(map(_is_plain, value)))
    )
