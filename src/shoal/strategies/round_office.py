"""Office of rounds with a quorum: one rank's side of them, with rank 0's keeper or the way to it.

    exchange   send this rank's steps, and wait for the weights in common
    a thread   reads messages meanwhile: weights, calls, and questions whether this rank waits for
               the others outside of rounds
    drain      this rank makes no steps any more. Rank 0 goes on closing rounds until all say so

Guarded by tests/equivalence/test_quorum.py.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import final

from shoal.contracts.comm import Comm
from shoal.core.errors import ShoalError
from shoal.strategies.round_keeper import Keeper
from shoal.strategies.round_mail import Mail, MailChannel, MailKind

_LOOK_S = 0.5  # seconds between two looks of a waiting thread for a lost rank


@final
class RoundOffice:
    """One rank's side of rounds with a quorum.

    Args:
        comm: an idle channel of the ranks.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._channel: MailChannel | None = None  # set by `start`
        self.keeper: Keeper | None = None  # set on rank 0
        self.in_round = False  # whether this rank waits for a round, or is about to
        self._called = -1  # the last round that this rank was called to
        self._weights: SimpleQueue[Mail] = SimpleQueue()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def start(self, channel: MailChannel, keeper: Keeper | None) -> None:
        """Start the threads.

        Args:
            channel: the messages.
            keeper: closes rounds, on rank 0.
        """
        self._channel, self.keeper = channel, keeper
        if keeper is not None:
            keeper.start()
            return
        threading.Thread(target=self._read, name="shoal-rounds", daemon=True).start()

    def has_call(self, version: int) -> bool:
        """Return whether the others wait for this rank's steps of that round."""
        return self._called >= version

    def exchange(self, steps: Mail, comm: Comm) -> Mail:
        """Send this rank's steps. Return the weights in common, once the round is closed.

        Args:
            steps: the steps.
            comm: hears of lost ranks.
        """
        self._put(steps)
        while True:
            with suppress(Empty):
                return self._weights.get(timeout=_LOOK_S)
            comm.hear()
            error = self._error if self.keeper is None else self.keeper.error
            if error is not None:
                raise error

    def take(self, mail: Mail) -> None:
        """Take a message of the keeper, on any thread."""
        if mail.kind is MailKind.WEIGHTS:
            self._weights.put(mail)
        elif mail.kind is MailKind.CALL:
            self._called = mail.version
        elif mail.kind is MailKind.ASK:
            is_away = self._comm.journal.is_waiting() and not self.in_round
            self._put(Mail(MailKind.PLACE, mail.version, is_away))
        else:
            self._ended.set()

    def _put(self, mail: Mail) -> None:
        assert self._channel is not None
        if self.keeper is None:
            self._channel.send(mail, 0)
        else:
            self.keeper.put(mail)

    def _read(self) -> None:
        assert self._channel is not None
        try:
            while not self._ended.is_set():
                self.take(self._channel.receive(0))
        except BaseException as error:
            self._error = error

    def drain(self) -> None:
        """Say that this rank makes no steps any more. Rank 0 waits until all ranks have said so."""
        if self._channel is None or self._ended.is_set() or self._error is not None:
            return
        self._put(Mail(MailKind.END))
        keeper = self.keeper
        while not (self._ended.wait(_LOOK_S) and (keeper is None or keeper.wait(_LOOK_S))):
            with suppress(ShoalError):
                self._comm.hear()
                error = self._error if keeper is None else keeper.error
                if error is None:
                    continue
            return

    def abandon(self) -> None:
        """Do nothing: the threads are daemons, and end with the channel."""

    def close(self) -> None:
        """Close the channel."""
        self._comm.close()
