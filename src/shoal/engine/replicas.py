"""Check, now and then, that ranks have the same bits of all tensors that each of them updates.

    1  digest    when a backward ends: for each weight, and each tensor that optimizers keep for it,
                 one sum of all its memory as words of 64 bits. A flipped bit changes the sum
    2  compare   every rank sends its sums to every other one
    3  name      the ranks that differ from the majority, with layers
    4  heal      the majority's bits are sent to ranks that differ: weights and optimizer's state.
                 Without a majority, every rank raises the same error

Pieces of owners exist on one rank only, and their bits come to all ranks in every step. So each
owner looks at the norm of its own pieces, and names one that jumps.

Processors that round differently let copies drift apart (front/rounding.py). So only ranks with
processors that round alike are compared.

This costs one pass over weights and state, and two messages to every other rank, every `every`
backwards. Changes of weights by hand are compared in every backward, by version numbers alone
(common_state.py). Guarded by tests/engine/test_replicas.py.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer
from shoal.core.errors import RanksDiffer, WorldError
from shoal.core.pieces import line
from shoal.engine.common_state import exchanged
from shoal.engine.lanes import Lane
from shoal.tensors.guarded_parameters import ComingParameter

EVERY = 100  # backwards from one check to the next
_WORD = 8  # bytes
_JUMP = 10.0  # factor over the norm at the last check
_PATIENCE = 3  # checks in a row at which the same rank may differ
_MOST_NAMES = 4
_LOGGER = logging.getLogger("shoal")
_ADVICE = (
    "start again from the last checkpoint: shoal.load(path, model=model, optimizer=optimizer). "
    "Have the memory of these hosts tested"
)


@dataclass(frozen=True)
class Odd:
    """Tensor of which some ranks have other bits than most ranks that round alike."""

    name: str
    source: int  # a rank of the majority
    ranks: tuple[int, ...]


@final
class Replicas:
    """Replicas of one model, on one rank.

    Args:
        weights: weights that every rank updates itself, by dotted name.
        owned: transfers with owners.
        optimizers: the optimizers that train the model.
        lane: the lane for the exchanges, after its other jobs.
        every: backwards from one check to the next.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        owned: Sequence[OwnedTransfer],
        optimizers: Sequence[Optimizer],
        lane: Lane,
        every: int = EVERY,
    ) -> None:
        self._weights, self._optimizers = dict(weights), tuple(optimizers)
        self._owned, self._lane, self._every = tuple(owned), lane, every
        self._norms: dict[tuple[int, int], float] = {}  # norms of own pieces at the last check
        self._again: Counter[int] = Counter()  # checks in a row at which a rank has differed
        self._backwards = 0

    def on_backward_end(self) -> None:
        """Count a backward that has sent. Check, if it is time.

        Raises:
            WorldError: ranks differ, and there is no majority.
        """
        self._backwards += 1
        if self._backwards % self._every == 0:
            self.look(f"backward {self._backwards - 1}, comparing replicas")

    @torch.no_grad()
    def look(self, where: str) -> None:
        """Compare now, and heal the differences that can be healed (a collective)."""
        self._look_at_norms(where)
        if not self._weights:
            return
        tensors = self._tensors()
        digests = digests_of(tensors.values())
        work = partial(self._compare, tensors, digests, where)
        self._lane.run(work, "comparing replicas").wait(where)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors to compare, by their names in messages."""
        found: dict[str, Tensor] = {}
        for name, weight in self._weights.items():
            found[name] = weight
            for optimizer in self._optimizers:
                for key, value in (optimizer.state.get(weight) or {}).items():
                    if isinstance(value, Tensor) and value.layout is torch.strided:
                        found[f"{name} ({key} of {type(optimizer).__name__})"] = value
        return found

    def _compare(
        self, tensors: Mapping[str, Tensor], digests: Tensor, where: str, comm: Comm
    ) -> None:
        """Send, compare and heal, on the lane."""
        layout = zlib.crc32("\n".join(tensors).encode())
        told = exchanged(comm, [layout, digests])
        if any(theirs != layout for theirs, _ in told):
            _refuse_layouts(exchanged(comm, list(tensors)), where)
        everyone = torch.stack([theirs for _, theirs in told])
        processors = comm.topology.processors
        odd, undecided = judged(list(tensors), everyone, processors)
        if undecided:
            raise _no_majority(undecided, everyone.shape[0], where)
        self._count({rank for odd_one in odd for rank in odd_one.ranks}, odd, where)
        for odd_one in odd:
            _heal(tensors[odd_one.name], odd_one, comm)
        _tell(odd, comm, where)

    def _count(self, ranks: set[int], odd: Sequence[Odd], where: str) -> None:
        """Raise WorldError if the same rank differs at check after check."""
        self._again = Counter({rank: self._again[rank] + 1 for rank in ranks})
        for rank, times in self._again.items():
            if times >= _PATIENCE:
                raise WorldError(
                    f"rank {rank} differs from the other ranks at {times} checks in a row, though "
                    "it was given their bits each time",
                    where=where,
                    got=f"other bits in {_some([odd_one.name for odd_one in odd])}",
                    do="have that host's memory tested, or take it out. If your program changes "
                    "weights on that rank alone, do so on all; check_every=0 turns this check off",
                    rank=rank,
                )

    def _look_at_norms(self, where: str) -> None:
        """Warn about own pieces with a norm that has jumped since the last check."""
        pieces = {
            (number, index): piece
            for number, transfer in enumerate(self._owned)
            for index, piece in enumerate(transfer.pieces)
            if not isinstance(piece.parameter, ComingParameter)
        }
        if not pieces:
            return
        values = [piece.of(piece.parameter).detach() for piece in pieces.values()]
        norms = [float(norm) for norm in torch._foreach_norm(values)]
        for (place, piece), norm in zip(pieces.items(), norms, strict=True):
            before = self._norms.get(place)
            if before and not norm <= _JUMP * before:
                label = self._owned[place[0]].label
                _LOGGER.warning(
                    f"shoal: {label}, elements {piece.start} to {piece.stop} of a parameter of "
                    f"shape {tuple(piece.parameter.shape)}, which this rank owns: their norm is "
                    f"{norm:.3g}, and was {before:.3g} {self._every} backwards before ({where}). A "
                    "flipped bit, or training diverges; every rank has these values"
                )
        self._norms = dict(zip(pieces, norms, strict=True))


def digests_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return a sum of each tensor's memory on the host, as words of 64 bits that wrap."""
    sums: dict[torch.device, list[tuple[int, Tensor]]] = {}
    number = -1
    for number, tensor in enumerate(tensors):
        sums.setdefault(tensor.device, []).append((number, _digest(tensor.detach())))
    found = torch.zeros(number + 1, dtype=torch.int64, device="cpu")
    for of_device in sums.values():
        numbers, values = zip(*of_device, strict=True)
        found[list(numbers)] = torch.stack(values).cpu()
    return found


def _digest(tensor: Tensor) -> Tensor:
    flat = line(tensor, tensor).contiguous().view(torch.uint8)
    words = len(flat) // _WORD * _WORD
    head, tail = flat[:words], flat[words:]
    if head.storage_offset() % _WORD:
        head = head.clone()
    total = head.view(torch.int64).sum()
    if len(tail):  # fewer bytes than a word: shift each byte so that no two can overlap
        places = torch.tensor([1 << 8 * place for place in range(len(tail))], device=tail.device)
        total = total + (tail.to(torch.int64) * places).sum()
    return total


def judged(
    names: Sequence[str], everyone: Tensor, processors: Sequence[str] = ()
) -> tuple[list[Odd], dict[str, list[int]]]:
    """Find the ranks that differ from most, and the tensors without a majority.

    Args:
        names: names of the tensors.
        everyone: (P, N) digests, one row for each rank.
        processors: processor of each rank; only ranks with equal ones are compared. Without any,
            all are.

    Returns:
        The tensors with odd ranks; and the names of tensors without a majority, with the compared
        ranks.
    """
    if bool((everyone == everyone[0]).all()):
        return [], {}
    alike: dict[str, list[int]] = {}
    for rank in range(len(everyone)):
        alike.setdefault(processors[rank] if processors else "", []).append(rank)
    odd: list[Odd] = []
    undecided: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        digests: list[int] = everyone[:, index].tolist()
        for group in alike.values():
            (usual, count), *others = Counter(digests[rank] for rank in group).most_common()
            if not others:
                continue
            if 2 * count <= len(group):
                undecided[name] = group
                continue
            differ = tuple(rank for rank in group if digests[rank] != usual)
            source = next(rank for rank in group if digests[rank] == usual)
            odd.append(Odd(name, source, differ))
    return odd, undecided


def _heal(tensor: Tensor, odd: Odd, comm: Comm) -> None:
    """Send the majority's bits to odd ranks.

    No version number changes, because all ranks then agree.
    """
    if comm.rank == odd.source:
        whole = tensor.detach().contiguous()
        comm.finish([comm.send(whole, rank) for rank in odd.ranks])
    elif comm.rank in odd.ranks:
        whole = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        comm.receive(whole, odd.source).wait()
        tensor.data.copy_(whole)


def _tell(odd: Sequence[Odd], comm: Comm, where: str) -> None:
    """Warn about the ranks that have differed: on rank 0, and on each of them."""
    names: dict[int, list[str]] = {}
    for odd_one in odd:
        for rank in odd_one.ranks:
            names.setdefault(rank, []).append(odd_one.name)
    for rank, of_rank in names.items():
        if comm.rank in (0, rank):
            host = comm.topology.hosts[rank]
            _LOGGER.warning(
                f"shoal: rank {rank} (host {host}) had other bits than most ranks in "
                f"{_some(of_rank)} ({where}): it was given theirs. Its gradients since the last "
                "check were of those weights. If it comes again, have that host's memory tested"
            )


def _no_majority(undecided: Mapping[str, list[int]], ranks: int, where: str) -> WorldError:
    group = next(iter(undecided.values()))
    shown = ", ".join(map(str, group[:_MOST_NAMES])) + (" …" if len(group) > _MOST_NAMES else "")
    return WorldError(
        f"ranks {shown} have come to differ in {_some(list(undecided))}, and no majority says "
        "which is right",
        where=where,
        got=f"{len(undecided)} tensors with other bits, of {ranks} ranks",
        expected="the same bits on each: every rank updates these itself, by the same gradients",
        do=f"{_ADVICE}. With three ranks or more the majority's bits would be taken",
    )


def _refuse_layouts(told: Sequence[Sequence[str]], where: str) -> None:
    for rank, names in enumerate(told):
        for other, theirs in enumerate(told):
            missing = [name for name in names if name not in theirs]
            if missing:
                raise RanksDiffer(
                    f"rank {other} does not keep what rank {rank} keeps: {_some(missing)}",
                    where=where,
                    do="load the optimizer's state on every rank, or on none, and change it alike",
                    rank=other,
                )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
