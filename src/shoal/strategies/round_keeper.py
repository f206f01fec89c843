"""Keeper of rounds with a quorum: rank 0's thread that has the common weights and closes rounds.

    1  steps     a rank's difference Δ_r = θ_old − θ_r comes, with the rows that it was made on
    2  close     by the rule of round_members.py: Δ is the mean of all that came, by rows, and the
                 outer rule makes θ_new of it (core/outer_step.py)
    3  weights   every rank that came gets θ_new, which has its steps
    late         a difference of an earlier round is dropped, and its rank gets θ_new at once. It
                 adds its steps to that, so they come with the next round
    call         soon after there is a quorum, all others are called: a slow rank brings fewer steps

Each other rank has a thread here that reads its messages, and one that writes to it. So a rank that
is stopped holds up these two threads alone. Rank 0 holds the weights once more, the outer rule's v,
and the differences that have come, until the round closes.
Guarded by tests/equivalence/test_quorum.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import final

import torch
from torch import Tensor

from shoal.contracts.batch import same_batch
from shoal.core.errors import ShoalError
from shoal.core.outer_step import Outer
from shoal.strategies.local import Velocity
from shoal.strategies.round_mail import Mail, MailChannel, MailKind
from shoal.strategies.round_members import RoundMembers

_LOOK_S = 0.05  # longest time between two looks at the clock while a rank waits for a round
_IDLE_S = 0.5  # the same while no rank waits
_ASK_S = 0.25  # seconds between two questions where a rank is that has not come
_MOST_MAIL = 4  # messages under way to a rank that reads none, before it is called no more


@final
class KeptWeights:
    """The weights in common, and the outer rule's state of them, on rank 0.

    Args:
        values: the weights, a flat tensor for each dtype, at the host.
        velocities: the outer rule's v of each of them.
        outer: the outer rule.
        rates: returns the present learning rate by parameter, for "slowmo".
    """

    def __init__(
        self,
        values: Sequence[Tensor],
        velocities: Sequence[Velocity],
        outer: Outer,
        rates: Callable[[], Mapping[str, float]],
    ) -> None:
        self.values, self.velocities = list(values), velocities
        self._outer, self._rates = outer, rates

    def step(self, came: Sequence[Mail]) -> None:
        """Make new weights of the differences of these ranks, in their order."""
        total = sum(mail.rows for mail in came)
        shares = [mail.rows / total if total else 1 / len(came) for mail in came]
        rates = self._rates() if self._outer.rule == "slowmo" else {}
        for number, (old, velocity) in enumerate(zip(self.values, self.velocities, strict=True)):
            momentum = velocity.momentum
            difference = torch.zeros_like(old, dtype=momentum.dtype)
            for mail, share in zip(came, shares, strict=True):
                difference.add_(mail.values[number].to(momentum.dtype), alpha=share)
            velocity.rescale(momentum, rates)
            new = self._outer.step(old.to(momentum.dtype), difference, momentum)
            self.values[number] = new.to(old.dtype)
            velocity.rates = rates


@final
class Keeper:
    """Closes rounds, on a thread of its own.

    Args:
        channel: the messages of all ranks.
        members: the rule by which rounds close.
        weights: the weights in common.
        own: takes the messages to this rank itself.
    """

    def __init__(
        self,
        channel: MailChannel,
        members: RoundMembers,
        weights: KeptWeights,
        own: Callable[[Mail], None],
    ) -> None:
        self._channel, self.members, self.weights = channel, members, weights
        self._own, self.version = own, 0  # number of the running round
        self._is_first = True  # whether no round was closed since training began
        self._came: dict[int, Mail] = {}
        self._coming: SimpleQueue[tuple[int, Mail]] = SimpleQueue()
        self._asked_s, self._has_called = monotonic(), False
        self._going: dict[int, SimpleQueue[Mail]] = {r: SimpleQueue() for r in channel.comm.others}
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="shoal-keeper", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        for rank in self._channel.comm.others:
            for work in (self._read, self._write):
                name = f"shoal-keeper-{rank}"
                threading.Thread(target=work, args=(rank,), name=name, daemon=True).start()
        self._thread.start()

    def put(self, mail: Mail, rank: int = 0) -> None:
        """Take a message of a rank."""
        self._coming.put((rank, mail))

    def begin(self, values: Sequence[Tensor], version: int) -> None:
        """Begin with these weights. No rank may be in a round."""
        self.weights.values, self.version = list(values), version
        self._is_first = True
        self._came.clear()
        self.members.begin(monotonic())

    def wait(self, timeout_s: float) -> bool:
        """Wait until every rank has ended, at most so long. Return whether all have."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _read(self, rank: int) -> None:
        mail = None
        with suppress(ShoalError):  # its rank is lost, which the waits for rounds report
            while mail is None or mail.kind is not MailKind.END:
                mail = self._channel.receive(rank)
                self.put(mail, rank)

    def _write(self, rank: int) -> None:
        mail = None
        with suppress(ShoalError):
            while mail is None or mail.kind is not MailKind.END:
                mail = self._going[rank].get()
                self._channel.send(mail, rank)

    def _send(self, rank: int, mail: Mail) -> None:
        if rank == self._channel.comm.rank:
            self._own(mail)
        else:
            self._going[rank].put(mail)

    def _serve(self) -> None:
        ranks = self._channel.comm.size
        try:
            while len(self.members.ended) < ranks:
                with suppress(Empty):
                    self._take(*self._coming.get(timeout=_LOOK_S if self._came else _IDLE_S))
                self._look()
        except BaseException as error:
            self.error = error

    def _look(self) -> None:
        """Close the round if it is time, or call the ranks that are missing."""
        if not self._came:
            return
        now_s = monotonic()
        if self.members.closes_in_s(now_s) <= 0:
            self._close(now_s)
        elif self.members.calls(now_s) and not self._has_called:
            self._has_called = True
            self._tell_missing(MailKind.CALL)
        elif now_s > self._asked_s + _ASK_S:
            self._asked_s = now_s
            self._tell_missing(MailKind.ASK)

    def _tell_missing(self, kind: MailKind) -> None:
        own = self._channel.comm.rank
        for rank in sorted(self.members.missing):
            if rank == own or self._going[rank].qsize() < _MOST_MAIL:
                self._send(rank, Mail(kind, self.version))

    def _take(self, rank: int, mail: Mail) -> None:
        members = self.members
        if mail.kind is MailKind.PLACE:
            if mail.counts and mail.version == self.version:
                members.away(rank)
        elif mail.kind is MailKind.END:
            members.end(rank)
            self._send(rank, mail)
        elif mail.version < self.version:
            members.back(rank)
            self._answer(rank, counts=False)
        else:
            members.come(rank)
            self._came[rank] = mail

    def _answer(self, rank: int, *, counts: bool) -> None:
        values = self.weights.values  # replaced by each round, and never changed
        self._send(rank, Mail(MailKind.WEIGHTS, self.version, counts, values=values))

    def _close(self, now_s: float) -> None:
        members = self.members.close(now_s)
        came = [self._came[rank] for rank in members]
        self._came.clear()
        batches = {mail.batch for mail in came}
        if self._is_first and len(came) > 1 and len(batches) == 1 and batches != {0.0}:
            raise same_batch(len(came))
        self._is_first = False
        self.weights.step(came)
        self.version += 1
        self._has_called = False
        for rank in members:
            self._answer(rank, counts=True)
