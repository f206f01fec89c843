"""Losses and errors of a bucket's codes, which their carrier remembers.

Every hundredth round ranks tell one another whether a parameter's error is too large. If it is, all
of its bucket turns exact from that round on, and the losses go with it (ledger.py). The cost is a
message of a number a parameter in 100 rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.codecs.ledger import WINDOW, Ledger
from shoal.codecs.ranges import narrow_into
from shoal.codecs.runs import LOST
from shoal.contracts.codec import Codec
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import UNSENT, Carrier, Exchange, LiveBucket, StateDict
from shoal.contracts.transfer import Transfer
from shoal.core.errors import UsageError

_WIDE = (torch.float64, torch.complex64, torch.complex128)
OWNER = "owner"  # a leg: losses on the slices that a rank owns
OWED = "owed"  # losses of all ranks on this rank's slices: they go with the next sum
_log = logging.getLogger("shoal")


def coded_carriers(transfers: Iterable[Transfer]) -> Iterator[Remembering]:
    """Yield the transfers' carriers that carry codes."""
    for transfer in transfers:
        if isinstance(transfer.carrier, Remembering):
            yield transfer.carrier


class _FirstPhase(NamedTuple):
    """The first rounds of a carrier, and their codec; None for exact rounds."""

    rounds: int = 0
    codec: Codec | None = None


class Remembering(Carrier):
    """A carrier of one bucket's codes, with a memory of each leg and slice."""

    def __init__(self, exchange: Exchange, codec: Codec, bucket: LiveBucket) -> None:
        dtype = bucket.flat.dtype
        if bucket.numels and not dtype.is_floating_point:
            raise UsageError(
                f"codecs take real numbers, and a bucket is of {dtype}",
                where=", ".join(list(bucket.numels)[:2]),
                do=f'let "{exchange}" carry these layers, without a codec',
            )
        self.exact = self._codec_exact = codec.exact
        self.bucket = bucket
        self._hints = {*codec.hints, *codec.there.hints}
        self._wide = dtype if dtype in _WIDE else torch.float32
        self._feedback = codec.feedback and not codec.exact
        self.most_error = codec.most_error
        self.ledger = Ledger(bucket, self._wide)
        # memories of each leg and slice, by kind
        self._memory: dict[tuple[str, int], dict[str, Tensor]] = {}
        self._judged = 0  # rounds, for the ledger's windows
        self.given_up: list[str] = []  # parameters for which all of the bucket is exact
        self.rounds = 0  # made so far, of this run and of the checkpoint that it goes on from
        self._first = _FirstPhase()
        self._first_hints: set[str] = set()  # labels of hints that the first codec keeps

    def begin_with(self, rounds: int, codec: Codec | None, made: int = 0) -> None:
        """Go exactly, or by another codec, for the first rounds (on every rank alike).

        Args:
            rounds: number of first rounds.
            codec: their codec, if codes are not added on their way. None for exact rounds.
            made: rounds that were made before.
        """
        self._first, self.rounds = _FirstPhase(rounds, codec), made
        self._first_hints = {*codec.hints, *codec.there.hints} if codec else set[str]()

    @property
    def goes_exactly(self) -> bool:
        """Whether the present round goes without codes."""
        return bool(self.given_up) or self.passing

    def _begin_round(self) -> bool:
        """Count a round, and return whether it is one of the first."""
        is_first = self.rounds < self._first.rounds
        self.rounds += 1
        if self._first_hints and not is_first:
            self._forget_first_hints()
        self.passing = is_first and self._first_codec is None
        self.exact = self._codec_exact or self.goes_exactly
        return is_first

    def _forget_first_hints(self) -> None:
        """Let the plan's codec begin without hints of another codec."""
        for memory in self._memory.values():
            for label in self._first_hints:
                memory.pop(label, None)
        self._first_hints = set()

    @property
    def _first_codec(self) -> Codec | None:
        """The codec of the first rounds; None if they go exactly."""
        return self._first.codec

    def kept(self, label: str, rank: int) -> Tensor:
        memory = self._memory.setdefault((OWNER, rank), {})
        if label not in memory:
            memory[label] = self._zeros(rank)
        return memory[label]

    def tensors(self) -> Sequence[Tensor]:
        return [numbers for memory in self._memory.values() for numbers in memory.values()]

    def residuals(self) -> StateDict:
        """Return this rank's losses, by parameter name: "gradient", and "parameter".

        "parameter" has losses on slices that this rank owns. All are flat tensors of the whole
        parameter's elements. The sum over ranks is the total loss.
        """
        owed: StateDict = {}
        for name, entries in self.state_dict().items():
            for kind, numbers in entries.items():
                label = kind.partition(".")[2]
                if label in (LOST, OWED, UNSENT):
                    what = "parameter" if label == UNSENT else "gradient"
                    sums = owed.setdefault(name, {})
                    sums[what] = sums[what] + numbers if what in sums else numbers.clone()
        return owed

    def summed_residuals(self, comm: Comm) -> StateDict:
        """Sum the losses of all ranks, on every rank, in the form of `residuals` (a collective)."""
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
        """Take over the losses of all ranks for the slices of `rank`, and forget this rank's own.

        The gradients' part goes with the next sum, exactly.
        """
        labels = {"gradient": OWED, "parameter": UNSENT}
        renamed = {
            name: {f"{OWNER}.{labels[what]}": numbers for what, numbers in entries.items()}
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
                if label in self._hints or label in self._first_hints:
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
                # otherwise the losses are another rank's, or nothing was lost yet
                if numbers.any():
                    self._memory.setdefault((leg, rank), {})[label] = numbers

    def give_up(self, names: Sequence[str]) -> None:
        """Turn exact from now on for these parameters, if there are any (on every rank)."""
        self.given_up = list(names)
        if names:
            self.exact = True

    def _judge(self, comm: Comm) -> None:
        """Compare errors with their limits in every hundredth round (a collective).

        If a parameter exceeds its limit on any rank, all of the bucket turns exact.
        """
        self._judged += 1
        if self._judged % WINDOW != 1 or self._judged == 1:
            return
        names = list(self.bucket.numels)
        errors = self.ledger.mean_errors()
        beyond = [float(errors.get(name, 0.0) > self.most_error) for name in names]
        num_ranks = torch.tensor(beyond, device=self.bucket.flat.device)
        comm.all_reduce(num_ranks)
        self.give_up([name for name, n in zip(names, num_ranks.tolist(), strict=True) if n])
        if self.given_up and comm.rank == 0:
            _log.warning(
                "%s: the mean of 100 steps was off by more than %g, so all of its bucket (%d "
                "parameters) is sent exactly from now on",
                ", ".join(self.given_up[:3]),
                self.most_error,
                len(names),
            )

    def _settle(self, leg: str, rank: int, label: str) -> None:
        """Add the losses of a slice to its values, and forget them."""
        owed = self._memory.get((leg, rank), {}).pop(label, None)
        if owed is not None:
            values = self.bucket.values(rank)
            narrow_into(owed.add_(values), values)

    def _zeros(self, rank: int) -> Tensor:
        device = self.bucket.flat.device
        return torch.zeros(self.bucket.num_values[rank], dtype=self._wide, device=device)
