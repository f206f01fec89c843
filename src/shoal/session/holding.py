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
from shoal.core.errors import PlanError
from shoal.core.facts import MovingState
from shoal.core.plan import Plan
from shoal.pipeline.guide import ChangedSettings, Guide
from shoal.pipeline.parts import RowParts
from shoal.pipeline.route import EACH
from shoal.planner.holders import holders_in, home_of
from shoal.profiling.identity import trainable_layers
from shoal.remote.far_parameters import FarParameters, HolderWay
from shoal.remote.holding_hosts import HoldingHosts
from shoal.remote.station_messages import OpenStations
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

    hosts: HoldingHosts
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
                far.append(FarParameters(HolderWay(self.hosts, number, trainers), own))
        tell = None if trainers.rank else self.hosts.tell_all
        return Guide(trainers, tell, far, self.changed)


def open_holders(
    hosts: HoldingHosts,
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    plan: Plan,
    parts: RowParts,
    moving: Sequence[MovingState],
) -> HeldApart:
    """Tell hosts the layers that they hold (a collective).

    Raises:
        PlanError: the model is not the first, or is on a GPU, or training changes a buffer of the
            loss, or of a module with layers on several ranks.
    """
    _check_first(hosts)
    named_ranks = holders_in(plan)
    holders = {layer.name: named_ranks.get(layer.name, EACH) for layer in trainable_layers(model)}
    _check_devices(model, holders, len(hosts.trainers))
    homes = {state.name: home_of(state.name, holders) for state in moving}
    workers = len(hosts.trainers)
    buffers = {
        state.name: (state.how == "mean", homes[state.name])
        for state in moving
        if homes[state.name] >= workers
    }
    codecs = {choice.rows for choice in plan.choices if choice.layer in named_ranks}
    codec = row_codec(max(codecs))
    opening = OpenStations(
        holders,
        buffers,
        (parts.count, {form: tuple(cut) for form, cut in parts.calls.items()}),
        "" if codec is None else str(codec),
    )
    if not hosts.orders.rank:
        hosts.tell_all(opening)
    comm = hosts.open_stations()
    changed = ChangedSettings(model, loss_fn)
    changed.local = {name for name, home in homes.items() if home < workers} | {
        name
        for name, buffer in model.named_buffers()
        if not buffer.dim() and not buffer.is_floating_point()
    }
    changed.see()
    return HeldApart(hosts, holders, homes, comm, changed)


def _check_first(hosts: HoldingHosts) -> None:
    """Raise PlanError if these hosts have taken part in an earlier `parallelize`."""
    if hosts.calls > 1:
        raise PlanError(
            "hosts that bring no rows hold layers of the model that is parallelised first",
            do="parallelise this one first, or name ranks that train",
        )


def _check_devices(model: nn.Module, holders: Mapping[str, int], trainers: int) -> None:
    """Raise PlanError if a layer that such a host would hold is not on a CPU."""
    for layer in trainable_layers(model):
        devices = {str(p.device) for p in layer.parameters.values() if p.device.type != "cpu"}
        if holders[layer.name] >= trainers and devices:
            raise PlanError(
                "hosts that bring no rows hold layers on CPUs only",
                where=f"layer {layer.name}",
                got=", ".join(sorted(devices)),
                do="give the layer to ranks that train, or train the model on CPUs",
            )
