"""An exchange that adds on its way, and carries a codec's terms in place of values.

    every rank   v = g + lost     terms = of(v)     lost = v − the values of its terms
    exchange     one message:  │ terms │ small parameters │ control │     added over ranks
    every rank   g = the values of the summed terms: the same bits on all

No owner codes sums again, so nothing is lost on a way back, and no rank reads another's codes. A
parameter's matrix is its first dimension by all others. If its terms are no fewer than its numbers,
it is sent uncoded. The cost is the terms' bytes, the time to make and read them on a lane, and one
kept number for each value.
Source: Vogels et al., "PowerSGD", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import ClassVar, NamedTuple, final

import torch
from torch import Size, Tensor

from shoal.codecs.carrier_memory import Remembering
from shoal.codecs.ranges import narrow_into
from shoal.codecs.runs import LOST
from shoal.contracts.codec import Codec, LinearCodec, State
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Carrier, Exchange, LiveBucket
from shoal.core.cost import Pace, Traffic
from shoal.core.facts import Cluster, Topology

_SUM = "sum"  # name of the only leg
_TURNS = 2  # number of turns, in which a codec's terms may differ


@final
@dataclass(frozen=True)
class Summed(Exchange):
    """An exchange that sends a linear codec's terms. No search picks it unasked."""

    name: ClassVar[str] = "summed"  # no plan writes this name
    exact: ClassVar[bool] = False

    exchange: Exchange
    codec: LinearCodec

    def __str__(self) -> str:
        return f"{self.exchange}+{self.codec}"

    @property
    def least_dims(self) -> int:
        """The codec's least number of dimensions."""
        return self.codec.least_dims

    def fits(self, topology: Topology) -> bool:
        """Return whether the exchange fits."""
        return self.exchange.fits(topology)

    def carrier(self, bucket: LiveBucket) -> Carrier:
        """Return a carrier that remembers the losses of terms."""
        return SummedCarrier(self.exchange, self.codec, bucket)

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Return the exchange's traffic for one message."""
        shapes = self._coded_matrices(bucket)
        others = bucket.numel - sum(map(prod, shapes))
        _, num_terms = turns_of(self.codec, shapes)
        itemsize = max(bucket.itemsize, torch.float32.itemsize)
        return self.exchange.traffic(Bucket(num_terms + others, itemsize), topology)

    def pace(self, cluster: Cluster) -> Pace:
        """Return the pace of the exchange's own messages. Coding is priced apart."""
        return self.exchange.pace(cluster)

    def coding_s(
        self, bucket: Bucket, cluster: Cluster, ranks: int, servers: int = 0
    ) -> tuple[float, float]:
        """Return the seconds to make terms with their losses, and to read sums, on every rank."""
        pace, num_values = cluster.coding(str(self.codec)), self._num_values(bucket)
        pieces = len(self._coded_matrices(bucket))
        return (
            num_values * pace.terms_s + pieces * pace.terms_piece_s,
            num_values * pace.sums_s + pieces * pace.sums_piece_s,
        )

    def memory_bytes(self, bucket: Bucket, ranks: int) -> float:
        """Return the bytes of one number for each coded value."""
        return self._num_values(bucket) * max(bucket.itemsize, torch.float32.itemsize)

    def _num_values(self, bucket: Bucket) -> int:
        return sum(map(prod, self._coded_matrices(bucket)))

    def _coded_matrices(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Return the matrices that have terms."""
        return [shape for shape in map(matrix_of, bucket.shapes) if is_worth(self.codec, shape)]

    def reduce(self, flat: Tensor, comm: Comm) -> None:
        """Reduce a tensor that is no bucket, exactly."""
        self.exchange.reduce(flat, comm)

    def gather(self, flat: Tensor, comm: Comm) -> None:
        """Gather a tensor that is no bucket, exactly."""
        self.exchange.gather(flat, comm)


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a parameter's matrix."""
    numel = Size(shape).numel()
    return (shape[0], numel // shape[0]) if len(shape) > 1 and numel else (1, numel)


def is_worth(codec: LinearCodec, shape: tuple[int, int]) -> bool:
    """Return whether a matrix has fewer terms than numbers."""
    return codec.num_terms(*shape, 0) < prod(shape)


def turns_of(codec: LinearCodec, shapes: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Return the first turn of each matrix of a bucket, and the room for terms in a message.

    A codec's turns may have different numbers of terms. So some matrices begin with the other turn:
    then all messages have one length, hardly longer than the mean.
    """
    begin, ahead = [], 0  # number of terms by which the even messages are longer
    for rows, columns in shapes:
        more = codec.num_terms(rows, columns, 0) - codec.num_terms(rows, columns, 1)
        begin.append(int(abs(ahead - more) < abs(ahead + more)))
        ahead += -more if begin[-1] else more
    lengths = [
        sum(codec.num_terms(*s, first + turn) for s, first in zip(shapes, begin, strict=True))
        for turn in range(_TURNS)
    ]
    return begin, max(lengths)


class _CodedMatrix(NamedTuple):
    """The matrix of a coded parameter."""

    gradient: Tensor  # rows × columns, views
    lost: Tensor
    state: State
    turn: int


@final
class SummedCarrier(Remembering):
    """Carries one bucket's terms."""

    def __init__(self, exchange: Exchange, codec: LinearCodec, bucket: LiveBucket) -> None:
        whole = LiveBucket.even(bucket.flat, bucket.numels, 1, bucket.shapes)
        super().__init__(exchange, codec, whole)
        self._exchange, self._codec = exchange, codec
        self._turn = 0
        self._states: dict[str, State] = {}
        self._places = dict(_places(whole, codec))
        shapes = [shape for _, _, shape in self._places.values()]
        self._begin, self._num_terms = turns_of(codec, shapes)

    @property
    def _first_codec(self) -> Codec | None:
        return None  # codes cannot be added on their way

    def reduce(self, comm: Comm) -> None:
        self._begin_round()
        if not self.goes_exactly:
            self._judge(comm)
        if self.goes_exactly:
            self._settle(_SUM, 0, LOST)
            self._add(self.bucket.flat, comm)
            return
        memory = self._memory.setdefault((_SUM, 0), {})
        lost = memory.pop(LOST) if LOST in memory else self._zeros(0)
        matrices = [
            _CodedMatrix(
                self.bucket.flat[begin:stop].view(shape),
                lost[begin:stop].view(shape),
                self._states.setdefault(name, {}),
                self._turn + first,
            )
            for first, (name, (begin, stop, shape)) in zip(
                self._begin, self._places.items(), strict=True
            )
        ]
        sample, before = (self.ledger.sample(0, of) for of in (self.bucket.values(0), lost))
        terms = [made(self._codec, *matrix) for matrix in matrices]
        sizes = [len(part) for part in terms]
        room = self.bucket.flat.new_zeros(self._num_terms - sum(sizes), dtype=self._wide)
        others = self._others()
        message = torch.cat([*terms, room, *(part.to(self._wide) for part in others)])
        if not message[: self._num_terms].sum().isfinite():
            self._overflown(matrices, message, comm.size)
            # keep no loss of a gradient that overflowed: it would never end
            lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self.ledger.coded(_SUM, 0, sample, before, self.ledger.sample(0, lost))
        memory[LOST] = lost
        self._add(message, comm)
        sums, behind = message.split([self._num_terms, len(message) - self._num_terms])
        for matrix, own in zip(matrices, sums[: sum(sizes)].split(sizes), strict=True):
            read(self._codec, own, matrix.gradient, matrix.state, matrix.turn)
        for part, own in zip(others, behind.split([len(part) for part in others]), strict=True):
            part.copy_(own)
        self._turn += 1

    def gather(self, comm: Comm) -> None:
        """Do nothing: `reduce` has sent everything."""

    def give(self, rank: int, sums: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over the losses of all ranks: rank 0 takes them."""
        owed = {
            name: {f"{_SUM}.{LOST}": entries["gradient"]}
            for name, entries in sums.items()
            if "gradient" in entries
        }
        self.load_state_dict({} if rank else owed)

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state_dict(state)
        self._states.clear()
        self._turn = 0

    def _overflown(self, matrices: Sequence[_CodedMatrix], message: Tensor, num_ranks: int) -> None:
        """Make the terms of sound gradients again if they were beyond their type's range.

        They are made from smaller values then, and losses of earlier rounds are forgotten.
        """
        most = torch.finfo(message.dtype).max / num_ranks
        at = 0
        for gradient, lost, state, turn in matrices:
            rows, columns = gradient.shape
            count = self._codec.num_terms(rows, columns, turn)
            terms = message[at : at + count]
            at += count
            if terms.isfinite().all() or not gradient.isfinite().all():
                continue
            limit = most / max(rows, columns)  # a term is a sum over a row or a column
            lost.copy_(gradient).clamp_(-limit, limit)
            terms.copy_(self._codec.to_terms(lost, state, turn))
            self._codec.subtract_terms(terms, lost, state, turn)

    def _add(self, flat: Tensor, comm: Comm) -> None:
        """Add a tensor over ranks."""
        self._exchange.reduce(flat, comm)
        self._exchange.gather(flat, comm)

    def _others(self) -> list[Tensor]:
        """Return the parts that are sent uncoded: views of the bucket."""
        ends = [0, *(end for place in self._places.values() for end in place[:2])]
        flat = self.bucket.flat
        starts_and_stops = zip(ends[::2], [*ends[1::2], len(flat)], strict=True)
        return [flat[start:stop] for start, stop in starts_and_stops]


def made(codec: LinearCodec, gradient: Tensor, lost: Tensor, state: State, turn: int) -> Tensor:
    """Make the terms of a gradient and its earlier losses, and note the terms' losses."""
    lost.add_(gradient)
    terms = codec.to_terms(lost, state, turn)
    codec.subtract_terms(terms, lost, state, turn)
    return terms


def read(codec: LinearCodec, sums: Tensor, gradient: Tensor, state: State, turn: int) -> None:
    """Set the gradient to the values of summed terms."""
    wide = (
        gradient if gradient.dtype == sums.dtype else torch.empty_like(gradient, dtype=sums.dtype)
    )
    codec.from_sums(sums, wide, state, turn)
    narrow_into(wide, gradient)


def _places(
    bucket: LiveBucket, codec: LinearCodec
) -> Iterator[tuple[str, tuple[int, int, tuple[int, int]]]]:
    """Yield the places of coded parameters, and their matrices."""
    ends = accumulate(bucket.numels.values())
    for (name, numel), end in zip(bucket.numels.items(), ends, strict=True):
        shape = matrix_of(bucket.shapes.get(name, (numel,)))
        if is_worth(codec, shape):
            yield name, (end - numel, end, shape)
