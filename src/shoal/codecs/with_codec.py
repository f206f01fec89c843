"""The common side of exchanges that carry a codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.contracts.codec import Codec
from shoal.contracts.exchange import Exchange
from shoal.core.cost import Pace
from shoal.core.facts import Cluster, Topology


@dataclass(frozen=True)
class WithCodec(Exchange):
    """An exchange, and the codec that it carries. No search picks it unasked."""

    exact: ClassVar[bool] = False

    exchange: Exchange
    codec: Codec

    def __str__(self) -> str:
        return f"{self.exchange}+{self.codec}"

    @property
    def least_dims(self) -> int:
        """The codec's least number of dimensions."""
        return self.codec.least_dims

    def fits(self, topology: Topology) -> bool:
        """Return whether the exchange fits."""
        return self.exchange.fits(topology)

    def pace(self, cluster: Cluster) -> Pace:
        """Return the pace of the exchange's own messages. Coding is priced apart."""
        return self.exchange.pace(cluster)
