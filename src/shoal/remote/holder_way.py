"""The way of the ranks that train to one host that holds layers and brings no rows.

The first rank speaks for all. Ranks compare their questions before, so that each takes the answer
to its own.
"""

from __future__ import annotations

from typing import TypeVar, final

from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.remote.far_parameters import FarParameters
from shoal.remote.tail_hosts import TailHosts
from shoal.remote.tail_messages import TailMessage, TailStep

T = TypeVar("T")


@final
class HolderWay:
    """The way to one such host.

    Args:
        hosts: the ways between all ranks.
        number: the host's number among them.
        trainers: the ranks that train.
    """

    def __init__(self, hosts: TailHosts, number: int, trainers: Comm) -> None:
        self.comm, self.trainers = hosts.comm, trainers
        self._channel = hosts.ordering()[number]

    @property
    def speaks(self) -> bool:
        """Whether this rank's settings and values count."""
        return not self.trainers.rank

    def tell(self, message: TailMessage) -> None:
        """Send a message. All ranks that train call this."""
        if isinstance(message, TailStep):
            self._meet(message)
        if self.speaks:
            self._channel.post(message)

    def ask(self, message: TailMessage, kind: type[T]) -> T:
        """Send it, and wait for the answer."""
        self._meet(message)
        if self.speaks:
            self._channel.post(message)
        return self._channel.answer(kind)

    def settle(self) -> None:
        """Wait until all that was told has gone."""
        self._channel.settle()

    def _meet(self, message: TailMessage) -> None:
        self.trainers.numbers([0] * self.trainers.size, f"order to other hosts: {message.key}")


@final
class FarHolder(FarParameters):
    """The parameters of one host that brings no rows."""

    hosts: HolderWay

    def add_gradient(self, name: str, own: Tensor) -> None:
        mean = own.detach().clone().contiguous()
        trainers = self.hosts.trainers
        trainers.numbers([mean.numel()] * trainers.size, f"penalty on {name}")
        trainers.all_reduce(mean)
        super().add_gradient(name, mean.div_(trainers.size))
