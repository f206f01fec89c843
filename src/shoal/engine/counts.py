"""Counts of rows, as ranks tell them to one another, for each call of the model that asks.

    call   (round, number, terms, digest, rows)   sent during forward; a rank that asks waits for
                                                  the same call of every other rank
    end    (round, −1)                            the backward of the round has begun: no more calls

A round has the calls that lead to one backward that sends. Usually all ranks make the same number
of calls in it, and no rank reports the end. If a rank waits for a call that another one does not
make, that other one is told (`Comm.may_answer`). From then on every rank reports the end of every
round. A call that not every rank asks for is not weighed: then ranks count alike, as in plain data
parallelism.

This costs 40 bytes for each call to every other rank, and as many for each round once ends are
reported. Guarded by tests/equivalence/test_unlike_calls.py and test_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from shoal.contracts.comm import Comm, Pending
from shoal.engine.lanes import Errand, Lane

Call = tuple[int, int]  # the round, and the number in it

_PURPOSE = "row counts"
_END = -1
_FIELDS = 5  # numbers in a message
_MOST_CALLS = 1 << 20  # largest number of calls in a round
_KEPT_ROUNDS = 8  # rounds with calls that may still be asked for


@final
class RowCounts:
    """Counts of one model's calls.

    Args:
        comm: a channel for the counts alone.
        lane: the channel's thread.
    """

    def __init__(self, comm: Comm, lane: Lane) -> None:
        self._comm, self._lane = comm, lane
        self._round = self._calls = 0
        # messages of each rank and the last round that it ended; only the lane's thread uses these
        self._heard: list[dict[Call, Tensor]] = [{} for _ in range(comm.size)]
        self._ended = [-1] * comm.size
        self._says_ends = False

    def called(self) -> Call:
        """Note that the model is called. Return the call."""
        self._calls += 1
        return self._round, self._calls - 1

    def note_opening(self) -> None:
        """Note that the backward of the round has begun."""
        self._round, self._calls = self._round + 1, 0
        if self._says_ends:
            self._end(self._round - 1)
        else:  # calls of this round may still come
            self._comm.journal.may_answer(self.say_ends, self._round * _MOST_CALLS)

    def say_ends(self) -> None:
        """Report the end of every round from now on."""
        if not self._says_ends:
            self._says_ends = True
            if self._round:
                self._end(self._round - 1)
            self._comm.journal.may_answer(
                None
            )  # only now, or it would seem to say nothing for ever

    def ask(self, call: Call, told: tuple[float, ...]) -> Callable[[str], list[Tensor] | None]:
        """Send this call's counts, and ask for every rank's.

        Returns:
            A function that waits for them. It returns them by rank, or None if a rank does not make
            the call.
        """
        own = torch.tensor([*call, *told], dtype=torch.float64, device="cpu")
        found: list[Tensor | None] = []

        def work(comm: Comm) -> None:
            self._heard[comm.rank][call] = own
            self._exchange(comm, own, lambda peer: self._knows(peer, call))
            found.extend(heard.pop(call, None) for heard in self._heard)

        number = call[0] * _MOST_CALLS + call[1] + 1
        errand = self._lane.run(work, _PURPOSE, number)
        return lambda where: self._find(errand, found, where)

    def _find(self, errand: Errand, found: list[Tensor | None], where: str) -> list[Tensor] | None:
        errand.wait(where)
        if max(self._ended) >= 0:
            self.say_ends()
        there = [values[2:] for values in found if values is not None]
        return there if len(there) == len(found) else None

    def _end(self, round_: int) -> None:
        own = torch.zeros(_FIELDS, dtype=torch.float64, device="cpu")
        own[0], own[1] = round_, _END

        def work(comm: Comm) -> None:
            self._exchange(comm, own, lambda peer: self._ended[peer] >= round_)
            for heard in self._heard:
                for call in [call for call in heard if call[0] < round_ - _KEPT_ROUNDS]:
                    del heard[call]

        self._lane.run(work, _PURPOSE, (round_ + 1) * _MOST_CALLS)

    def _knows(self, peer: int, call: Call) -> bool:
        return call in self._heard[peer] or self._ended[peer] >= call[0]

    def _exchange(self, comm: Comm, own: Tensor, knows: Callable[[int], bool]) -> None:
        """Send to every rank, and receive from each until it is known well enough."""
        coming = {peer: self._next(comm, peer) for peer in comm.others if not knows(peer)}
        sends = [comm.send(own, peer) for peer in comm.others]
        for peer, (words, pending) in coming.items():
            while True:
                pending.wait()
                self._hear(peer, words)
                if knows(peer):
                    break
                words, pending = self._next(comm, peer)
        comm.finish(sends)

    def _next(self, comm: Comm, peer: int) -> tuple[Tensor, Pending]:
        words = torch.empty(_FIELDS, dtype=torch.float64, device="cpu")
        return words, comm.receive(words, peer)

    def _hear(self, peer: int, words: Tensor) -> None:
        round_, number = int(words[0]), int(words[1])
        if number == _END:
            self._ended[peer] = max(self._ended[peer], round_)
        else:
            self._heard[peer][round_, number] = words
