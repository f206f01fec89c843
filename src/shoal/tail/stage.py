"""A tail host: runs the end of a model for its workers (remote/tail_messages.py: what they say).

    a thread for each worker    receives messages, a few ahead of what is done (inbox.py)
    the main thread             takes the next message of every worker, which ask for the same, in
                                any order of arrival
      Forward    joins the rows of its workers' micro-batch, or of all of theirs, and runs the tail
                 on them
      TailLoss   each worker's loss, over all of its micro-batches together: as one process would
                 compute it
      Backward   one backward through all of it; each activation's gradient goes back as soon as it
                 is there
      TailStep … what one process would do, with this process's own optimizer

Several tail hosts are an ordinary job of Shoal among themselves: each has the rows of its workers,
their layers are served by the plan's strategies. So whatever one of them does all do, in the same
order, as workers do. Guarded by tests/equivalence/test_stage.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.codecs.coded_exchange import read_codec
from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError
from shoal.core.plan import Choice, Plan
from shoal.engine.passes import Block, TailPass, TailRun
from shoal.optim.extend import extend
from shoal.profiling.identity import model_digest
from shoal.remote.channel import Channel
from shoal.remote.station_messages import OpenStations
from shoal.remote.tail_hosts import TailHosts, modules_of, parameters_of
from shoal.remote.tail_messages import (
    Autocast,
    Backward,
    Forward,
    Modes,
    Open,
    Output,
    TailDone,
    TailLoss,
)
from shoal.session.attach import attach
from shoal.session.job import TrainingJob
from shoal.session.opening import Prepared
from shoal.session.session import Session
from shoal.tail.held import HeldParameters, leave
from shoal.tail.inbox import Inbox
from shoal.tail.stations import HeldStations
from shoal.tensors.row_crossing import RowCrossing


@dataclass(frozen=True)
class TailModel:
    """The end of one model, with what trains it."""

    modules: Sequence[nn.Module]  # in the order in which they are called
    runs: Callable[[Tensor], Tensor]  # all of them
    loss_fn: Callable[..., Any]
    optimizers: Sequence[Optimizer]
    parameters: Mapping[str, nn.Parameter]


@final
class ServedTail(HeldParameters):
    """The end of one model, on one of its hosts.

    Args:
        hosts: the way to the workers.
        among: the hosts themselves.
        model: the end of the model.
        opening: how workers want it to be run.
    """

    def __init__(self, hosts: TailHosts, among: Comm, model: TailModel, opening: Open) -> None:
        super().__init__(
            among, hosts.workers, hosts.comm.workers, model.parameters, model.optimizers
        )
        self._joined, self._micro_batches = opening.joined, opening.micro_batches
        self._crossing = RowCrossing(read_codec(opening.codec) if opening.codec else None)
        self._hosts = len(hosts.hosts)
        self._channels = {worker: Channel[Any](hosts.comm, worker) for worker in hosts.workers}
        self._modules, self._runs, self._loss_fn = model.modules, model.runs, model.loss_fn
        self._forwards: dict[int, TailRun] = {}

    def serve(self, inbox: Inbox) -> None:
        """Do what workers ask, until they end."""
        while not isinstance(first := (asked := inbox.next())[self._workers[0]], TailDone):
            first.do(self, asked)
            for channel in self._channels.values():  # before memory is used again
                channel.settle()

    def _answer(self, worker: int, content: Any) -> None:
        self._channels[worker].post(content)

    def _answer_all(self, content: Any) -> None:
        for worker in self._workers:
            self._answer(worker, content)

    def forward(self, asked: Mapping[int, Forward]) -> None:
        first = asked[self._workers[0]]
        if first.modes is not None:
            self._set(first.modes)
            oldest = min(message.oldest for message in asked.values())
            self._forwards = {
                run: older_run for run, older_run in self._forwards.items() if run >= oldest
            }
            self._forwards[first.run] = TailRun(first.of_gradients)
        run = self._forwards[first.run]
        # batch 4: join the rows
        for worker, message in asked.items():
            activation = message.activation
            if activation is not None:
                coded = message.wide is not None
                if message.wide is not None:
                    activation = self._crossing.from_code(activation, message.wide)
                block = Block(worker, first.index, len(activation), message.back, coded)
                run.waiting.append((block, activation))
        if self._joined and first.index + 1 < self._micro_batches:
            return
        if not run.waiting:
            if self._hosts == 1:
                return
            # others may have rows, and all of them are called
            like, first_block = run.passes[0].activation, run.passes[0].blocks[0]
            block = Block(self._workers[0], first.index, 0, first_block.back)
            run.waiting = [(block, like.detach().new_empty(0, *like.shape[1:]))]
        groups = run.alike()
        if len(groups) > 1 and self._hosts > 1:
            raise UsageError(
                "tail hosts that share layers take activations of one shape from all workers",
                got=", ".join(str(tuple(group[0][1].shape[1:])) for group in groups),
                do="pad batches alike on every worker, or take one tail host",
            )
        # batch 5: run the tail
        with torch.set_grad_enabled(first.of_gradients), _cast(first.autocast):
            for same in groups:
                blocks, tensors = map(list, zip(*same, strict=True))
                joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
                joined.requires_grad_(first.of_gradients and any(block.back for block in blocks))
                # it may begin in place
                put_out = self._runs(joined.clone() if joined.requires_grad else joined)
                run.passes.append(TailPass(blocks, joined, put_out))

    def _set(self, modes: Modes) -> None:
        every = modules_of(self._modules, self._loss_fn)
        for module, training, settings in zip(every, modes.training, modes.settings, strict=True):
            module.training = training
            vars(module).update(settings.value if settings else {})
        for parameter, trainable in zip(self._parameters.values(), modes.trainable, strict=True):
            if parameter.requires_grad != trainable:
                parameter.requires_grad_(trainable)

    def _whole(self, run: TailRun, worker: int) -> Tensor:
        """All that the tail has put out for a worker, apart from its graph."""
        if worker not in run.whole:
            parts = [
                part
                for tail_pass in run.passes
                for block, part in tail_pass.outputs(tail_pass.put_out.detach())
                if block.worker == worker
            ]
            run.whole[worker] = torch.cat(parts).requires_grad_(
                any(tail_pass.put_out.requires_grad for tail_pass in run.passes)
            )
        return run.whole[worker]

    def output(self, asked: Mapping[int, Output]) -> None:
        for worker, message in asked.items():
            self._answer(worker, self._whole(self._forwards[message.run], worker).detach())
        number = asked[self._workers[0]].run
        if not self._forwards[number].of_gradients:
            del self._forwards[number]  # nothing follows an evaluation

    def loss(self, asked: Mapping[int, TailLoss]) -> None:
        for worker, message in asked.items():
            run = self._forwards[message.run]
            with torch.set_grad_enabled(message.of_gradients), _cast(message.autocast):
                whole = self._whole(run, worker)
                loss = self._loss_fn(whole, *message.args.value, **message.kwargs.value)
            run.losses.setdefault(worker, {})[message.index] = loss
            self._answer(worker, loss.detach())  # batch 7: the loss of all rows of this worker

    def backward(self, asked: Mapping[int, Backward]) -> None:
        first = asked[self._workers[0]]
        run, wanted = self._forwards[first.run], first.wanted
        self._clear(first.cleared)
        # gradients are the mean over workers, of which this host has some
        share = self._hosts / self._all_workers
        for worker, message in asked.items():
            losses = [run.losses[worker][number] for number in message.slopes]
            scaled = [slope * (message.weight * share) for slope in message.slopes.values()]
            torch.autograd.backward(losses, scaled)
        grads = {worker: iter(self._slopes(run, worker)) for worker in self._workers}
        slopes = [
            torch.cat([next(grads[block.worker]) for block in tail_pass.blocks])
            for tail_pass in run.passes
        ]
        live = [
            (tail_pass, slope)
            for tail_pass, slope in zip(run.passes, slopes, strict=True)
            if tail_pass.put_out.requires_grad
        ]
        waiting = [tail_pass for tail_pass in run.passes if tail_pass.activation.requires_grad]
        there: dict[int, Tensor] = {}

        def ready(tail_pass: TailPass, grad: Tensor) -> None:
            """A pass's input gradient has come. They go in the order in which workers wait."""
            there[id(tail_pass)] = grad / share
            while waiting and id(waiting[-1]) in there:
                last = waiting.pop()
                self._send_back(last, there[id(last)])

        for tail_pass in waiting:
            tail_pass.activation.register_hook(partial(ready, tail_pass))
        parameters = zip(self._parameters.values(), wanted, strict=True)
        into: list[Tensor] = [parameter for parameter, is_wanted in parameters if is_wanted]
        into += [tail_pass.activation for tail_pass in waiting if tail_pass.put_out.requires_grad]
        if into and live:
            every = all(
                is_wanted
                for p, is_wanted in zip(self._parameters.values(), wanted, strict=True)
                if p.requires_grad
            )
            outputs, their_slopes = zip(*live, strict=True)
            put_out = [tail_pass.put_out for tail_pass in outputs]
            torch.autograd.backward(put_out, list(their_slopes), inputs=None if every else into)
        for tail_pass in reversed(waiting.copy()):  # where the tail does not pass gradients on
            ready(tail_pass, torch.zeros_like(tail_pass.activation))
        run.passes, run.losses = [], {}  # but outputs may still be looked at
        run.whole = {worker: whole.detach() for worker, whole in run.whole.items()}

    def _slopes(self, run: TailRun, worker: int) -> list[Tensor]:
        """The gradients of a worker's blocks of the output, in their order."""
        whole = self._whole(run, worker)
        grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
        rows = [
            len(part)
            for tail_pass in run.passes
            for block, part in tail_pass.outputs(tail_pass.put_out)
            if block.worker == worker
        ]
        return list(grad.split(rows))

    def _send_back(self, tail_pass: TailPass, grad: Tensor) -> None:
        """The gradient of a pass's input to the workers, the last micro-batch first."""
        parts = grad.split([block.rows for block in tail_pass.blocks])
        for block, part in sorted(
            zip(tail_pass.blocks, parts, strict=True), key=lambda pair: -pair[0].index
        ):
            if block.back and block.rows:
                code = self._crossing.narrow(part) if block.coded else None
                self._channels[block.worker].post_rows(  # batch 9
                    part.contiguous() if code is None else code
                )


def _cast(autocast: Autocast) -> torch.autocast:
    return torch.autocast("cpu", dtype=autocast.dtype, enabled=autocast.enabled)


def serve_tail(
    session: Session,
    model: nn.Module | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizers: Sequence[Optimizer] = (),
) -> None:
    """Be a tail host of a model, if there is one, until the workers have ended.

    Raises:
        WorldError: a rank was lost, or workers ask for different things.
    """
    hosts = session.other(TailHosts)
    assert hosts is not None
    inbox = Inbox(hosts.comm, hosts.workers, session.comm.timeout_s)
    opening = inbox.next()[hosts.workers[0]]
    if isinstance(opening, Open):
        if model is None or loss_fn is None:
            raise _no_model()
        _made(session, hosts, opening, model, loss_fn, optimizers).serve(inbox)
    if isinstance(opening, OpenStations):
        if model is None:
            raise _no_model()
        held = HeldStations(hosts, model, loss_fn, optimizers, opening)
        orders = Inbox(hosts.open_stations()[1], [0], session.comm.timeout_s)
        held.serve(orders)
        orders.finish()
    inbox.finish()
    session.drain()  # lanes among tail hosts, while the others still answer
    session.close()


def _no_model() -> UsageError:
    return UsageError(
        "workers leave the end of a model to this tail host, which has none",
        do="give the tail host the same model, loss and optimizer as the workers",
    )


def _made(
    session: Session,
    hosts: TailHosts,
    opening: Open,
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizers: Sequence[Optimizer],
) -> ServedTail:
    modules = {name: model.get_submodule(name) for name in opening.modules}
    parameters = parameters_of(modules)
    kept = set(parameters.values())
    leave(optimizers, kept)
    for parameter in model.parameters():  # of the workers: this process is the tail's from here on
        if parameter not in kept:
            parameter.data, parameter.grad = parameter.data.new_empty(0), None
    tail = nn.Sequential(*modules.values())
    if len(hosts.hosts) == 1:
        for optimizer in optimizers:
            extend(optimizer)
    else:
        job = TrainingJob(tail, None, optimizers, weighs=False)
        attach(session, job, Prepared(_plan(tail, opening, len(hosts.hosts))))
    served = TailModel(list(modules.values()), tail, loss_fn, optimizers, parameters)
    return ServedTail(hosts, session.comm, served, opening)


def _plan(tail: nn.Module, opening: Open, hosts: int) -> Plan:
    """How tail hosts share the layers among themselves, where these have names of their own."""

    def inside(layer: str) -> str:
        module = next(
            name for name in opening.modules if layer == name or layer.startswith(f"{name}.")
        )
        return f"{opening.modules.index(module)}{layer[len(module) :]}"

    choices = [
        Choice(inside(layer), *how.partition(":")[::2]) for layer, how in opening.shared.items()
    ]
    return Plan(hosts, model_digest(tail), tuple(choices), bucket_bytes=4 << 20, lanes=3)
