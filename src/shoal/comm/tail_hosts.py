"""Hosts that run the end of a model, and what is said to them: letters (letters.py), each answered
or not.

Every worker has one of them, and writes to that alone; it writes the same as every other worker, in
the same order. What they do with it: runtime/stage.py.
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
from shoal.contracts.comm import Comm, Pending
from shoal.core.errors import UsageError

VALUES, GRADIENTS = "values", "gradients"  # what is read or written
_UNDER_WAY = 16  # messages at most that a worker has sent and that have not gone yet


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
        # by this rank, if it is one
        self.served = [w for w in range(workers) if workers + w % tail == comm.rank]
        self._mine = workers + comm.rank % tail  # that serves this rank, if it is a worker
        self._under_way: deque[tuple[Pending, Tensor]] = deque()
        self._ended = self.is_one
        self.calls = 0  # of parallelize: the hosts take part in the first

    @property
    def speaks(self) -> bool:
        """Whether this worker is the first of its tail host's: what is the same on all is taken
        from it.
        """
        return self.comm.rank < len(self.hosts)

    def tell(self, what: Ask, content: Any, run: int = 0, index: int = 0, oldest: int = 0) -> None:
        """Send this worker's tail host a wish."""
        if self._ended:
            raise UsageError(
                "the session that the model was parallelised in has ended",
                do="train within the session",
            )
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

    def drain(self) -> None:
        """Tell the tail host that this worker asks no more."""
        if not self._ended:
            self.tell(Ask.END, None)
            self.settle()
            self._ended = True

    def abandon(self) -> None:
        """Nothing goes on beside the main thread."""

    def close(self) -> None:
        """The same."""


@dataclass(frozen=True)
class Modes:
    """What the model's code has set that the tail must be run with."""

    training: tuple[bool, ...]  # of every module of the tail, and of the loss
    trainable: tuple[bool, ...]  # of every parameter
    # of every module the plain attributes, if they have changed
    settings: tuple[Mapping[str, Any] | None, ...]


def modes(
    modules: Sequence[nn.Module],
    parameters: Iterable[nn.Parameter],
    settings: Sequence[Mapping[str, Any] | None] | None = None,
) -> Modes:
    """What is set now."""
    training, trainable = (
        (each.training for each in modules),
        (each.requires_grad for each in parameters),
    )
    return Modes(tuple(training), tuple(trainable), tuple(settings or [None] * len(modules)))


def modules_of(modules: Iterable[nn.Module], loss_fn: Any) -> list[nn.Module]:
    """Those of the tail, and of the loss, if it is one."""
    return [
        each
        for module in (*modules, loss_fn)
        if isinstance(module, nn.Module)
        for each in module.modules()
    ]


def parameters_of(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of some modules by dotted name, each once."""
    first: dict[nn.Parameter, str] = {}
    for name, module in modules.items():
        for leaf, parameter in module.named_parameters():
            first.setdefault(parameter, f"{name}.{leaf}")
    return {name: parameter for parameter, name in first.items()}


def plain_settings(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that are plain values."""
    return {
        n: v
        for n, v in vars(module).items()
        if not n.startswith("_") and n != "training" and _is_plain(v)
    }


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, int | float | str)
        or (isinstance(value, tuple) and all(map(_is_plain, value)))
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at what goes into a module, or out of it."""
    own = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(own)


def forward_letter(
    its_modes: Modes | None, activation: Tensor | None, *, of_gradients: bool, back: bool
) -> tuple[Any, ...]:
    """A micro-batch, and whether its gradient is to come back; with the first goes what is set."""
    return its_modes, of_gradients, back, _autocast(), activation


def loss_letter(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, of_gradients: bool
) -> tuple[Any, ...]:
    """What the loss is called with beside the output."""
    return args, dict(kwargs), of_gradients, _autocast()


def backward_letter(
    cleared: Sequence[bool], wanted: Sequence[bool], weight: float, slopes: Mapping[int, Tensor]
) -> tuple[Any, ...]:
    """Parameters without a gradient so far, and those that are to get one; this worker's weight;
    its losses' slopes.
    """
    return tuple(cleared), tuple(wanted), weight, dict(slopes)


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
