"""Synchronised batch norm: modules take their statistics from the rows of all ranks.

    found     torch's own BatchNorm layers if the user asks for it, nn.SyncBatchNorm always
    alone     while a model is profiled: the same code with one rank, so that its time is measured
    joined    from parallelize on, over a channel that main threads wait for
    released  the layers have their own classes again

Only the object's class changes. Running statistics get the same bits on every rank, so they are not
sent. The cost is in tensors/sync_norm.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm.threads import ThreadComm
from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import UNWEIGHED, Weighing
from shoal.core.cost import Phase, Traffic, total
from shoal.core.eager_methods import eager
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, ModelProfile, SyncNorm, Topology
from shoal.strategies.copies import class_served_by, kind_before, plain
from shoal.strategies.cut_layers import move
from shoal.tensors.guarded_parameters import ComingParameter, keeper
from shoal.tensors.sync_norm import NormOfRanks, Synchronised, normalise, sums_kind

_SLOT = "_shoal_sync_norm"  # attribute of a module: what it asks of the ranks


def norms_of(model: nn.Module, asked: bool) -> dict[str, _BatchNorm]:
    """Return the norms that will take statistics from all ranks' rows, by dotted name.

    Args:
        model: any module.
        asked: whether to serve torch's BatchNorm layers too. nn.SyncBatchNorm is always served,
            unless it has a process group of its own.

    Raises:
        UsageError: `asked` is set, and a BatchNorm layer has a forward of its own.
    """
    found: dict[str, _BatchNorm] = {}
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or isinstance(module, Synchronised):
            continue
        is_sync = isinstance(module, nn.SyncBatchNorm)
        if is_sync and module.process_group is not None:
            continue
        own_forward = not type(module).forward.__module__.startswith("torch.nn.")
        if asked and own_forward:
            raise UsageError(
                f"{type(module).__name__} has a forward of its own, and cannot be synchronised",
                where=f"layer {name}",
                do="use nn.BatchNorm1d, 2d or 3d there, or leave out sync_batchnorm",
            )
        if (asked or is_sync) and not own_forward:
            found[name] = module
    return found


@contextmanager
def alone(model: nn.Module, asked: bool) -> Iterator[SyncNorms]:
    """Run the model's norms with their later code, but on this rank alone."""
    norms = SyncNorms(model, asked)
    norms.join(ThreadComm())
    try:
        yield norms
    finally:
        norms.release()


@final
class SyncNorms:
    """The synchronised norms of one model. It keeps none of them alive.

    Args:
        model: the module.
        asked: as in `norms_of`.
    """

    def __init__(self, model: nn.Module, asked: bool) -> None:
        self._modules = {name: ref(norm) for name, norm in norms_of(model, asked).items()}
        self._seen: dict[str, _Asked] = {}

    @property
    def names(self) -> list[str]:
        """Dotted names of the norms."""
        return list(self._modules)

    def join(self, comm: Comm, weighs: Weighing = UNWEIGHED) -> None:
        """Make the norms use the rows of all ranks of a channel."""
        for name, module in self._living():
            self._seen[name] = _Asked(NormOfRanks(name, comm, weighs))
            module.__class__ = _class_of(type(module))
            module.__dict__[_SLOT] = self._seen[name]

    def release(self) -> None:
        """Give the norms their own classes again."""
        for _, module in self._living():
            del module.__dict__[_SLOT]
            module.__class__ = kind_before(module)

    def _living(self) -> Iterator[tuple[str, Any]]:
        for name, held in self._modules.items():
            if (module := held()) is not None:
                yield name, module

    def describe(self, profile: ModelProfile) -> tuple[SyncNorm, ...]:
        """Describe each norm's messages in a step, as the model was profiled."""
        calls = {layer.name: layer.calls for layer in profile.layers}
        return tuple(
            SyncNorm(name, asked.channels, asked.itemsize, calls.get(name, 1), asked.returns)
            for name, asked in self._seen.items()
            if asked.channels
        )


def phases_of(norms: Sequence[SyncNorm], cluster: Cluster) -> tuple[Phase, Phase] | None:
    """Return the cost of all norms in a step: in forward, and in backward; None without norms."""
    if not norms:
        return None
    topology, pace = cluster.topology, cluster.move_pace
    there = [_traffic(norm, norm.forward_bytes, topology) for norm in norms]
    back = [_traffic(norm, norm.backward_bytes, topology) for norm in norms if norm.returns]
    return Phase(total(there), pace), Phase(total(back), pace)


def _traffic(norm: SyncNorm, nbytes: int, topology: Topology) -> Traffic:
    calls = move(topology, lambda source, to: nbytes * norm.calls)
    return Traffic(calls.sent, calls.received, norm.calls, calls.leaving)


@dataclass
class _Asked:
    """A norm's link to the other ranks, and the form of its input."""

    ranks: NormOfRanks
    channels: int = 0
    itemsize: int = 0
    returns: bool = False  # whether its rows take a gradient

    def saw(self, x: Tensor) -> None:
        self.channels, self.itemsize = x.shape[1], sums_kind(x.dtype).itemsize
        self.returns = self.returns or x.requires_grad


class _SyncNormLayer(Synchronised):
    """A batch norm over the rows of all ranks, with the same parameters, names and repr.

    A copy of it is an ordinary layer.
    """

    @eager
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if not self.training:
            output: Tensor = super().forward(*args, **kwargs)
            return output
        (x,) = (*args, *kwargs.values())
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        asked: _Asked = self.__dict__[_SLOT]
        asked.saw(x)
        weight, bias = self.weight, self.bias
        for parameter in (weight, bias):
            if isinstance(parameter, ComingParameter):
                keeper(parameter).arrive(parameter)
        statistics = asked.ranks.statistics(x)
        if self.track_running_stats and self.running_mean is not None:
            unbiased = statistics.var * (statistics.count / (statistics.count - 1))
            self._follow(statistics.mean, unbiased)
        return normalise(x, weight, bias, self.eps, statistics, asked.ranks)

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor) -> None:
        """Update the running statistics."""
        assert self.running_mean is not None and self.running_var is not None
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if momentum is None:  # use the mean of all batches
            assert self.num_batches_tracked is not None
            momentum = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)

    def _get_name(self) -> str:
        return kind_before(self).__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, kind_before(self), _SLOT)


def _class_of(kind: Any) -> Any:
    """Return the class of synchronised norms of a kind, with the name by which plans know them."""
    return class_served_by(_SyncNormLayer, kind, kind.__name__, kind.__module__)
