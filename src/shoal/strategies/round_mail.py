"""Mail of rounds with a quorum: messages between rank 0 and every other rank.

A message is six numbers, and behind them the values of all parameters if it has any: a flat tensor
for each dtype, at the host. It crosses an idle channel, on which nothing has a deadline, because
the other side may be stopped for long. 48 bytes, and the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from threading import Lock
from typing import final

import torch
from torch import Tensor

from shoal.contracts.comm import Comm

_NUMBERS = 6


class MailKind(IntEnum):
    """Purpose of a message."""

    STEPS = 1  # a rank's difference to the weights with which the round began
    WEIGHTS = 2  # the weights in common, as the answer to that
    CALL = 3  # a quorum has come: bring the steps that there are
    ASK = 4  # does this rank wait for the others outside of rounds?
    PLACE = 5  # the answer to that
    END = 6  # nothing follows


@dataclass(frozen=True, eq=False)
class Mail:
    """One message.

    Args:
        kind: its purpose.
        version: number of the round that it belongs to; of WEIGHTS, of the round that they begin.
        counts: of WEIGHTS, whether the rank's own steps are in them; of PLACE, whether it waits.
        rows: of STEPS, rows that they were made on.
        batch: of STEPS, a digest of the first batch; 0 for none.
        values: of STEPS and WEIGHTS, a flat tensor for each dtype.
    """

    kind: MailKind
    version: int = 0
    counts: bool = False
    rows: float = 0.0
    batch: float = 0.0
    values: Sequence[Tensor] = ()


@final
class MailChannel:
    """Sends and receives messages.

    Args:
        comm: an idle channel of the ranks.
        like: tensors as large as the values of a message.
    """

    def __init__(self, comm: Comm, like: Sequence[Tensor]) -> None:
        self.comm, self._like = comm, like
        self._sending = [Lock() for _ in range(comm.size)]  # a message is several of the channel's

    def send(self, mail: Mail, to: int) -> None:
        """Send a message, and wait until it has gone. That may take long."""
        numbers = [mail.kind, mail.version, mail.counts, mail.rows, mail.batch, len(mail.values)]
        head = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with self._sending[to]:
            for tensor in (head, *mail.values):
                self.comm.send(tensor, to).wait()

    def receive(self, source: int) -> Mail:
        """Wait for the next message of a rank."""
        head = torch.empty(_NUMBERS, dtype=torch.float64, device="cpu")
        self.comm.receive(head, source).wait()
        kind, version, counts, rows, batch, has_values = head.tolist()
        values = [torch.empty_like(tensor) for tensor in self._like] if has_values else []
        for tensor in values:
            self.comm.receive(tensor, source).wait()
        return Mail(MailKind(int(kind)), int(version), bool(counts), rows, batch, values)
