"""An exchange that carries codes in place of values.

    scatter  rank r, slice of owner o   v = g + lost[o]    code = enc(v)    lost[o] = v − dec(code)
    owner                               s = its own part, exact, and each dec(code), in rank order
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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.contracts.codec import Codec
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import (
    Bucket,
    Carrier,
    DeliveringExchange,
    Exchange,
    LiveBucket,
    Span,
    SplitExchange,
    StateDict,
)
from shoal.core.cost import Traffic
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import Topology
from shoal.core.registry import of
from shoal.core.written import built, parsed

_LOST = "lost"  # what codes have lost of a slice's values
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
    if not isinstance(exchange, DeliveringExchange):
        able = [name for name, kind in of(Exchange).items() if issubclass(kind, DeliveringExchange)]
        raise PlanError(
            f"{exchange} takes no codec: it adds up values on their way",
            got=text,
            expected="an exchange that owners add up behind: " + ", ".join(able),
            do=f'write "{able[0]}+{codec}", or "{exchange}" without a codec',
        )
    return Coded(exchange, codec)


@final
@dataclass(frozen=True)
class Coded(SplitExchange):
    """An exchange whose values a codec makes into codes. Never planned unasked."""

    name: ClassVar[str] = "coded"  # that no plan writes
    exact: ClassVar[bool] = False

    exchange: DeliveringExchange
    codec: Codec

    def __str__(self) -> str:
        return f"{self.exchange}+{self.codec}"

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
        code_bytes = self.codec.nbytes(numel, _wide_bytes(itemsize)) if numel else 0
        return code_bytes + control_bytes


@final
class CodedCarrier(Carrier):
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
        self._exchange, self._codec = coded.exchange, coded.codec
        self._wide = torch.float64 if bucket.flat.dtype == torch.float64 else torch.float32
        self._feedback = coded.codec.feedback and not coded.codec.exact
        # of each leg and slice, by what it is
        self._memory: dict[tuple[str, int], dict[str, Tensor]] = {}

    def reduce(self, comm: Comm) -> None:
        bucket, rank = self.bucket, comm.rank
        outgoing = [
            self._message(owner, self._fed(_SCATTER, owner, bucket.values(owner)), _SCATTER)
            if owner != rank
            else bucket.flat.new_empty(0, dtype=torch.uint8)
            for owner in range(comm.size)
        ]
        size = self._message_bytes(rank)
        landing = [
            bucket.flat.new_empty(size * (worker != rank), dtype=torch.uint8)
            for worker in range(comm.workers)
        ]
        control = bucket.control(rank)
        total = torch.zeros(bucket.num_values[rank], dtype=self._wide, device=control.device)
        counted = torch.zeros_like(control)
        for worker in self._exchange.deliver(outgoing, landing, comm):
            if worker == rank:
                total.add_(bucket.values(rank))
                counted.add_(control)
            else:
                code, behind = self._parted(landing[worker], rank)
                if total.numel():
                    self._codec.decode_add(code, total)
                counted.add_(behind)
        bucket.values(rank).copy_(total)
        control.copy_(counted)

    def gather(self, comm: Comm) -> None:
        values = self._fed(_GATHER, comm.rank, self.bucket.values(comm.rank))
        for rank, sent in self._gathered(values, _GATHER, comm):
            self.bucket.values(rank).copy_(sent)

    def gather_changes(self, changes: Tensor, comm: Comm) -> None:
        for rank, sent in self._gathered(changes.to(self._wide), _CHANGES, comm):
            values = self.bucket.values(rank)
            values.copy_(values.to(self._wide).add_(sent))

    def kept(self, label: str, rank: int) -> Tensor:
        memory = self._memory.setdefault((_OWNER, rank), {})
        if label not in memory:
            memory[label] = torch.zeros(
                self.bucket.num_values[rank], dtype=self._wide, device=self.bucket.flat.device
            )
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
        """Every rank's values as they were sent; its control is in its place by then."""
        messages = [
            self._message(rank, values, leg)
            if rank == comm.rank
            else self.bucket.flat.new_empty(self._message_bytes(rank), dtype=torch.uint8)
            for rank in range(comm.size)
        ]
        self._exchange.all_gather(messages, comm)
        for rank, message in enumerate(messages):
            code, control = self._parted(message, rank)
            sent = values.new_empty(self.bucket.num_values[rank], dtype=self._wide)
            if sent.numel():
                self._codec.decode(code, sent)
            if rank != comm.rank:
                self.bucket.control(rank).copy_(control)
            yield rank, sent

    def _fed(self, leg: str, rank: int, values: Tensor) -> Tensor:
        """Values in the codec's type, with what was lost of those before."""
        values = values.to(self._wide)
        lost = self._memory.get((leg, rank), {}).get(_LOST)
        return values if lost is None or not self._feedback else values + lost

    def _message(self, rank: int, values: Tensor, leg: str) -> Tensor:
        """The code of a slice's values, and its control."""
        control = self.bucket.control(rank).view(torch.uint8)
        if not values.numel():
            return control.clone()
        memory = self._memory.setdefault((leg, rank), {})
        state = {label: numbers for label, numbers in memory.items() if label != _LOST}
        code = self._codec.encode(values, state)
        self._check(code, state, len(values))
        if self._feedback and leg != _CHANGES:
            sent = torch.empty_like(values)
            self._codec.decode(code, sent)
            state[_LOST] = values - sent
        self._memory[leg, rank] = state
        return torch.cat([code, control])

    def _check(self, code: Tensor, state: Mapping[str, Tensor], numel: int) -> None:
        """Refuse what a codec gave that is not what it stated."""
        nbytes = self._codec.nbytes(numel, self._wide.itemsize)
        if code.dtype != torch.uint8 or code.shape != (nbytes,):
            raise UsageError(
                f"the codec {self._codec} gave another code than it stated",
                got=f"{code.dtype} of shape {tuple(code.shape)}",
                expected=f"{nbytes} bytes, uint8, for {numel} values",
                do="mend its encode, or its nbytes",
            )
        for label, numbers in state.items():
            shape = tuple(numbers.shape) if isinstance(numbers, Tensor) else None
            if shape != (numel,) or label == _LOST:
                raise UsageError(
                    f"the codec {self._codec} keeps {label!r}, which cannot be saved",
                    got=repr(numbers) if shape is None else f"a tensor of shape {shape}",
                    expected=f"a tensor of {numel} numbers, as many as there are values",
                    do=f"take another key than {_LOST!r}, which is Shoal's own"
                    if label == _LOST
                    else "put in one number for each value, as torch.zeros_like(values) has",
                )

    def _parted(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """The code, and the control that stood behind it."""
        control = self.bucket.control(rank)
        code, behind = message.split([len(message) - control.nbytes, control.nbytes])
        return code, behind.clone().view(control.dtype)

    def _message_bytes(self, rank: int) -> int:
        numel = self.bucket.num_values[rank]
        code_bytes = self._codec.nbytes(numel, self._wide.itemsize) if numel else 0
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
