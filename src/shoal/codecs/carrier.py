"""Carries one bucket's codes, round after round, and keeps what they lose.

What is said of the legs: coded.py. Every hundredth round ranks tell one another whether a parameter
was off by more than it may; then all of its bucket is exact from that round on, and what codes lost
goes with it (ledger.py). Costs one number for each value that this rank sends, and a message of a
number a parameter in 100 rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from shoal.codecs.ledger import WINDOW, Ledger
from shoal.codecs.runs import LOST, Runs
from shoal.contracts.codec import Codec
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import (
    UNSENT,
    Carrier,
    Coding,
    CodingExchange,
    LiveBucket,
    StateDict,
)
from shoal.contracts.transfer import Transfer
from shoal.core.errors import UsageError

# legs, each of which has a memory of its own
_SCATTER, _GATHER, _CHANGES, _OWNER = "scatter", "gather", "changes", "owner"
_OWED = "owed"  # by all ranks, of what this one owns: it goes with the next sum
_log = logging.getLogger("shoal")


def coded_carriers(transfers: Iterable[Transfer]) -> Iterator[CodedCarrier]:
    """Those of the transfers' carriers that carry codes."""
    for transfer in transfers:
        if isinstance(transfer.carrier, CodedCarrier):
            yield transfer.carrier


@final
class CodedCarrier(Carrier, Coding):
    """Carries one bucket's codes."""

    def __init__(self, exchange: CodingExchange, codec: Codec, bucket: LiveBucket) -> None:
        if not bucket.flat.dtype.is_floating_point:
            raise UsageError(
                f"codecs take real numbers, and a bucket is of {bucket.flat.dtype}",
                where=", ".join(list(bucket.numels)[:2]),
                do=f'let "{exchange}" carry these layers, without a codec',
            )
        self.exact = codec.exact
        self.bucket, self.slices = bucket, bucket.slices
        self._exchange = exchange
        self._runs, self._runs_there = Runs(codec), Runs(codec.there)
        self._hints = {*codec.hints, *codec.there.hints}
        self._wide = torch.float64 if bucket.flat.dtype == torch.float64 else torch.float32
        self._feedback = codec.feedback and not codec.exact
        self.most_error = codec.most_error
        self.ledger = Ledger(bucket, self._wide)
        # of each leg and slice, by what it is
        self._memory: dict[tuple[str, int], dict[str, Tensor]] = {}
        self._rounds = 0
        self.given_up: list[str] = []  # parameters for which all of the bucket is exact

    def reduce(self, comm: Comm) -> None:
        if not self.exact and self._feedback:
            self._judge(comm)
        if self.given_up:
            self._reduce_exactly(comm)
        else:
            self._exchange.reduce_codes(self, comm)
        self._settle(_OWNER, comm.rank, _OWED)

    def gather(self, comm: Comm) -> None:
        if self.given_up:
            self._exchange.all_gather(self.bucket.slices, comm)
            return
        for rank, code in self._gathered(self.bucket.values(comm.rank), _GATHER, comm):
            self._read(self._runs.decode, code, rank)

    def gather_changes(self, changes: Tensor, comm: Comm) -> None:
        before = self.ledger.sample(comm.rank, self.bucket.values(comm.rank))
        for rank, code in self._gathered(changes, _CHANGES, comm):
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
            code, behind = (None, control) if part is None else self._parted(part, owner)
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
            values.copy_(total)
        control.copy_(counted)

    def kept(self, label: str, rank: int) -> Tensor:
        memory = self._memory.setdefault((_OWNER, rank), {})
        if label not in memory:
            memory[label] = self._zeros(rank)
        return memory[label]

    def tensors(self) -> Sequence[Tensor]:
        return [numbers for memory in self._memory.values() for numbers in memory.values()]

    def residuals(self) -> StateDict:
        """What this rank owes, by parameter name: "gradient", and of what it owns "parameter".

        Flat, of the whole parameter's elements. Over all ranks their sum is what is owed.
        """
        owed: StateDict = {}
        for name, entries in self.state_dict().items():
            for kind, numbers in entries.items():
                label = kind.partition(".")[2]
                if label in (LOST, _OWED, UNSENT):
                    what = "parameter" if label == UNSENT else "gradient"
                    sums = owed.setdefault(name, {})
                    sums[what] = sums[what] + numbers if what in sums else numbers.clone()
        return owed

    def summed_residuals(self, comm: Comm) -> StateDict:
        """What all ranks owe together, on every rank: as `residuals` (a collective)."""
        own, sums = self.residuals(), StateDict()
        for name, numel in self.bucket.numels.items():
            for what in ("gradient", "parameter"):
                total = self.bucket.flat.new_zeros(numel, dtype=self._wide)
                if what in own.get(name, {}):
                    total.copy_(own[name][what])
                comm.all_reduce(total)
                if total.any():
                    sums.setdefault(name, {})[what] = total
        return sums

    def give(self, rank: int, sums: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Owe what all ranks owed together, each rank for what it owns; what it owed is forgotten.

        The gradients' part goes with the next sum, exactly.
        """
        labels = {"gradient": _OWED, "parameter": UNSENT}
        renamed = {
            name: {f"{_OWNER}.{labels[what]}": numbers for what, numbers in entries.items()}
            for name, entries in sums.items()
        }
        self.load_state_dict(renamed)
        for leg, other in list(self._memory):
            if other != rank:
                del self._memory[leg, other]

    def state_dict(self) -> StateDict:
        bucket = self.bucket
        state: StateDict = {}
        for (leg, rank), memory in self._memory.items():
            for label, numbers in memory.items():
                if label in self._hints:
                    continue
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
        own, serves = self._message(comm.rank, values, leg), comm.rank >= comm.workers
        messages = [
            own if rank == comm.rank else own[:0] if serves else self._landing(rank, self._runs)
            for rank in range(comm.size)
        ]
        self._exchange.all_gather(messages, comm)
        for rank, message in enumerate(messages):
            if serves and rank != comm.rank:
                continue  # nothing is brought to it
            code, control = self._parted(message, rank)
            if rank != comm.rank:
                self.bucket.control(rank).copy_(control)
            yield rank, code

    def _read(self, decode: Callable[[Tensor, Tensor], None], code: Tensor, rank: int) -> None:
        """Write or add what a code stands for, in the codec's type."""
        values = self.bucket.values(rank)
        wide = values.to(self._wide)
        decode(code, wide)
        if wide is not values:
            values.copy_(wide)

    def _message(self, rank: int, values: Tensor, leg: str) -> Tensor:
        """The code of a slice's values, with what was lost of those before, and its control."""
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

    def _judge(self, comm: Comm) -> None:
        """Every hundredth round: all ranks hear of parameters that are off by more than they may,
        and then all of the bucket is exact.
        """
        self._rounds += 1
        if self._rounds % WINDOW != 1 or self._rounds == 1:
            return
        names = list(self.bucket.numels)
        errors = self.ledger.mean_errors()
        beyond = [float(errors.get(name, 0.0) > self.most_error) for name in names]
        num_ranks = torch.tensor(beyond, device=self.bucket.flat.device)
        comm.all_reduce(num_ranks)
        self.given_up = [name for name, n in zip(names, num_ranks.tolist(), strict=True) if n]
        if self.given_up:
            self.exact = True
            if comm.rank == 0:
                _log.warning(
                    "%s: the mean of 100 steps was off by more than %g, so all of its bucket (%d "
                    "parameters) is sent exactly from now on",
                    ", ".join(self.given_up[:3]),
                    self.most_error,
                    len(names),
                )

    def _reduce_exactly(self, comm: Comm) -> None:
        """Without codes; what they lost both ways goes with the first sum."""
        for owner in range(comm.size):
            self._settle(_SCATTER, owner, LOST)
        self._exchange.reduce_scatter(self.bucket.slices, comm)
        # not with what is gathered next: that may be parameters
        self._settle(_GATHER, comm.rank, LOST)

    def _settle(self, leg: str, rank: int, label: str) -> None:
        """Add what is owed of a slice to its values; then it is not owed any more."""
        owed = self._memory.get((leg, rank), {}).pop(label, None)
        if owed is not None:
            self.bucket.values(rank).add_(owed)

    def _zeros(self, rank: int) -> Tensor:
        device = self.bucket.flat.device
        return torch.zeros(self.bucket.num_values[rank], dtype=self._wide, device=device)

    def _parted(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """The code, and the control that stood behind it."""
        control = self.bucket.control(rank)
        code, behind = message.split([len(message) - control.nbytes, control.nbytes])
        return code, behind.clone().view(control.dtype)
