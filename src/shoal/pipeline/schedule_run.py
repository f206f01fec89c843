"""A call that goes back early: one forward, one backward.

The loss is known once `compute_loss` asks for its number. Then each rank does its tasks in the
order of schedule.py:

    forward     the station runs, as ever; the end computes the loss of a rank's rows as soon as it
                has all of them, and its gradients for the output
    backward    autograd goes back through this station and micro-batch alone, and sends on the
                gradients of the values that have come; gradients of parameters are kept
                (kept_gradients.py)

The slope of each rank's loss is its weight, as it will be in backward for a slope of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from shoal.pipeline.expressions import EndResult, Expression
from shoal.pipeline.kept_gradients import KeptGradients, hooks_aside, tell_slopes
from shoal.pipeline.moving_buffers import Counters, MovingBuffers, aside
from shoal.pipeline.parts import joined
from shoal.pipeline.route import Coming, StationRoute
from shoal.pipeline.run import ForwardRun
from shoal.pipeline.schedule import Task, one_forward_one_backward
from shoal.pipeline.task_inbox import TaskInbox
from shoal.pipeline.trees import mapped, tensors_in
from shoal.pipeline.walk import walking

_AHEAD = 3  # tasks whose messages are received in advance


def no_functions(rank: int) -> None:
    """Compute nothing of a rank's output."""


@dataclass(frozen=True)
class SoughtLoss:
    """A loss that the end computes of the output.

    Args:
        result: the loss.
        order: the functions that give it, in order.
        compute: computes these functions for a rank's rows.
    """

    result: EndResult
    order: Sequence[Expression] = ()
    compute: Callable[[int], None] = no_functions


@final
class ScheduledRun:
    """Runs the stations of a call that waits for its loss.

    Args:
        run: the call.
        ended: the output, of which the end computes the loss.
        loss: how it does so.
    """

    def __init__(self, run: ForwardRun, ended: Expression, loss: SoughtLoss) -> None:
        self._run, self._ended, self._loss = run, ended, loss
        pipeline, comm = run.pipeline, run.comm
        weight = run.weight_of.value() if run.weight_of is not None else None
        own = (1.0 if weight is None else weight) / comm.size
        self._slopes = tell_slopes(comm, own)
        self.kept = KeptGradients(
            [
                parameter
                for name, parameter in pipeline.model.named_parameters()
                if parameter.requires_grad
                and pipeline.holders.get(pipeline.layers.get(name, "")) == comm.rank
            ],
            self._slopes,
        )
        brings = tuple(part.rank for part in run.parts)
        self._order = one_forward_one_backward(tuple(run.route.holders), brings)
        self._inbox = TaskInbox(
            comm, pipeline.outbox, self._order, run.route.holders, self._receive
        )
        self._outputs: dict[int, Any] = {}  # outputs of the end, by micro-batch
        self._grads: dict[int, list[Tensor | None]] = {}  # gradients of their tensors

    def compute(self) -> None:
        """Compute this rank's stations for all micro-batches, there and back."""
        run, homes = self._run, self._run.pipeline.homes
        assert run.inputs is not None
        inputs, run.inputs = run.inputs, None
        own = [t for t in self._order if run.route.holders[t.station] == run.comm.rank]
        counters = Counters(run.route.record.countings)
        with run.modes.again(), walking(), aside(homes.buffers(here=False)):
            with aside(homes.buffers(here=True)):
                for task in own:
                    if task.station and not task.is_back:
                        run.learn(task.station, task.micro, inputs[task.micro])
            moving = MovingBuffers(homes.buffers(here=True))
            run.returning.inbox = self._inbox
            for number, task in enumerate(own):
                for ahead in own[number : number + _AHEAD]:
                    self._inbox.expect(ahead)
                if task.is_back:
                    self._go_back(task)
                else:
                    counters.put_back()
                    with moving.micro_batch(task.micro):
                        self._go_on(task, inputs[task.micro])
                self._inbox.note_arrival(task)
                self._inbox.note_sending(task)
            moving.join([part.size for part in run.parts])
            counters.count()
        self._inbox.finish()
        run.returning.inbox = None

    def _receive(self, task: Task) -> Coming | None:
        """Begin to receive the values for a task; None if their forms are not known yet."""
        run, (station, micro, is_back) = self._run, task
        if is_back:
            return run.returning.receive(station, micro)
        return run.receive_values(station, micro, run.pipeline.shapes[run.form(station, micro)])

    def _go_on(self, task: Task, inputs: Any) -> None:
        """Compute a station's forward for a micro-batch."""
        station, micro, _ = task
        coming = self._inbox.take(task) if station else None
        for output in self._run.station(station, micro, inputs, coming):
            self._outputs[micro] = output
            rank = self._run.parts[micro].rank
            numbers = [n for n, part in enumerate(self._run.parts) if part.rank == rank]
            if numbers[-1] == micro:
                self._lose(rank, numbers)

    def _lose(self, rank: int, numbers: Sequence[int]) -> None:
        """Compute the loss of a rank's rows, and its gradients for the outputs of their parts."""
        parts = [mapped(_leaf, self._outputs[number]) for number in numbers]
        leaves = [tensors_in(part) for part in parts]
        self._ended.of_ranks[rank] = tensors_of(joined(parts), self._run.route)
        self._loss.compute(rank)
        result = self._loss.result
        loss = result.expression.of_ranks[rank][result.number]
        taking = [leaf for own in leaves for leaf in own if leaf.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(taking)
        if taking and loss.requires_grad:
            slope = torch.full_like(loss, self._slopes[rank])
            grads = torch.autograd.grad([loss], taking, [slope], allow_unused=True)
        given = iter(grads)
        for number, own in zip(numbers, leaves, strict=True):
            self._grads[number] = [next(given) if leaf.requires_grad else None for leaf in own]
        for each in (self._ended, *self._loss.order):
            each.of_ranks[rank] = [tensor.detach() for tensor in each.of_ranks[rank]]

    def _go_back(self, task: Task) -> None:
        """Go back through a station for a micro-batch."""
        run, (station, micro, _) = self._run, task
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        if micro in self._outputs and station + 1 == len(run.route.holders):
            tensors = tensors_in(self._outputs.pop(micro))
            for tensor, grad in zip(tensors, self._grads.pop(micro), strict=True):
                if grad is not None and tensor.requires_grad:
                    roots.append(tensor)
                    grads.append(grad)
            token = run.tokens.pop(micro, None)
        else:
            token = run.tickets.pop((station, micro), None)
        if token is not None:
            roots.append(token)
            grads.append(torch.zeros_like(token))
        if not roots:
            return
        taking = [*self.kept.parameters, run.pipeline.anchor]
        with torch._C.DisableTorchFunctionSubclass(), hooks_aside(self.kept.parameters):
            found = torch.autograd.grad(roots, taking, grads, allow_unused=True)
        self.kept.add(found[:-1])


def tensors_of(output: Any, route: StationRoute) -> list[Tensor]:
    """Return the tensors of an output of the end, and the numbers that modules keep, in order."""
    places = next(iter(route.output.values())).kept  # as the record has them
    values, kept = output
    return tensors_in((values, [kept[place] for place in places]))


def _leaf(leaf: Any) -> Any:
    """Return a tensor of the output without its history."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
