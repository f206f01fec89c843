"""A tail host: runs the end of a model for its workers, who say what to do (comm/stage.py).

    a thread for each worker    receives letters, a few ahead of what is done (inbox.py)
    the main thread             takes the next letter of every worker, which ask for the same, in
                                any order of arrival
      FORWARD    joins the rows of its workers' micro-batch, or of all of theirs, and runs the tail
                 on them
      LOSS       each worker's loss, over all of its micro-batches together: as one process would
                 compute it
      BACKWARD   one backward through all of it; each activation's gradient goes back as soon as it
                 is there
      STEP …     what one process would do, with this process's own optimizer

Several tail hosts are an ordinary job of Shoal among themselves: each has the rows of its workers,
their layers are served by the plan's strategies. So whatever one of them does all do, in the same
order, as workers do. Guarded by tests/equivalence/test_stage.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.letters import post
from shoal.comm.stage import Groups
from shoal.comm.tail_hosts import GRADIENTS, Ask, Modes, TailHosts, modules_of, parameters_of
from shoal.contracts.comm import Comm, Pending
from shoal.core.errors import UsageError
from shoal.core.plan import Choice, Plan
from shoal.core.trace import MAIN, Recorder
from shoal.profiling.identity import model_digest
from shoal.runtime.attach import attach
from shoal.runtime.inbox import Letter, Letters
from shoal.runtime.optim.extend import extend
from shoal.runtime.passes import Block, Forward, Pass
from shoal.runtime.session import Session


@dataclass(frozen=True)
class Opening:
    """What tail hosts are told of a model."""

    modules: tuple[str, ...]
    micro_batches: int
    joined: bool
    # by layer, in the order in which gradients come, how they share it: "sliced:direct"
    shared: Mapping[str, str]


@final
class Tail:
    """The end of one model, on one of its hosts."""

    def __init__(
        self,
        hosts: TailHosts,
        among: Comm,
        modules: Sequence[nn.Module],
        runs: Callable[[Tensor], Tensor],
        loss_fn: Callable[..., Any],
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, nn.Parameter],
        opening: Opening,
    ) -> None:
        self._among = among  # the hosts themselves
        self._joined, self._micro_batches = opening.joined, opening.micro_batches
        self._comm, self._workers, self._hosts = hosts.comm, hosts.served, len(hosts.hosts)
        self._modules, self._runs, self._loss_fn = modules, runs, loss_fn
        self._optimizers, self._parameters = optimizers, parameters
        self._forwards: dict[int, Forward] = {}
        self._under_way: list[tuple[Pending, Tensor]] = []
        self._recorder: Recorder | None = None
        self._do: dict[Ask, Callable[[dict[int, Letter]], None]] = {
            Ask.FORWARD: self._forward,
            Ask.OUTPUT: self._output,
            Ask.LOSS: self._loss,
            Ask.BACKWARD: self._backward,
            Ask.STEP: self._step,
            Ask.READ: self._read,
            Ask.WRITE: self._write,
            Ask.CALL: self._call,
            Ask.ADD: self._add,
        }

    def serve(self, letters: Letters) -> None:
        """Do what workers ask, until they end."""
        while (first := (asked := letters.next())[self._workers[0]]).what != Ask.END:
            begin_s = time.perf_counter()
            self._do[first.what](asked)
            self._note(first.key, begin_s)
            while self._under_way:  # behind what they wait for; before its memory is used again
                self._under_way.pop()[0].wait()

    def _note(self, what: str, begin_s: float) -> None:
        if self._recorder is not None:
            self._recorder.note(what, MAIN, begin_s)

    def _answer(self, worker: int, content: Any) -> None:
        self._under_way += post(self._comm, worker, (), content)

    def _forward(self, asked: dict[int, Letter]) -> None:
        first = asked[self._workers[0]]
        its_modes, of_gradients, _, autocast, _ = first.content
        if its_modes is not None:
            self._set(its_modes)
            oldest = min(letter.oldest for letter in asked.values())
            self._forwards = {run: each for run, each in self._forwards.items() if run >= oldest}
            self._forwards[first.run] = Forward(of_gradients)
        run = self._forwards[first.run]
        for worker, letter in asked.items():
            *_, back, _, activation = letter.content
            if activation is not None:
                run.waiting.append((Block(worker, first.index, len(activation), back), activation))
        if self._joined and first.index + 1 < self._micro_batches:
            return
        if not run.waiting:
            if self._hosts == 1:
                return
            # others may have rows, and all of them are called
            like, its = run.passes[0].taken, run.passes[0].blocks[0]
            block = Block(self._workers[0], first.index, 0, its.back)
            run.waiting = [(block, like.detach().new_empty(0, *like.shape[1:]))]
        groups = run.alike()
        if len(groups) > 1 and self._hosts > 1:
            raise UsageError(
                "tail hosts that share layers take activations of one shape from all workers",
                got=", ".join(str(tuple(group[0][1].shape[1:])) for group in groups),
                do="pad batches alike on every worker, or take one tail host",
            )
        with torch.set_grad_enabled(of_gradients), _autocast(autocast):
            for same in groups:
                blocks, tensors = map(list, zip(*same, strict=True))
                taken = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
                taken.requires_grad_(of_gradients and any(block.back for block in blocks))
                # it may begin in place
                put_out = self._runs(taken.clone() if taken.requires_grad else taken)
                run.passes.append(Pass(blocks, taken, put_out))

    def _set(self, its_modes: Modes) -> None:
        every = modules_of(self._modules, self._loss_fn)
        for module, training, settings in zip(
            every, its_modes.training, its_modes.settings, strict=True
        ):
            module.training = training
            vars(module).update(settings or {})
        for parameter, trainable in zip(
            self._parameters.values(), its_modes.trainable, strict=True
        ):
            if parameter.requires_grad != trainable:
                parameter.requires_grad_(trainable)

    def _whole(self, run: Forward, worker: int) -> Tensor:
        """All that the tail has put out for a worker, apart from its graph."""
        if worker not in run.whole:
            parts = [
                part
                for each in run.passes
                for block, part in each.outputs(each.put_out.detach())
                if block.worker == worker
            ]
            run.whole[worker] = torch.cat(parts).requires_grad_(
                any(each.put_out.requires_grad for each in run.passes)
            )
        return run.whole[worker]

    def _output(self, asked: dict[int, Letter]) -> None:
        for worker, letter in asked.items():
            self._answer(worker, self._whole(self._forwards[letter.run], worker).detach())
        number = asked[self._workers[0]].run
        if not self._forwards[number].of_gradients:
            del self._forwards[number]  # nothing follows an evaluation

    def _loss(self, asked: dict[int, Letter]) -> None:
        for worker, letter in asked.items():
            args, kwargs, of_gradients, autocast = letter.content
            run = self._forwards[letter.run]
            with torch.set_grad_enabled(of_gradients), _autocast(autocast):
                loss = self._loss_fn(self._whole(run, worker), *args, **kwargs)
            run.losses.setdefault(worker, {})[letter.index] = loss
            self._answer(worker, loss.detach())

    def _backward(self, asked: dict[int, Letter]) -> None:
        run = self._forwards[asked[self._workers[0]].run]
        cleared, wanted, _, _ = asked[self._workers[0]].content
        self._clear(cleared)
        # gradients are the mean over workers, of which this host has some
        share = self._hosts / self._comm.workers
        for worker, letter in asked.items():
            *_, weight, slopes = letter.content
            losses = [run.losses[worker][number] for number in slopes]
            torch.autograd.backward(losses, [slope * (weight * share) for slope in slopes.values()])
        grads = {worker: iter(self._slopes(run, worker)) for worker in self._workers}
        slopes = [
            torch.cat([next(grads[block.worker]) for block in each.blocks]) for each in run.passes
        ]
        live = [
            (each, slope)
            for each, slope in zip(run.passes, slopes, strict=True)
            if each.put_out.requires_grad
        ]
        waiting = [each for each in run.passes if each.taken.requires_grad]
        there: dict[int, Tensor] = {}

        def ready(its: Pass, grad: Tensor) -> None:
            """The gradient of a pass's input has come; they go in the order in which workers wait
            for them.
            """
            there[id(its)] = grad / share
            while waiting and id(waiting[-1]) in there:
                each = waiting.pop()
                self._send_back(each, there[id(each)])

        for each in waiting:
            each.taken.register_hook(partial(ready, each))
        parameters = zip(self._parameters.values(), wanted, strict=True)
        into: list[Tensor] = [parameter for parameter, its in parameters if its]
        into += [each.taken for each in waiting if each.put_out.requires_grad]
        if into and live:
            every = all(
                its
                for p, its in zip(self._parameters.values(), wanted, strict=True)
                if p.requires_grad
            )
            outputs, their_slopes = zip(*live, strict=True)
            put_out = [each.put_out for each in outputs]
            torch.autograd.backward(put_out, list(their_slopes), inputs=None if every else into)
        for each in reversed(waiting.copy()):  # where the tail does not pass gradients on
            ready(each, torch.zeros_like(each.taken))
        run.passes, run.losses = [], {}  # but outputs may still be looked at
        run.whole = {worker: whole.detach() for worker, whole in run.whole.items()}

    def _slopes(self, run: Forward, worker: int) -> list[Tensor]:
        """The gradients of a worker's blocks of the output, in their order."""
        whole = self._whole(run, worker)
        grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
        rows = [
            len(part)
            for each in run.passes
            for block, part in each.outputs(each.put_out)
            if block.worker == worker
        ]
        return list(grad.split(rows))

    def _send_back(self, its: Pass, grad: Tensor) -> None:
        """The gradient of a pass's input to the workers, the last micro-batch first."""
        parts = grad.split([block.rows for block in its.blocks])
        for block, part in sorted(
            zip(its.blocks, parts, strict=True), key=lambda each: -each[0].index
        ):
            if block.back and block.rows:
                part = part.contiguous()
                self._note(
                    f"gradient of micro-batch {block.index} to rank {block.worker}",
                    time.perf_counter(),
                )
                self._under_way.append((self._comm.send(part, block.worker), part))

    def _clear(self, cleared: Sequence[bool]) -> None:
        for parameter, none in zip(self._parameters.values(), cleared, strict=True):
            if none:
                parameter.grad = None

    def _step(self, asked: dict[int, Letter]) -> None:
        number, cleared, groups, now = asked[self._workers[0]].content
        self._clear(cleared)
        optimizer = self._optimizers[number]
        for name in ("grad_scale", "found_inf"):  # a scaler's, for one step
            vars(optimizer).pop(name, None)
        vars(optimizer).update(now)
        self._regroup(number, groups)
        optimizer.step()

    def _regroup(self, number: int, groups: Groups) -> None:
        self._optimizers[number].param_groups[:] = [
            {**settings, "params": [self._parameters[name] for name in names]}
            for settings, names in groups
        ]

    def _read(self, asked: dict[int, Letter]) -> None:
        what, name = asked[self._workers[0]].content
        parameter = self._parameters[name]
        found = parameter.grad if what == GRADIENTS else parameter
        whole = None if found is None else found.detach().clone()  # of all tail hosts together
        for worker in asked:
            self._answer(worker, whole)

    @torch.no_grad()
    def _write(self, asked: dict[int, Letter]) -> None:
        what, name, whole = asked[self._workers[0]].content
        if what == GRADIENTS:
            self._parameters[name].grad = whole
        else:
            self._parameters[name].copy_(whole)

    @torch.no_grad()
    def _add(self, asked: dict[int, Letter]) -> None:
        """A gradient that workers have found without the tail: the mean of all of theirs."""
        name, cleared, _ = asked[self._workers[0]].content
        self._clear(cleared)
        mean = (
            torch.stack([letter.content[2] for letter in asked.values()]).sum(0)
            / self._comm.workers
        )
        if self._hosts > 1:
            self._among.all_reduce(mean)
        parameter = self._parameters[name]
        before = parameter.grad
        parameter.grad = mean if before is None else before + mean

    def _call(self, asked: dict[int, Letter]) -> None:
        what, number, cleared, groups, args = asked[self._workers[0]].content
        self._clear(cleared)
        if groups:
            self._regroup(number, groups)
        parts: dict[str, Callable[..., Any]] = {
            "norm": self._norm,
            "scale": self._scale,
            "state": self._state,
            "take_state": self._take_state,
            "record": self._record,
        }
        answer = parts[what](number, *args)
        for worker in asked:
            self._answer(worker, answer)

    def _record(self, number: int) -> Recorder | None:
        """Begin to note what this host does; what it has done since it was last asked to."""
        before, self._recorder = self._recorder, Recorder()
        return before

    def _norm(self, number: int, order: float) -> Tensor:
        optimizer: Any = self._optimizers[number]  # which has been extended
        norm: Tensor = optimizer.clip_grad_norm_(math.inf, order)
        return norm

    @torch.no_grad()
    def _scale(self, number: int, factor: Tensor) -> None:
        for group in self._optimizers[number].param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    gradient.mul_(factor.to(gradient.dtype))

    def _state(self, number: int) -> dict[str, Any]:
        """What optimizer `number` has of every parameter, in one-process form."""
        state = self._optimizers[number].state_dict()["state"]
        return {
            name: state[place] for place, name in enumerate(self._held(number)) if place in state
        }

    def _take_state(self, number: int, states: Mapping[str, Any]) -> None:
        whole = self._optimizers[number].state_dict()
        for place, name in enumerate(self._held(number)):
            whole["state"].pop(place, None)
            if states.get(name):
                whole["state"][place] = states[name]
        self._optimizers[number].load_state_dict(whole)

    def _held(self, number: int) -> list[str]:
        """Names of an optimizer's parameters, in their order."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        return [
            names[p] for group in self._optimizers[number].param_groups for p in group["params"]
        ]


def _autocast(state: tuple[bool, torch.dtype]) -> Any:
    enabled, dtype = state
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


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
    letters = Letters(hosts.comm, hosts.served, session.comm.timeout_s)
    opening = letters.next()[hosts.served[0]]
    if opening.what == Ask.OPEN:
        if model is None or loss_fn is None:
            raise UsageError(
                "workers leave the end of a model to this tail host, which has none",
                do="give the tail host the same model, loss and optimizer as the workers",
            )
        _made(session, hosts, opening.content, model, loss_fn, optimizers).serve(letters)
    letters.finish()
    session.drain()  # lanes among tail hosts, while the others still answer
    session.close()


def _made(
    session: Session,
    hosts: TailHosts,
    opening: Opening,
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizers: Sequence[Optimizer],
) -> Tail:
    modules = {name: model.get_submodule(name) for name in opening.modules}
    parameters = parameters_of(modules)
    kept = set(parameters.values())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in kept]
        for parameter in [p for p in optimizer.state if p not in kept]:
            del optimizer.state[parameter]
    for parameter in model.parameters():  # of the workers: this process is the tail's from here on
        if parameter not in kept:
            parameter.data, parameter.grad = parameter.data.new_empty(0), None
    tail = nn.Sequential(*modules.values())
    if len(hosts.hosts) == 1:
        for optimizer in optimizers:
            extend(optimizer)
    else:
        attach(
            session, tail, None, optimizers, _plan(tail, opening, len(hosts.hosts)), weighs=False
        )
    return Tail(
        hosts, session.comm, list(modules.values()), tail, loss_fn, optimizers, parameters, opening
    )


def _plan(tail: nn.Module, opening: Opening, hosts: int) -> Plan:
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
