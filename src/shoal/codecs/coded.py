"""An exchange that carries codes in place of values.

    scatter  rank r, slice of owner o   v = g + lost[o]    code = enc(v)    lost[o] = v − dec(code)
    owner                               s = its own part, exact, and each dec(code), in rank order
             on a ring                  g is what has come, decoded, and this rank's own
    gather   owner, of a sum            v = s + lost       code = enc(v)    lost = v − dec(code)
             owner, of a change         code = enc(change); whoever changed it keeps what is lost
             every rank, the owner too  takes dec(code): replicas keep the same bits

A message is one uint8 tensor a slice and peer: the code, and behind it control in its own bytes. In
`scatter` control is added as it is. Costs the bytes of the codes, the time to make and read them on
a lane, and a number kept for each value that this rank sends.
Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019; Tang et al., "DoubleSqueeze", ICML 2019, for the second leg.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.codecs.runs import LOST, Runs
from shoal.contracts.codec import Codec
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import (
    Bucket,
    Carrier,
    Coding,
    CodingExchange,
    Exchange,
    LiveBucket,
    Span,
    SplitExchange,
    StateDict,
)
from shoal.core.cost import Pace, Traffic
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import Cluster, Topology
from shoal.core.registry import of
from shoal.core.written import built, parsed, read

# legs, each of which has a memory of its own
_SCATTER, _GATHER, _CHANGES, _OWNER = "scatter", "gather", "changes", "owner"


def exchange_named(text: str) -> Exchange:
    """The exchange that a plan or a pin writes, such as `ring(chunk_bytes=1048576)`, or an exchange
    and a codec, such as `direct+int8(block=256)`.

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
    if not isinstance(exchange, CodingExchange):
        able = [name for name, kind in of(Exchange).items() if issubclass(kind, CodingExchange)]
        raise PlanError(
            f"{exchange} takes no codec: it adds up values on their way",
            got=text,
            expected="an exchange of messages that may be codes: " + ", ".join(able),
            do=f'write "{able[0]}+{codec}", or "{exchange}" without a codec',
        )
    return Coded(exchange, codec)


def codec_named(text: str) -> Codec:
    """The codec that a plan writes, such as `int8(block=128)` (PlanError where there is none)."""
    return read(Codec, text)


@final
@dataclass(frozen=True)
class Coded(SplitExchange):
    """An exchange whose values a codec makes into codes. Never planned unasked."""

    name: ClassVar[str] = "coded"  # that no plan writes
    exact: ClassVar[bool] = False

    exchange: CodingExchange
    codec: Codec

    def __str__(self) -> str:
        return f"{self.exchange}+{self.codec}"

    @property
    def runs(self) -> Runs:
        """The codec, run after run."""
        return Runs(self.codec)

    @property
    def least_dims(self) -> int:
        """As the codec has it."""
        return self.codec.least_dims

    def fits(self, topology: Topology) -> bool:
        """Where the exchange does."""
        return self.exchange.fits(topology)

    def carrier(self, bucket: LiveBucket) -> Carrier:
        """One that remembers what codes lost."""
        return CodedCarrier(self, bucket)

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """The exchange's, of slices as long as their messages."""
        values = bucket.slice_values(topology.size)
        sizes = tuple(
            self._message_bytes(numel, nbytes - numel * bucket.itemsize, bucket.itemsize)
            for numel, nbytes in zip(values, bucket.slice_bytes(topology.size), strict=True)
        )
        return self.exchange.traffic(Bucket(sum(sizes), 1, sizes), topology)

    def pace(self, cluster: Cluster) -> Pace:
        """That of the exchange's own messages: coding has a price of its own."""
        return self.exchange.pace(cluster)

    def coding_s(self, bucket: Bucket, cluster: Cluster, ranks: int) -> tuple[float, float]:
        """Seconds to code foreign slices and read what comes of the own one; and to code that, and
        read all.
        """
        values, pace = bucket.slice_values(ranks), cluster.coding(str(self.codec))
        own, foreign = max(values), sum(values) - min(values)
        there_s = foreign * pace.encode_s + (ranks - 1) * own * pace.decode_s
        return there_s, own * pace.encode_s + sum(values) * pace.decode_s

    def memory_bytes(self, bucket: Bucket, ranks: int) -> float:
        """One number for each value, or none where codes lose nothing."""
        keeps = self.codec.feedback and not self.codec.exact
        return sum(bucket.slice_values(ranks)) * _wide_bytes(bucket.itemsize) if keeps else 0.0

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Of slices without control, and without a memory of the round before."""
        self.carrier(_anonymous(slices)).reduce(comm)

    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Of slices without control, and without a memory of the round before."""
        self.carrier(_anonymous(slices)).gather(comm)

    def _message_bytes(self, numel: int, control_bytes: int, itemsize: int) -> int:
        return self.runs.nbytes(numel, _wide_bytes(itemsize)) + control_bytes


@final
class CodedCarrier(Carrier, Coding):
    """Carries one bucket's codes."""

    def __init__(self, coded: Coded, bucket: LiveBucket) -> None:
        if not bucket.flat.dtype.is_floating_point:
            raise UsageError(
                f"codecs take real numbers, and a bucket is of {bucket.flat.dtype}",
                where=", ".join(list(bucket.numels)[:2]),
                do=f'let "{coded.exchange}" carry these layers, without a codec',
            )
        self.exact = coded.codec.exact
        self.bucket = bucket
        self._exchange, self._runs = coded.exchange, coded.runs
        self._wide = torch.float64 if bucket.flat.dtype == torch.float64 else torch.float32
        self._feedback = coded.codec.feedback and not coded.codec.exact
        # of each leg and slice, by what it is
        self._memory: dict[tuple[str, int], dict[str, Tensor]] = {}

    def reduce(self, comm: Comm) -> None:
        self._exchange.reduce_codes(self, comm)

    def gather(self, comm: Comm) -> None:
        values = self.bucket.values(comm.rank)
        for rank, code in self._gathered(values, _GATHER, comm):
            self._put(code, self.bucket.values(rank))

    def gather_changes(self, changes: Tensor, comm: Comm) -> None:
        for rank, code in self._gathered(changes, _CHANGES, comm):
            values = self.bucket.values(rank)
            if values.dtype == self._wide:
                self._runs.decode_add(code, values)
            else:
                wide = values.to(self._wide)
                self._runs.decode_add(code, wide)
                values.copy_(wide)

    def message(self, owner: int) -> Tensor:
        return self._message(owner, self.bucket.values(owner), _SCATTER)

    def landing(self, owner: int) -> Tensor:
        return self.bucket.flat.new_empty(self._message_bytes(owner), dtype=torch.uint8)

    def add(self, owner: int, parts: Iterable[Tensor | None]) -> None:
        values, control = self.bucket.values(owner), self.bucket.control(owner)
        total: Tensor | None = None
        counted = torch.zeros_like(control)
        for part in parts:
            code, behind = (None, control) if part is None else self._parted(part, owner)
            counted.add_(behind)
            if total is None:
                total = values.to(self._wide)
                if code is not None:
                    total = torch.empty_like(total)
                    self._runs.decode(code, total)
            elif code is not None:
                self._runs.decode_add(code, total)
            else:  # a + b has the bits of b + a
                total = total.add_(values)
        if total is not None:
            values.copy_(total)
        control.copy_(counted)

    def kept(self, label: str, rank: int) -> Tensor:
        memory = self._memory.setdefault((_OWNER, rank), {})
        if label not in memory:
            memory[label] = self._zeros(rank)
        return memory[label]

    def tensors(self) -> Sequence[Tensor]:
        return [numbers for memory in self._memory.values() for numbers in memory.values()]

    def state_dict(self) -> StateDict:
        bucket = self.bucket
        state: StateDict = {}
        for (leg, rank), memory in self._memory.items():
            for label, numbers in memory.items():
                parts = numbers.split([span.stop - span.start for span in bucket.spans[rank]])
                for span, part in zip(bucket.spans[rank], parts, strict=True):
                    entries = state.setdefault(span.name, {})
                    if f"{leg}.{label}" not in entries:
                        entries[f"{leg}.{label}"] = part.new_zeros(bucket.numels[span.name])
                    entries[f"{leg}.{label}"][span.start : span.stop] = part
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        bucket = self.bucket
        self._memory.clear()
        for rank, spans in enumerate(bucket.spans):
            kinds = {kind for span in spans for kind in state.get(span.name, {})}
            for kind in sorted(kinds):
                leg, _, label = kind.partition(".")
                numbers = torch.cat(
                    [
                        entries[kind][span.start : span.stop].to(bucket.flat.device, self._wide)
                        if kind in (entries := state.get(span.name, {}))
                        else bucket.flat.new_zeros(span.stop - span.start, dtype=self._wide)
                        for span in spans
                    ]
                )
                if numbers.any():  # else it is another rank's, or as at first
                    self._memory.setdefault((leg, rank), {})[label] = numbers

    def _gathered(self, values: Tensor, leg: str, comm: Comm) -> Iterator[tuple[int, Tensor]]:
        """Every rank's code of its values; its control is in its place by then."""
        messages = [
            self._message(rank, values, leg) if rank == comm.rank else self.landing(rank)
            for rank in range(comm.size)
        ]
        self._exchange.all_gather(messages, comm)
        for rank, message in enumerate(messages):
            code, control = self._parted(message, rank)
            if rank != comm.rank:
                self.bucket.control(rank).copy_(control)
            yield rank, code

    def _put(self, code: Tensor, values: Tensor) -> None:
        """Write what a code stands for, in the bucket's own type."""
        if values.dtype == self._wide:
            self._runs.decode(code, values)
        else:
            wide = torch.empty_like(values, dtype=self._wide)
            self._runs.decode(code, wide)
            values.copy_(wide)

    def _message(self, rank: int, values: Tensor, leg: str) -> Tensor:
        """The code of a slice's values, with what was lost of those before, and its control."""
        message = self.landing(rank)
        numel = self._runs.nbytes(len(values), self._wide.itemsize)
        message[numel:].copy_(self.bucket.control(rank).view(torch.uint8))
        if not len(values):
            return message
        memory = self._memory.setdefault((leg, rank), {})
        lost = None
        if self._feedback and leg != _CHANGES:
            lost = memory.pop(LOST, None)
            lost = self._zeros(rank) if lost is None else lost
        self._runs.encode(
            values.to(self._wide) if lost is None else values, message[:numel], lost, memory
        )
        if lost is not None:
            memory[LOST] = lost
        return message

    def _zeros(self, rank: int) -> Tensor:
        device = self.bucket.flat.device
        return torch.zeros(self.bucket.num_values[rank], dtype=self._wide, device=device)

    def _parted(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """The code, and the control that stood behind it."""
        control = self.bucket.control(rank)
        code, behind = message.split([len(message) - control.nbytes, control.nbytes])
        return code, behind.clone().view(control.dtype)

    def _message_bytes(self, rank: int) -> int:
        code_bytes = self._runs.nbytes(self.bucket.num_values[rank], self._wide.itemsize)
        return code_bytes + self.bucket.control(rank).nbytes


def _wide_bytes(itemsize: int) -> int:
    """Of a value as codecs see it, where it has so many bytes in the bucket."""
    return max(itemsize, torch.float32.itemsize)


def _anonymous(slices: Sequence[Tensor]) -> LiveBucket:
    """A bucket of nothing but values, of no parameter."""
    names = [f"slice {rank}" for rank in range(len(slices))]
    numels = {name: part.numel() for name, part in zip(names, slices, strict=True)}
    spans = tuple((Span(name, 0, numel),) for name, numel in numels.items())
    return LiveBucket(slices[0], tuple(slices), spans, numels)
