"""A model with layers on several ranks: its holders, and the ways of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, final

import torch
from torch import nn

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import Weighing
from shoal.pipeline.absent_tensors import Forms
from shoal.pipeline.alone_output import MODEL
from shoal.pipeline.calls import CallsTold, Meet, ModelCall, Shape, number_of
from shoal.pipeline.guide import Guide
from shoal.pipeline.homes import Homes, homes_of
from shoal.pipeline.moving_buffers import MovingBuffer, aside
from shoal.pipeline.parts import RowParts
from shoal.pipeline.record import recorded
from shoal.pipeline.replay import Modules, other_way, spans
from shoal.pipeline.route import EACH, Outbox, StationRoute
from shoal.pipeline.stations import Stations, stations

FORWARD, LOSS, BACKWARD = "pipeline: forward", "pipeline: loss", "pipeline: backward"
EVALUATION = "pipeline: call of the model in evaluation (no_grad)"
READING = "pipeline: reading of the model's output"
GATHERING = "pipeline: gathering of the model's output"


@final
class PipelinedModel:
    """A model with layers on several ranks.

    Args:
        model: the module.
        holders: the rank of each layer.
        layers: the layer of each trainable parameter.
        comm: the ranks.
        weighs: tells the weight of this rank's rows in the running backward.
        guide: tells hosts that bring no rows; None if all ranks bring rows.
    """

    def __init__(
        self,
        model: nn.Module,
        holders: Mapping[str, int],
        layers: Mapping[str, str],
        comm: Comm,
        weighs: Weighing,
        guide: Guide | None = None,
    ) -> None:
        self.comm, self.weighs, self.forms, self.guide = comm, weighs, Forms(), guide
        self.modules = Modules.of(model)
        self.model, self.holders, self.layers = model, dict(holders), dict(layers)
        telling = comm if guide is None else guide.trainers
        self._told = {purpose: CallsTold(telling) for purpose in (FORWARD, LOSS, READING)}
        self.parts = RowParts()  # parts of each rank's rows
        self._routes: dict[str, StationRoute] = {}
        self.outbox = Outbox(comm)
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        # shapes of values that arrive at a station, by the number of a call's forms, and by rows
        self.shapes: dict[tuple[int, int, int], list[Shape]] = {}
        self.homes = Homes(comm.rank)  # ranks of frozen parameters and of buffers

    @property
    def bringing(self) -> range:
        """The ranks that bring rows."""
        return range(self.comm.workers)

    @cached_property
    def elsewhere(self) -> list[nn.Parameter]:
        """The trainable parameters that other ranks hold; none on a host without rows."""
        here = (
            {self.comm.rank, EACH} if self.comm.rank in self.bringing else {*self.holders.values()}
        )
        return [
            parameter
            for name, parameter in self.model.named_parameters()
            if name in self.layers and self.holders[self.layers[name]] not in here
        ]

    def tell(
        self, call: ModelCall, purpose: str, meet: Meet | None = None
    ) -> tuple[list[list[Shape]], list[int]]:
        """Tell the forms of a call's arguments, and return the forms of all ranks (a collective).

        Args:
            call: the model's call, or that of functions of its output.
            purpose: `FORWARD`, `LOSS` or `READING`.
            meet: tells each rank a number, in place of `Comm.numbers`.
        """
        return self._told[purpose].tell(call, purpose, meet)

    def forget_output(self) -> None:
        """Forget the output of the call before: all ranks call the model again."""
        is_again = torch._C._current_graph_task_id() != -1  # a checkpoint's, in backward
        if self.comm.attendance is not None and not is_again:
            self.comm.attendance.drop(MODEL)

    def route(self, call: ModelCall, forward: Callable[..., Any], number: int) -> StationRoute:
        """Return the way of a call's micro-batches. The first time it is a collective."""
        known = self._routes.get(call.common)
        if known is not None:
            return known
        args, kwargs = call.with_tensors(call.tensors)
        unlike = self.homes.unlike
        with aside([*unlike.values()]):
            record, output = recorded(self.model, self.forms, forward, args, kwargs, unlike.keys())
        uses = record.state_uses()
        homes = self.homes.first(uses, self.holders, self.layers)
        found = stations(
            record, {**self.holders, **homes}, {**self.layers, **{name: name for name in homes}}
        )
        homes |= homes_of(uses, found, self.homes.frozen)
        own = number_of(str(sorted(record.calls.items())))
        told = self.comm.gather_objects(
            ([*found.holders], [list(cut) for cut in found.cuts], homes, own), "pipeline: stations"
        )
        for rank, (*_, its) in enumerate(told):
            if its != own:
                raise other_way(
                    f"the first such forward of rank {rank}", got="other calls than here"
                )
        holders, cuts, homes, _ = told[0]
        self.homes.settle(homes)
        if self.comm.attendance is not None:
            self.comm.attendance.keep()
        self.layers.update(zip(homes, homes, strict=True))
        self.holders.update(homes)
        found = Stations(tuple(holders), tuple(tuple(cut) for cut in cuts))
        route = StationRoute(record, spans(record, found.cuts), found.holders)
        route.output[number] = output
        self._routes[call.common] = route
        return route

    def keep_at(self, name: str, buffer: MovingBuffer, home: int) -> None:
        """Keep a buffer that training changes on a rank that the plan names."""
        self.homes.keep(name, buffer, home)
        self.holders[name], self.layers[name] = home, name

    def keep(self, name: str, buffer: MovingBuffer, layer: str) -> None:
        """Keep a buffer that training changes on the rank of its layer, or of its first use."""
        home = self.holders.get(layer)
        self.homes.keep(name, buffer, home)
        if home is not None:
            self.layers[name] = layer
