"""Hosts that hold layers of a pipeline and bring no rows: their orders as a model is opened.

Their ranks come after the ranks that train. A plan names them as it names other ranks:
"pipeline:3" where three ranks train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.contracts.comm import Comm
from shoal.contracts.state import OF_LOSS
from shoal.core.errors import PlanError
from shoal.core.facts import MovingState
from shoal.core.plan import Plan
from shoal.pipeline.guide import ChangedSettings, Guide
from shoal.pipeline.parts import RowParts
from shoal.pipeline.route import EACH
from shoal.planner.holders import holders_in
from shoal.profiling.identity import trainable_layers
from shoal.remote.holder_way import FarHolder, HolderWay
from shoal.remote.station_messages import OpenStations
from shoal.remote.tail_hosts import TailHosts
from shoal.strategies.carrier_terms import row_codec


def holds_apart(plan: Plan) -> bool:
    """Return whether a plan gives layers to hosts that bring no rows."""
    return any(rank >= plan.ranks for rank in holders_in(plan).values())


@dataclass(frozen=True)
class HeldApart:
    """The ways to hosts that hold layers of one model and bring no rows.

    Args:
        hosts: the ways between all ranks.
        holders: the rank of every layer; `EACH` of a layer that all ranks with rows have.
        homes: the rank of every buffer that training changes, by name.
        comm: all ranks.
        changed: settings of the model and the loss that may change.
    """

    hosts: TailHosts
    holders: Mapping[str, int]
    homes: Mapping[str, int]
    comm: Comm
    changed: ChangedSettings

    def guide(self, model: nn.Module, trainers: Comm) -> Guide:
        """Return the guide that tells these hosts of all calls."""
        far = []
        for number in range(len(self.hosts.hosts)):
            own = {
                name: parameter
                for layer in trainable_layers(model)
                for name, parameter in layer.parameters.items()
                if self.holders[layer.name] == trainers.size + number
            }
            if own:
                far.append(FarHolder(HolderWay(self.hosts, number, trainers), own))
        tell = None if trainers.rank else self.hosts.tell_all
        return Guide(trainers, tell, far, self.changed)


def open_holders(
    hosts: TailHosts,
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    plan: Plan,
    parts: RowParts,
    moving: Sequence[MovingState],
) -> HeldApart:
    """Tell hosts the layers that they hold (a collective).

    Raises:
        PlanError: the model is not the first, or training changes a buffer of the loss, or of a
            module with layers on several ranks.
    """
    _check_first(hosts)
    named_ranks = holders_in(plan)
    holders = {layer.name: named_ranks.get(layer.name, EACH) for layer in trainable_layers(model)}
    homes = {state.name: home_of(state.name, holders) for state in moving}
    workers = hosts.comm.workers
    buffers = {
        state.name: (state.how == "mean", homes[state.name])
        for state in moving
        if homes[state.name] >= workers
    }
    codecs = {choice.rows for choice in plan.choices if choice.layer in named_ranks}
    codec = row_codec(max(codecs))
    hosts.tell(
        OpenStations(
            holders,
            buffers,
            (parts.count, {form: tuple(cut) for form, cut in parts.calls.items()}),
            "" if codec is None else str(codec),
        )
    )
    comm, _ = hosts.open_stations()
    changed = ChangedSettings(model, loss_fn)
    changed.local = {name for name, home in homes.items() if home < workers} | {
        name
        for name, buffer in model.named_buffers()
        if not buffer.dim() and not buffer.is_floating_point()
    }
    changed.see()
    return HeldApart(hosts, holders, homes, comm, changed)


def _check_first(hosts: TailHosts) -> None:
    """Raise PlanError if these hosts have taken part in an earlier `parallelize`."""
    if hosts.calls > 1:
        raise PlanError(
            "hosts that bring no rows hold layers of the model that is parallelised first",
            do="parallelise this one first, or name ranks that train",
        )


def home_of(name: str, holders: Mapping[str, int]) -> int:
    """Return the rank of a buffer that training changes: that of the layers around it.

    Args:
        name: the dotted name of the buffer.
        holders: the rank of each layer.

    Raises:
        PlanError: it is in the loss, or layers around it have several ranks.
    """
    if name.startswith(OF_LOSS):
        raise PlanError(
            "a pipeline does not keep buffers of the loss that training changes",
            where=f"buffer {name.removeprefix(OF_LOSS)} of the loss",
            do="make the buffer a part of the model, or leave out the pipeline",
        )
    module = name
    while True:
        module = module.rpartition(".")[0]
        near = {
            rank
            for layer, rank in holders.items()
            if not module or layer == module or layer.startswith(f"{module}.")
        }
        if len(near) == 1:
            return near.pop()
        if near:
            raise PlanError(
                "training changes a buffer of a module with layers on several ranks",
                where=f"buffer {name}",
                do="make it a buffer of a module with layers of one rank, or give these layers to "
                "one rank",
            )
