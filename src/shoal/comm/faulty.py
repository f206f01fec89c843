"""A network that misbehaves on purpose: the same list gives the same faults in every run.

    FaultyComm(comm, [Delay(rank=1, seconds=0.05, every=3), Kill(rank=2, at=17)])

Sends and receives of a rank are its *operations*, numbered from 1 over all its channels in the
order they are posted. Collectives are made of such operations. Failures as data: torchft,
`fail_at(rank, step)`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import sleep
from typing import final

from torch import Tensor

from shoal.comm.around import Around
from shoal.comm.threads import DONE
from shoal.contracts.comm import Comm, Pending


@dataclass(frozen=True)
class Delay:
    """Every `every`-th operation of `rank` starts `seconds` late, and blocks its caller."""

    rank: int
    seconds: float
    every: int = 1


@dataclass(frozen=True)
class RandomDelay:
    """Every operation starts late by something up to `seconds`, drawn for each rank from `seed`."""

    seconds: float
    seed: int = 0


@dataclass(frozen=True)
class Kill:
    """`rank` dies at its `at`-th operation: this and all later ones raise `Killed`."""

    rank: int
    at: int


@dataclass(frozen=True)
class Drop:
    """The cable is pulled: nothing that `rank` sends from its `at`-th operation on arrives.

    There is no losing of one message alone: on a connection that keeps the order, what follows is
    held back too.
    """

    rank: int
    at: int


Fault = Delay | RandomDelay | Kill | Drop


class Killed(RuntimeError):
    """A `Kill` has struck this rank."""


@dataclass
class _State:
    """What all channels of one rank share."""

    random: random.Random
    operations: int = 0
    lock: Lock = field(default_factory=Lock)


@final
class FaultyComm(Around):
    """`inner` and its channels with `faults`; each rank may be given the whole list."""

    def __init__(self, inner: Comm, faults: Sequence[Fault], state: _State | None = None) -> None:
        super().__init__(inner)
        self.faults = [f for f in faults if isinstance(f, RandomDelay) or f.rank == inner.rank]
        seeds = [f.seed for f in self.faults if isinstance(f, RandomDelay)]
        self._state = state or _State(random.Random(f"{seeds} rank {self.rank}"))

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Suffer, then send."""
        dropped = self._suffer()
        return DONE if dropped else self.inner.send(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> Pending:
        """Suffer, then receive."""
        self._suffer()
        return self.inner.receive(tensor, source)

    def channel(self, name: str, *, idle: bool = False) -> FaultyComm:
        """A channel of its own with the same faults, its operations numbered on from this one's."""
        return FaultyComm(self.inner.channel(name, idle=idle), self.faults, self._state)

    def group(self, ranks: range) -> FaultyComm:
        """Those ranks only, with the same faults, its operations numbered on from this one's."""
        return FaultyComm(self.inner.group(ranks), self.faults, self._state)

    def _suffer(self) -> bool:
        """Let the faults of the next operation come true; True if a message sent now is lost."""
        late_s, dropped = 0.0, False
        with self._state.lock:
            self._state.operations += 1
            number = self._state.operations
            for fault in self.faults:
                match fault:
                    case Kill(at=at) if number >= at:
                        raise Killed(f"rank {self.rank} was killed at operation {at}")
                    case Drop(at=at) if number >= at:
                        dropped = True
                    case Delay(seconds=seconds, every=every) if number % every == 0:
                        late_s += seconds
                    case RandomDelay(seconds=seconds):
                        late_s += self._state.random.uniform(0, seconds)
        if late_s:
            sleep(late_s)
        return dropped
