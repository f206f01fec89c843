"""A model with layers on several ranks: its holders, and the ways of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn

from shoal.contracts.comm import Comm
from shoal.contracts.weighing import Weighing
from shoal.pipeline.absent import Forms
from shoal.pipeline.calls import CallsTold, ModelCall, Shape
from shoal.pipeline.homes import homes_of
from shoal.pipeline.moving import MovingBuffer
from shoal.pipeline.parts import RowParts
from shoal.pipeline.record import recorded
from shoal.pipeline.replay import Modules, spans
from shoal.pipeline.route import Outbox, StationRoute
from shoal.pipeline.stations import Stations, stations

FORWARD, LOSS, BACKWARD = "pipeline: forward", "pipeline: loss", "pipeline: backward"


@final
class PipelinedModel:
    """A model with layers on several ranks.

    Args:
        model: the module.
        holders: the rank of each layer.
        layers: the layer of each trainable parameter.
        comm: the ranks.
        weighs: tells the weight of this rank's rows in the running backward.
    """

    def __init__(
        self,
        model: nn.Module,
        holders: Mapping[str, int],
        layers: Mapping[str, str],
        comm: Comm,
        weighs: Weighing,
    ) -> None:
        self.comm, self.weighs, self.forms = comm, weighs, Forms()
        self.modules = Modules.of(model)
        self.model, self.holders, self._layers = model, dict(holders), dict(layers)
        self._told = {FORWARD: CallsTold(comm), LOSS: CallsTold(comm)}
        self.parts = RowParts()  # parts of each rank's rows
        self._routes: dict[str, StationRoute] = {}
        self.outbox = Outbox(comm)
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self.elsewhere: list[nn.Parameter] = [
            parameter
            for name, parameter in model.named_parameters()
            if name in layers and holders[layers[name]] != comm.rank
        ]
        # shapes of values that arrive at a station, by the number of a call's forms, and by rows
        self.shapes: dict[tuple[int, int, int], list[Shape]] = {}
        # frozen parameters that every rank has, and a function that leaves them with a rank
        self.frozen: dict[str, nn.Parameter] = {}
        self.hold: Callable[[str, nn.Parameter, int], None] = _nothing
        self.buffers: list[MovingBuffer] = []  # buffers of the layers that are here

    def tell(self, call: ModelCall, purpose: str) -> tuple[list[list[Shape]], list[int]]:
        """Tell the forms of a call's arguments, and return the forms of all ranks (a collective).

        Args:
            call: the model's call, or the loss's.
            purpose: `FORWARD` or `LOSS`.
        """
        return self._told[purpose].tell(call, purpose)

    def route(self, call: ModelCall, forward: Callable[..., Any], number: int) -> StationRoute:
        """Return the way of a call's micro-batches. The first time it is a collective."""
        known = self._routes.get(call.common)
        if known is not None:
            return known
        args, kwargs = call.with_tensors(call.tensors)
        record, output = recorded(self.model, self.forms, forward, args, kwargs)
        found = stations(record, self.holders, self._layers)
        homes = homes_of(record.parameters, found, self.frozen)
        holders, cuts, homes = self.comm.gather_objects(
            ([*found.holders], [list(cut) for cut in found.cuts], homes), "pipeline: stations"
        )[0]
        self._settle(homes)
        found = Stations(tuple(holders), tuple(tuple(cut) for cut in cuts))
        route = StationRoute(record, spans(record, found.cuts), found.holders)
        route.output[number] = output
        self._routes[call.common] = route
        return route

    def _settle(self, homes: Mapping[str, int]) -> None:
        """Leave frozen parameters with the ranks that use them (a collective)."""
        with torch.inference_mode(False), torch.no_grad():
            for name, rank in homes.items():
                self.hold(name, self.frozen.pop(name), rank)
                self._layers[name], self.holders[name] = name, rank


def _nothing(name: str, parameter: nn.Parameter, rank: int) -> None:
    """Leave a parameter where it is."""
