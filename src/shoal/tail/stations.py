"""A host that holds layers of a pipeline and brings no rows (pipeline/guide.py: its orders).

    a thread            receives orders of the first rank that trains, a few ahead (inbox.py)
    the main thread     does the next one
      StationCall         computes this host's stations for the rows of each rank
      StationExpressions  computes functions of the output, if the end is here
      StationBackward     goes back through a call; gradients go to the stations before
      TailStep …          makes the step, with this host's own optimizer

It replays the model's own forward, as the ranks that train do. Guarded by
tests/pipeline/test_holding.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.codecs.coded_exchange import read_codec
from shoal.comm.threads import ThreadComm
from shoal.contracts.row_weights import UNWEIGHED
from shoal.contracts.state import OF_LOSS, states
from shoal.optim.extend import extend
from shoal.pipeline.calls import ModelCall
from shoal.pipeline.computed_forward import EndedForward
from shoal.pipeline.expressions import EndResult, Expression
from shoal.pipeline.guide import ToldCall
from shoal.pipeline.model import PipelinedModel
from shoal.pipeline.model_calls import PipelineCalls
from shoal.pipeline.moving_buffers import MovingBuffer
from shoal.pipeline.parts import RowParts
from shoal.pipeline.run import model_call
from shoal.pipeline.told_functions import LOSS_NAME, Reference, from_data, function_of, modes_of
from shoal.profiling.identity import trainable_layers
from shoal.remote.channel import Channel
from shoal.remote.station_messages import (
    ModuleSettings,
    OpenStations,
    StationBackward,
    StationCall,
    StationExpressions,
)
from shoal.remote.tail_hosts import TailHosts
from shoal.remote.tail_messages import TailDone
from shoal.tail.held import HeldParameters, Nowhere, leave
from shoal.tail.inbox import Inbox
from shoal.tensors.cut import cut
from shoal.tensors.row_crossing import RowCrossing


@dataclass
class HeldCall:
    """A call of the model on a host that brings no rows.

    Args:
        ended: the forward.
        expressions: the output (-1) and functions of it, by number.
        results: results that may get a gradient, by the numbers of expression and result.
    """

    ended: EndedForward
    expressions: dict[int, Expression]
    results: dict[tuple[int, int], Tensor] = field(default_factory=dict)


@final
class HeldStations(HeldParameters):
    """The stations of one model on one host.

    Args:
        hosts: the ways between ranks.
        model: the model.
        loss_fn: the loss; None if the model returns it.
        optimizers: the model's optimizers.
        opening: the layers that are held here.
    """

    def __init__(
        self,
        hosts: TailHosts,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizers: Sequence[Optimizer],
        opening: OpenStations,
    ) -> None:
        self._comm, self._orders = hosts.open_stations()
        self._trainers = range(self._comm.workers)
        self._channels = [Channel[Any](self._orders, rank) for rank in self._trainers]
        self._model, self._loss_fn = model, loss_fn
        self._modules = dict(model.named_modules())
        self._named = dict(model.named_parameters())
        if isinstance(loss_fn, nn.Module):
            self._modules |= {f"{OF_LOSS}{name}": m for name, m in loss_fn.named_modules()}
        self._slots = states(model, None)
        parameters = self._keep_own(opening.holders)
        super().__init__(ThreadComm(), [0], 1, parameters, optimizers)
        leave(optimizers, set(parameters.values()))
        for optimizer in optimizers:
            extend(optimizer)
        self._calls = PipelineCalls(self._pipeline(opening))
        self._forms: dict[int, ModelCall] = {}
        self._runs: dict[int, HeldCall] = {}

    def _keep_own(self, holders: Mapping[str, int]) -> dict[str, nn.Parameter]:
        """Leave this host the parameters of its own layers, and return these by name."""
        held: dict[str, nn.Parameter] = {}
        self._layers: dict[str, str] = {}
        for layer in trainable_layers(self._model):
            for name, parameter in layer.parameters.items():
                self._layers[name] = layer.name
                if holders[layer.name] == self._comm.rank:
                    held[name] = parameter
                else:
                    cut(parameter, Nowhere(name, parameter, self._comm))
        return held

    def _pipeline(self, opening: OpenStations) -> PipelinedModel:
        pipeline = PipelinedModel(self._model, opening.holders, self._layers, self._comm, UNWEIGHED)
        pipeline.parts = RowParts(*opening.parts)
        pipeline.outbox.crossing = RowCrossing(read_codec(opening.codec) if opening.codec else None)
        for name, (is_mean, home) in opening.buffers.items():
            pipeline.keep_at(name, MovingBuffer(self._slots[name], is_mean), home)
        return pipeline

    def serve(self, inbox: Inbox) -> None:
        """Follow the first rank's orders, until it ends."""
        role: Any = self  # it plays the part of a tail host that orders of its own need
        while not isinstance(order := inbox.next()[0], TailDone):
            order.do(role, {0: order})
            for channel in self._channels:  # before memory is used again
                channel.settle()
        self._calls.pipeline.outbox.finish()

    def _answer_all(self, content: Any) -> None:
        for channel in self._channels:
            channel.post(content)

    def call(self, order: StationCall) -> None:
        """Take part in a call of the model."""
        pipeline, calls = self._calls.pipeline, self._calls
        # batch 12: run the stations
        self._set(order.settings)
        self._runs = {run: held for run, held in self._runs.items() if run >= order.oldest}
        pipeline.outbox.finish()
        with modes_of(order.thread).again():
            if order.arguments is not None:
                self._forms[order.number] = model_call(pipeline, *order.arguments.value)
            told = ToldCall(order.shapes, order.numbers, order.seed)
            call, forward = self._forms[order.number], self._model.forward
            ended: EndedForward = calls.run(forward, call, lambda ended: ended, told)
            output, numbers = ended.held()
            held = HeldCall(ended, {-1: output})
            for number, grad in numbers:
                self._tell_number(held, EndResult(output, number), grad)
        self._runs[order.run] = held

    def expressions(self, order: StationExpressions) -> None:
        """Compute functions of a call's output, if the end is here."""
        held = self._runs[order.run]
        run = held.ended.run
        if run.comm.rank != run.route.end:
            return
        # batch 14: compute functions of the output
        call, made = self._expressions(order, held)
        run.comm.journal.begins("pipeline: functions of the output")
        loss = next((each for each in made if each.is_loss), None)
        held.ended.compute_all(made, call, order.shapes, loss=loss)
        held.ended.computed(made)
        for told in order.told:
            result = EndResult(held.expressions[told.expression], told.number)
            if told.is_number:
                self._tell_number(held, result, told.grad)
            else:
                form = result.expression.of_ranks[0][told.number]
                value = held.ended.told_values(result, form, grad=told.grad)
                held.results[told.expression, told.number] = value

    def _expressions(
        self, order: StationExpressions, held: HeldCall
    ) -> tuple[ModelCall, list[Expression]]:
        """Make the expressions of an order, and the call with their arguments."""
        made = [Expression((held.ended,), self._function(name)) for name in order.functions]
        for place, (expression, thread) in enumerate(zip(made, order.threads, strict=True)):
            expression.modes, expression.is_loss = modes_of(thread), not order.functions[place]
            held.expressions[order.first + place] = expression

        def result(reference: Reference) -> EndResult:
            run, number, place = reference
            return EndResult(self._runs[run].expressions[number], place)

        shapes = order.shapes[0]
        tensors = iter([torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in shapes])
        arguments = from_data(order.arguments.value, tensors, result)
        return ModelCall(arguments, {}, {}), made

    def _function(self, name: str) -> Callable[..., Any]:
        if name != LOSS_NAME:
            return function_of(name)
        assert self._loss_fn is not None
        return self._loss_fn

    def _tell_number(self, held: HeldCall, result: EndResult, grad: bool) -> None:
        number = -1 if result.expression.number is None else result.expression.number
        held.results[number, result.number] = held.ended.told_number(result, grad)

    def station_backward(self, order: StationBackward) -> None:
        """Go back through a call."""
        # batch 16: go back
        held = self._runs[order.run]
        run = held.ended.run
        self._clear([order.cleared[name] for name in self._parameters])
        wanted = [order.wanted[name] for name in self._parameters]
        results = [held.results[place] for place in order.results if place in held.results]
        ends = results if run.comm.rank == run.route.end else run.gate.tensors
        ends = [end for end in ends if end.requires_grad]
        unwanted = [
            p
            for p, is_wanted in zip(self._parameters.values(), wanted, strict=True)
            if p.requires_grad and not is_wanted
        ]
        before = [p.grad for p in unwanted]
        for parameter in unwanted:
            parameter.grad = None
        torch.autograd.backward(ends, [torch.zeros_like(end) for end in ends])
        for parameter, grad in zip(unwanted, before, strict=True):
            parameter.grad = grad
        held.results.clear()
        run.tickets.clear()
        run.tokens.clear()

    def _set(self, settings: ModuleSettings) -> None:
        for name, is_on in settings.training.items():
            self._modules[name].training = is_on
        for name, attributes in settings.attributes.items():
            self._modules[name].__dict__.update(attributes.value)
        for name, is_on in settings.trainable.items():
            self._named[name].requires_grad_(is_on)
        with torch.no_grad():
            for name, tensor in settings.tensors.items():
                slot = self._slots.get(name)
                present = self._named[name] if slot is None else slot.tensor
                assert present is not None
                present.copy_(tensor)
