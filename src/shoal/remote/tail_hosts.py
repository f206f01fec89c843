"""Hosts that run the end of a model, and a worker's way to its own.

Every worker has one of them, and writes to that alone; it writes the same as every other worker, in
the same order (tail_messages.py). What they do with it: tail/stage.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError
from shoal.remote.channel import Channel
from shoal.remote.tail_messages import (
    Autocast,
    Backward,
    Forward,
    Modes,
    TailDone,
    TailLoss,
    TailMessage,
)
from shoal.remote.wire import Data

T = TypeVar("T")
_UNDER_WAY = 16  # tensors at most that a worker has sent and that have not gone yet


@final
class TailHosts:
    """The hosts that run the end of the model, as every rank sees them.

    Args:
        comm: all ranks.
    """

    def __init__(self, comm: Comm) -> None:
        workers, tail = comm.workers, comm.topology.tail
        self.is_one = comm.rank >= workers
        self.comm = comm.channel("tail", idle=self.is_one)
        self.peers = range(workers, comm.size) if self.is_one else range(workers)
        self.hosts = comm.topology.hosts[workers:]
        # whose messages this rank takes, if it is one
        self.workers = [w for w in range(workers) if workers + w % tail == comm.rank]
        # to the one that this rank writes to, if it is a worker
        self.channel = Channel[Any](self.comm, workers + comm.rank % tail, most=_UNDER_WAY)
        self._ended = self.is_one
        self._ways: tuple[Comm, Comm] | None = None
        self._ordering: list[Channel[Any]] = []
        self.calls = 0  # of parallelize: the hosts take part in the first

    @property
    def speaks(self) -> bool:
        """Whether this worker is its tail host's first, from which is taken what all share."""
        return self.comm.rank < len(self.hosts)

    def open_stations(self) -> tuple[Comm, Comm]:
        """Open channels for a pipeline, and for orders to these hosts (a collective)."""
        if self._ways is None:
            stations = self.comm.channel("stations")
            self._ways = stations, self.comm.channel("orders", idle=self.is_one)
        return self._ways

    def tell_all(self, message: TailMessage) -> None:
        """Send each of these hosts an order, if this is the first rank."""
        for channel in self.ordering():
            channel.post(message)

    def ordering(self) -> list[Channel[Any]]:
        """Return this rank's ends of the ways of orders, by host."""
        if not self._ordering and not self.is_one:
            _, orders = self.open_stations()
            hosts = range(self.comm.workers, self.comm.size)
            self._ordering = [Channel[Any](orders, host, most=_UNDER_WAY) for host in hosts]
        return self._ordering

    def tell(self, message: TailMessage) -> None:
        """Send this worker's tail host a message."""
        if self._ended:
            raise UsageError(
                "the session that the model was parallelised in has ended",
                do="train within the session",
            )
        self.channel.post(message)

    def ask(self, message: TailMessage, kind: type[T]) -> T:
        """Send it, and wait for the answer."""
        self.tell(message)
        return self.channel.answer(kind)

    def settle(self) -> None:
        """Wait until all that was told has gone."""
        self.channel.settle()

    def drain(self) -> None:
        """Tell the tail host that this worker asks no more."""
        if not self._ended:
            if self._ordering and not self.comm.rank:
                self.tell_all(TailDone())
                for channel in self._ordering:
                    channel.settle()
            self.tell(TailDone())
            self.channel.settle()
            self._ended = True

    def abandon(self) -> None:
        """Nothing goes on beside the main thread."""

    def close(self) -> None:
        """The same."""


def modes(
    modules: Sequence[nn.Module],
    parameters: Iterable[nn.Parameter],
    settings: Sequence[Mapping[str, Any] | None] | None = None,
) -> Modes:
    """What is set now."""
    changed = settings or [None] * len(modules)
    return Modes(
        tuple(module.training for module in modules),
        tuple(parameter.requires_grad for parameter in parameters),
        tuple(None if attributes is None else Data(dict(attributes)) for attributes in changed),
    )


def modules_of(modules: Iterable[nn.Module], loss_fn: Any) -> list[nn.Module]:
    """Those of the tail, and of the loss, if it is one."""
    return [
        inner
        for module in (*modules, loss_fn)
        if isinstance(module, nn.Module)
        for inner in module.modules()
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


@dataclass(frozen=True)
class MicroBatch:
    """The number of a micro-batch, and of its forward."""

    run: int = 0
    index: int = 0  # in the run
    oldest: int = 0  # the first run that this worker has still


def forward_message(
    activation: Tensor | None,
    modes: Modes | None,
    micro_batch: MicroBatch = MicroBatch(),
    *,
    of_gradients: bool = True,
    back: bool = True,
    wide: torch.dtype | None = None,
) -> Forward:
    """A micro-batch, and whether its gradient is to come back; with the first goes what is set."""
    run, index, oldest = micro_batch.run, micro_batch.index, micro_batch.oldest
    return Forward(run, index, oldest, modes, of_gradients, back, _autocast(), activation, wide)


def loss_message(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, run: int = 0, index: int = 0
) -> TailLoss:
    """What the loss is called with beside the output."""
    of_gradients = torch.is_grad_enabled()
    return TailLoss(run, index, Data(args), Data(dict(kwargs)), of_gradients, _autocast())


def backward_message(
    cleared: Sequence[bool],
    wanted: Sequence[bool],
    weight: float,
    slopes: Mapping[int, Tensor],
    *,
    run: int = 0,
) -> Backward:
    """Parameters without a gradient so far, and those that are to get one; this worker's weight;
    its losses' slopes.
    """
    return Backward(run, tuple(cleared), tuple(wanted), weight, dict(slopes))


def _autocast() -> Autocast:
    return Autocast(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
