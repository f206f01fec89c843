"""Pipeline: each rank holds a run of the model's layers, and computes these for the rows of all.

    forward     the rows of each rank are a micro-batch; what the next run of layers needs goes to
                the rank that holds it
    loss        targets go to the rank that has the end, and each rank's loss comes back
    backward    gradients of what crossed come back, the last micro-batch first

A rank sends, for the rows of all ranks, what crosses behind its layers, and the gradient of what
crosses before them: 2·T·w·s bytes for T rows of width w, whatever the number of layers. Weights,
gradients and optimizer state are divided by the ranks.

Reference: Huang et al., "GPipe", 2019, section 2; multi-node Caffe, whose nets were cut over nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

from torch import nn
from torch.utils import _pytree as pytree

from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Transfer
from shoal.core.cost import Cost, Update
from shoal.core.facts import Cluster, LayerProfile
from shoal.core.role import Role
from shoal.pipeline.output import EndOutput
from shoal.pipeline.run import Pipeline as Running
from shoal.profiling.updates import UpdateFacts, UpdateProbe
from shoal.strategies.stage import run_by, run_no_more, runs_by
from shoal.tensors.cut import cut, is_cut, opened, restore
from shoal.tensors.on_rank import OnRank


@final
class Pipeline(Strategy):
    """Gives each rank a run of layers, through which the rows of all ranks go."""

    name = "pipeline"
    role = Role.PIPELINE
    probes = (UpdateProbe,)

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        if layer.outside_use:
            return layer.outside_use
        return layer.measured(UpdateFacts).joint or None

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        return Cost(
            memory_bytes=sum(layer.nbytes for layer in layers) / cluster.size,
            held=1 / cluster.size,
            update=Update(main=1 / cluster.size),
        )

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        assert place.comm is not None and place.model is not None
        layers = {
            f"{name}.{leaf}" if name else leaf: name
            for name, module in place.layers.items()
            for leaf, _ in module.named_parameters(recurse=False)
        }
        running = Running(place.model, place.holders, layers, place.comm, place.weighs)
        for name, parameter in place.parameters.items():
            holder = place.holders[layers[name]]
            cut(parameter, OnRank(name, parameter, holder, place.comm, place.weighs))
        for name, module in place.layers.items():
            if module is not place.model and place.holders[name] == place.rank:
                run_by(module, _Held(module))
        run_by(place.model, running)
        return []

    def release(self, place: Place, transfers: Sequence[Transfer]) -> None:
        assert place.model is not None
        running = runs_by(place.model)
        running.finish()
        for module in {place.model, *place.layers.values()}:
            run_no_more(module)
        for parameter in filter(is_cut, place.parameters.values()):
            restore(parameter)


@final
class _Held:
    """Runs a layer whose parameters are here."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters(recurse=False))

    def called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with opened(self._parameters):
            return forward(*args, **kwargs)


def is_pipeline(model: nn.Module) -> bool:
    """Return whether a model's layers are in a pipeline."""
    return isinstance(runs_by(model), Running)


def loss_at_end(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss, computed where the end of a pipeline is if that has the output.

    A module is changed in place, a function is wrapped.
    """
    if isinstance(loss_fn, nn.Module):
        run_by(loss_fn, _LossAtEnd())
        return loss_fn

    @functools.wraps(loss_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _LossAtEnd().called(loss_fn, *args, **kwargs)

    return wrapped


@final
class _LossAtEnd:
    """A loss of an output that the rank with the end has."""

    def called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        output = next((each for each in given if isinstance(each, EndOutput)), None)
        return forward(*args, **kwargs) if output is None else output.run.loss(forward, args, kwargs)
