"""Hosts that run the end of a model, and what is said to them: letters (letters.py), each answered or not.

Every worker has one of them, and writes to that alone; it writes the same as every other worker, in the same order.
What they do with it: runtime/stage.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.comm.letters import fetch, post
from shoal.core.contracts import Comm, Pending
from shoal.core.errors import UsageError

VALUES, GRADIENTS = "values", "gradients"  # what is read or written
_UNDER_WAY = 16  # letters at most that a worker has sent and that have not gone yet


class Ask(IntEnum):
    """What a worker wants of its tail host."""

    END = 0  # nothing more
    OPEN = 1
    FORWARD = 2
    OUTPUT = 3
    LOSS = 4
    BACKWARD = 5
    STEP = 6
    READ = 7
    WRITE = 8
    CALL = 9
    ADD = 10


@final
class TailHosts:
    """The hosts that run the end of the model, as every rank sees them.

    Args:
        comm: all ranks.
    """

    def __init__(self, comm: Comm) -> None:
        workers, tail = comm.workers, comm.topology.tail
        self.comm = comm.channel("tail", idle=True)
        self.is_one = comm.rank >= workers
        self.peers = range(workers, comm.size) if self.is_one else range(workers)
        self.hosts = comm.topology.hosts[workers:]
        self.served = [w for w in range(workers) if workers + w % tail == comm.rank]  # by this rank, if it is one
        self._mine = workers + comm.rank % tail  # that serves this rank, if it is a worker
        self._under_way: deque[tuple[Pending, Tensor]] = deque()
        self._ended = self.is_one
        self.taken = False  # by a model

    @property
    def speaks(self) -> bool:
        """Whether this worker is the first of its tail host's: what is the same on all is taken from it."""
        return self.comm.rank < len(self.hosts)

    def tell(self, what: Ask, content: Any, run: int = 0, index: int = 0, oldest: int = 0) -> None:
        """Send this worker's tail host a wish."""
        if self._ended:
            raise UsageError("the session that the model was parallelised in has ended", do="train within the session")
        while len(self._under_way) >= _UNDER_WAY:
            self._under_way.popleft()[0].wait()
        self._under_way += post(self.comm, self._mine, (what, run, index, oldest), content)

    def settle(self) -> None:
        """Wait until all that was sent has gone."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def answer(self) -> Any:
        """What the tail host answers."""
        _, content = fetch(self.comm, self._mine)
        return content

    def receive(self, tensor: Tensor) -> Pending:
        """Start receiving a tensor from the tail host."""
        return self.comm.receive(tensor, self._mine)

    def end(self) -> None:
        """Tell the tail host that this worker asks no more."""
        if not self._ended:
            self.tell(Ask.END, None)
            self.settle()
            self._ended = True


@dataclass(frozen=True)
class Modes:
    """What the model's code has set that the tail must be run with."""

    training: tuple[bool, ...]  # of every module of the tail
    trainable: tuple[bool, ...]  # of every parameter


def modes(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> Modes:
    """What is set now."""
    return Modes(tuple(each.training for each in modules), tuple(each.requires_grad for each in parameters))


def forward_letter(
    its_modes: Modes | None, activation: Tensor | None, *, of_gradients: bool, back: bool
) -> tuple[Any, ...]:
    """A micro-batch, and whether its gradient is to come back; with the first goes what is set."""
    return its_modes, of_gradients, back, _autocast(), activation


def loss_letter(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, of_gradients: bool) -> tuple[Any, ...]:
    """What the loss is called with beside the output."""
    return args, dict(kwargs), of_gradients, _autocast()


def backward_letter(cleared: Sequence[bool], weight: float, slopes: Mapping[int, Tensor]) -> tuple[Any, ...]:
    """The parameters without a gradient so far, this worker's weight, and the gradients of its losses."""
    return tuple(cleared), weight, dict(slopes)


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
