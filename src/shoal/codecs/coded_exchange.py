"""An exchange that carries codes in place of values.

    scatter  rank r, slice of owner o   v = g + lost[o]    code = enc(v)    lost[o] = v − dec(code)
    owner                               s = its own part, exact, and each dec(code), in rank order
             on a ring                  g = the decoded sum so far, and this rank's own part
    gather   owner, of a sum            v = s + lost       code = enc(v)    lost = v − dec(code)
             owner, of a change         code = enc(change); the author of the change keeps the loss
             every rank, the owner too  takes dec(code): replicas keep the same bits

A message is one uint8 tensor for a slice and a peer: the code, followed by control in its own
bytes. In `scatter` control is added without coding. The cost is the bytes of the codes, the time to
make and read them on a lane, and one kept number for each value that this rank sends.
Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019; Tang et al., "DoubleSqueeze", ICML 2019, for the second leg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.codecs.carrier import CodedCarrier
from shoal.codecs.runs import RUN, Runs
from shoal.codecs.summed_terms import Summed
from shoal.contracts.codec import Codec, LinearCodec
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import (
    Bucket,
    Carrier,
    CodingExchange,
    Exchange,
    LiveBucket,
    Span,
    SplitExchange,
)
from shoal.core.cost import CodingPace, Pace, Traffic
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, Topology
from shoal.core.registry import of
from shoal.core.written_options import built, parsed, read


def read_exchange(text: str) -> Exchange:
    """Return the exchange that a plan or a pin writes.

    It may be an exchange such as `ring(chunk_bytes=1048576)`, or an exchange and a codec, such as
    `direct+int8(block=256)`.

    Raises:
        PlanError: there is none of that name, it has no such options, or it takes no codec.
    """
    first, *codecs = parsed(text)
    if first.name in of(Codec) and first.name not in of(Exchange):
        raise PlanError(
            f"{first.name} is a codec, and no exchange stands before it",
            got=text,
            do=f'write "direct+{built(Codec, first)}"',
        )
    exchange = built(Exchange, first)
    if not codecs:
        return exchange
    if len(codecs) > 1:
        raise PlanError(f"{text!r} has more than one codec", do='write one, as "direct+int8"')
    codec = built(Codec, codecs[0])
    both = with_codec(exchange, codec)
    if both is None:
        able = [name for name, kind in of(Exchange).items() if issubclass(kind, CodingExchange)]
        raise PlanError(
            f"{exchange} takes no codec: it adds up values on their way",
            got=text,
            expected="an exchange of messages that may be codes: " + ", ".join(able),
            do=f'write "{able[0]}+{codec}", or "{exchange}" without a codec',
        )
    return both


def with_codec(exchange: Exchange, codec: Codec) -> Coded | Summed | None:
    """Return an exchange that carries a codec's codes, or its terms; None if it carries neither."""
    if isinstance(exchange, CodingExchange):
        return Coded(exchange, codec)
    if isinstance(codec, LinearCodec) and exchange.exact:
        return Summed(exchange, codec)
    return None


def read_codec(text: str) -> Codec:
    """Return the codec that a plan writes, as `int8(block=128)` (PlanError if there is none)."""
    return read(Codec, text)


@final
@dataclass(frozen=True)
class Coded(SplitExchange):
    """An exchange that sends a codec's codes. No search picks it unasked."""

    name: ClassVar[str] = "coded"  # no plan writes this name
    exact: ClassVar[bool] = False

    exchange: CodingExchange
    codec: Codec

    def __str__(self) -> str:
        return f"{self.exchange}+{self.codec}"

    @property
    def least_dims(self) -> int:
        """The codec's least number of dimensions."""
        return self.codec.least_dims

    @property
    def serves(self) -> bool:
        """Whether the exchange serves."""
        return self.exchange.serves

    def fits(self, topology: Topology) -> bool:
        """Return whether the exchange fits."""
        return self.exchange.fits(topology)

    def carrier(self, bucket: LiveBucket) -> Carrier:
        """Return a carrier that remembers the losses of codes."""
        return CodedCarrier(self.exchange, self.codec, bucket)

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Return the exchange's traffic for slices as long as their messages."""
        there, back = (self._messages(codec, bucket, topology.size) for codec in self._codecs)
        return self.exchange.coding_traffic(bucket, there, back, topology)

    def _messages(self, codec: Codec, bucket: Bucket, ranks: int) -> Bucket:
        itemsize, runs = bucket.itemsize, Runs(codec)
        sizes = tuple(
            runs.nbytes(numel, max(itemsize, torch.float32.itemsize)) + nbytes - numel * itemsize
            for numel, nbytes in zip(
                bucket.slice_values(ranks), bucket.slice_bytes(ranks), strict=True
            )
        )
        return Bucket(sum(sizes), 1, sizes)

    @property
    def _codecs(self) -> tuple[Codec, Codec]:
        return self.codec.there, self.codec

    def pace(self, cluster: Cluster) -> Pace:
        """Return the pace of the exchange's own messages. Coding is priced apart."""
        return self.exchange.pace(cluster)

    def coding_s(
        self, bucket: Bucket, cluster: Cluster, ranks: int, servers: int = 0
    ) -> tuple[float, float]:
        """Return the seconds of coding on the way there, and on the way back.

        On the way there, a rank codes foreign slices, and reads the codes of its own. On the way
        back, it codes its own slice, and reads all. With servers one rank's seconds follow
        another's.
        """
        values, workers = bucket.slice_values(ranks), ranks - servers
        there, back = (cluster.coding(str(codec)) for codec in self._codecs)
        encodes, decodes = (self._seconds(there, values, way) for way in ("encode", "decode"))
        foreign_s = sum(encodes) - min(encodes[:workers])
        coming_s = max((workers - (r < workers)) * own for r, own in enumerate(decodes))
        encodes, decodes = (self._seconds(back, values, way) for way in ("encode", "decode"))
        return foreign_s + coming_s, max(encodes) + sum(decodes)

    def _seconds(self, pace: CodingPace, values: Sequence[int], way: str) -> list[float]:
        """Return the seconds to encode or to decode each slice."""
        value_s: float = getattr(pace, f"{way}_s")
        piece_s: float = getattr(pace, f"{way}_piece_s")
        pieces = [-(-count // RUN) if self.codec.in_runs else min(count, 1) for count in values]
        return [
            count * value_s + number * piece_s for count, number in zip(values, pieces, strict=True)
        ]

    def memory_bytes(self, bucket: Bucket, ranks: int) -> float:
        """Return the bytes of one number for each value, or 0 if codes lose nothing."""
        keeps = self.codec.feedback and not self.codec.exact
        return (
            sum(bucket.slice_values(ranks)) * max(bucket.itemsize, torch.float32.itemsize)
            if keeps
            else 0.0
        )

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Reduce slices without control, and without losses of earlier rounds."""
        self.carrier(_anonymous(slices)).reduce(comm)

    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Gather slices without control, and without losses of earlier rounds."""
        self.carrier(_anonymous(slices)).gather(comm)


def _anonymous(slices: Sequence[Tensor]) -> LiveBucket:
    """Make a bucket of values alone, without parameters."""
    names = [f"slice {rank}" for rank in range(len(slices))]
    numels = {name: part.numel() for name, part in zip(names, slices, strict=True)}
    spans = tuple((Span(name, 0, numel),) for name, numel in numels.items())
    return LiveBucket(slices[0], tuple(slices), spans, numels)
