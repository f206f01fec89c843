"""Carries one bucket's codes, round after round, and keeps their losses.

The legs are described in coded_exchange.py. carrier_memory.py keeps their losses, and decides when
a bucket turns exact again. The cost is one number for each value that this rank sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import final

import torch
from torch import Tensor

from shoal.codecs.carrier_memory import OWED, OWNER, Remembering
from shoal.codecs.ranges import narrow_into
from shoal.codecs.runs import LOST, Runs
from shoal.contracts.codec import Codec
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import (
    Coding,
    CodingExchange,
    LiveBucket,
)

# legs, each with a memory of its own, as OWNER has one
_SCATTER, _GATHER, _CHANGES = "scatter", "gather", "changes"


@final
class CodedCarrier(Remembering, Coding):
    """Carries one bucket's codes."""

    def __init__(self, exchange: CodingExchange, codec: Codec, bucket: LiveBucket) -> None:
        super().__init__(exchange, codec, bucket)
        self.slices = bucket.slices
        self._exchange = exchange
        self._codec = codec
        self._runs, self._runs_there = Runs(codec), Runs(codec.there)

    def reduce(self, comm: Comm) -> None:
        codec = self._first_codec if self._begin_round() else None
        codec = codec or self._codec
        if codec is not self._runs.codec:
            self._runs, self._runs_there = Runs(codec), Runs(codec.there)
        if not self.exact and self._feedback:
            self._judge(comm)
        if self.goes_exactly:
            self._reduce_exactly(comm)
        else:
            self._exchange.reduce_codes(self, comm)
        self._settle(OWNER, comm.rank, OWED)

    def gather(self, comm: Comm) -> None:
        if self.goes_exactly:
            self._exchange.all_gather(self.bucket.slices, comm)
            return
        for rank, code in self._gather(self.bucket.values(comm.rank), _GATHER, comm):
            self._read(self._runs.decode, code, rank)

    def gather_changes(self, changes: Tensor, comm: Comm) -> None:
        before = self.ledger.sample(comm.rank, self.bucket.values(comm.rank))
        for rank, code in self._gather(changes, _CHANGES, comm):
            self._read(self._runs.decode_add, code, rank)
        after = self.ledger.sample(comm.rank, self.bucket.values(comm.rank))
        self.ledger.sent(comm.rank, self.ledger.sample(comm.rank, changes), after - before)

    def message(self, owner: int) -> Tensor:
        return self._message(owner, self.bucket.values(owner), _SCATTER)

    def landing(self, owner: int) -> Tensor:
        return self._landing(owner, self._runs_there)

    def _landing(self, owner: int, runs: Runs) -> Tensor:
        code_bytes = runs.nbytes(self.bucket.num_values[owner], self._wide.itemsize)
        nbytes = code_bytes + self.bucket.control(owner).nbytes
        return self.bucket.flat.new_empty(nbytes, dtype=torch.uint8)

    def add(self, owner: int, parts: Iterable[Tensor | None]) -> None:
        values, control = self.bucket.values(owner), self.bucket.control(owner)
        total: Tensor | None = None
        counted = torch.zeros_like(control)
        for part in parts:
            code, behind = (None, control) if part is None else self._split(part, owner)
            counted.add_(behind)
            if total is None:
                total = values.to(self._wide)
                if code is not None:
                    total = torch.empty_like(total)
                    self._runs_there.decode(code, total)
            elif code is not None:
                self._runs_there.decode_add(code, total)
            else:  # a + b has the bits of b + a
                total = total.add_(values)
        if total is not None:
            narrow_into(total, values)
        control.copy_(counted)

    def _gather(self, values: Tensor, leg: str, comm: Comm) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's code of its values, with its control already in the bucket."""
        own, serves = self._message(comm.rank, values, leg), comm.rank >= comm.workers
        messages = [
            own if rank == comm.rank else own[:0] if serves else self._landing(rank, self._runs)
            for rank in range(comm.size)
        ]
        self._exchange.all_gather(messages, comm)
        for rank, message in enumerate(messages):
            if serves and rank != comm.rank:
                continue  # a server needs no values of others
            code, control = self._split(message, rank)
            if rank != comm.rank:
                self.bucket.control(rank).copy_(control)
            yield rank, code

    def _read(self, decode: Callable[[Tensor, Tensor], None], code: Tensor, rank: int) -> None:
        """Decode a code in the codec's type, and write or add its values."""
        values = self.bucket.values(rank)
        wide = values.to(self._wide)
        decode(code, wide)
        narrow_into(wide, values)

    def _message(self, rank: int, values: Tensor, leg: str) -> Tensor:
        """Make the code of a slice's values and its earlier losses, followed by its control."""
        runs = self._runs_there if leg == _SCATTER else self._runs
        message = self._landing(rank, runs)
        code_bytes = runs.nbytes(len(values), self._wide.itemsize)
        message[code_bytes:].copy_(self.bucket.control(rank).view(torch.uint8))
        if not len(values):
            return message
        memory = self._memory.setdefault((leg, rank), {})
        lost = None
        if self._feedback and leg != _CHANGES:
            lost = memory.pop(LOST, None)
            lost = self._zeros(rank) if lost is None else lost
        if lost is None:
            runs.encode(values.to(self._wide), message[:code_bytes], None, memory)
            return message
        sample, before = self.ledger.sample(rank, values), self.ledger.sample(rank, lost)
        runs.encode(values, message[:code_bytes], lost, memory)
        self.ledger.coded(leg, rank, sample, before, self.ledger.sample(rank, lost))
        memory[LOST] = lost
        return message

    def _reduce_exactly(self, comm: Comm) -> None:
        """Reduce without codes. The losses of both ways go with the first sum."""
        for owner in range(comm.size):
            self._settle(_SCATTER, owner, LOST)
        self._exchange.reduce_scatter(self.bucket.slices, comm)
        # clear these losses now: the next gathered values may be parameters
        self._settle(_GATHER, comm.rank, LOST)

    def _split(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Split a message into the code, and the control after it."""
        control = self.bucket.control(rank)
        code, behind = message.split([len(message) - control.nbytes, control.nbytes])
        return code, behind.clone().view(control.dtype)
