"""A model whose end runs on hosts of its own: a worker's way to them.

    worker w                                                     its tail host, w mod T   (runtime/stage.py)
      forward of micro-batch i   FORWARD  the activation    ──▶  joins the rows of its workers, runs the tail
      … of the next, meanwhile
      loss_fn(output, target)    LOSS     the target        ──▶  the loss of all of this worker's rows
                                          the loss          ◀──
      backward                   BACKWARD its weight        ──▶  gradients, last micro-batch first
      … of micro-batch i                  of the activation ◀──  while that of the one before is computed
      optimizer.step()           STEP     the settings      ──▶  an update as in one process

What the model returns is a placeholder: the loss that `parallelize` returned takes it; whoever looks at it gets the
output (OUTPUT), without a gradient. To all else the tail's parameters look whole (core/cut.py), and whatever is done
with them is done by all workers together. Guarded by tests/equivalence/test_stage.py.
Reference: Huang et al., "GPipe", 2019, section 2 (micro-batches); multi-node Caffe's net that is cut over nodes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.comm.boundary import refuse_second_derivative
from shoal.comm.letters import fetch, post
from shoal.core.contracts import Comm, Pending
from shoal.core.cut import Cut, CutParameter, cut_of, is_cut, part_of
from shoal.core.errors import UsageError
from shoal.core.pieces import cut_sizes, local_gradient, set_local_gradient
from shoal.core.trace import MAIN

VALUES, GRADIENTS = "values", "gradients"  # what is read or written
_UNDER_WAY = 16  # letters at most that a worker has sent and that have not gone yet
_OVERWRITING = frozenset(("copy_", "fill_", "zero_"))  # which need no values that are there


class Ask(IntEnum):
    """What a worker wants of its tail host."""

    END = 0  # nothing more
    OPEN = 1
    FORWARD = 2
    OUTPUT = 3
    LOSS = 4
    BACKWARD = 5
    STEP = 6
    READ = 7
    WRITE = 8
    CALL = 9


@final
class TailHosts:
    """The hosts that run the end of the model, as every rank sees them.

    Args:
        comm: all ranks.
    """

    def __init__(self, comm: Comm) -> None:
        workers, tail = comm.workers, comm.topology.tail
        self.comm = comm.channel("tail", idle=True)
        self.is_one = comm.rank >= workers
        self.peers = range(workers, comm.size) if self.is_one else range(workers)
        self.hosts = comm.topology.hosts[workers:]
        self.served = [w for w in range(workers) if workers + w % tail == comm.rank]  # by this rank, if it is one
        self._mine = workers + comm.rank % tail  # that serves this rank, if it is a worker
        self._under_way: deque[tuple[Pending, Tensor]] = deque()
        self._ended = self.is_one
        self.taken = False  # by a model

    @property
    def speaks(self) -> bool:
        """Whether this worker is the first of its tail host's: what is the same on all is taken from it."""
        return self.comm.rank < len(self.hosts)

    def tell(self, what: Ask, content: Any, run: int = 0, index: int = 0, oldest: int = 0) -> None:
        """Send this worker's tail host a wish."""
        if self._ended:
            raise UsageError("the session that the model was parallelised in has ended", do="train within the session")
        while len(self._under_way) >= _UNDER_WAY:
            self._under_way.popleft()[0].wait()
        self._under_way += post(self.comm, self._mine, (what, run, index, oldest), content)

    def settle(self) -> None:
        """Wait until all that was sent has gone."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def answer(self) -> Any:
        """What the tail host answers."""
        _, content = fetch(self.comm, self._mine)
        return content

    def receive(self, tensor: Tensor) -> Pending:
        """Start receiving a tensor from the tail host."""
        return self.comm.receive(tensor, self._mine)

    def end(self) -> None:
        """Tell the tail host that this worker asks no more."""
        if not self._ended:
            self.tell(Ask.END, None)
            self.settle()
            self._ended = True


@dataclass(frozen=True)
class Modes:
    """What the model's code has set that the tail must be run with."""

    training: tuple[bool, ...]  # of every module of the tail
    trainable: tuple[bool, ...]  # of every parameter


@final
class Stage:
    """The tail of one model, as its workers have it.

    Args:
        hosts: the way to them.
        model: all of it.
        modules: those that make the tail, in the order in which they are called, by dotted name.
        micro_batches: how many a batch is cut into.
    """

    def __init__(
        self, hosts: TailHosts, model: nn.Module, modules: Mapping[str, nn.Module], micro_batches: int
    ) -> None:
        self.hosts, self.model, self.modules, self.micro_batches = hosts, model, modules, micro_batches
        self.parameters: dict[str, nn.Parameter] = {
            f"{name}.{leaf}": parameter for name, module in modules.items() for leaf, parameter in module.named_parameters()
        }
        self.names = {parameter: name for name, parameter in self.parameters.items()}
        self._modules = [each for module in modules.values() for each in module.modules()]
        self._runs = 0
        self._alive: weakref.WeakSet[Run] = weakref.WeakSet()  # that somebody has still
        self.anchor = torch.zeros((), requires_grad=True)
        self.running: Run | None = None

    def begin(self) -> Run:
        """A forward of the model begins."""
        self._runs += 1
        run = self.running = Run(self, self._runs, modes(self._modules, self.parameters.values()))
        self._alive.add(run)
        return run

    @property
    def oldest(self) -> int:
        """The number of the first run that somebody has still."""
        return min((run.number for run in self._alive), default=self._runs)

    def entered(self) -> None:
        """A backward begins, on every rank: what somebody saw of gradients is not all of them any more."""
        for cut in self._cuts():
            cut.begin()

    def mark(self) -> None:
        """There are gradients, with the tail."""
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                set_local_gradient(parameter, torch.empty(0, dtype=parameter.dtype))

    def cleared(self) -> tuple[bool, ...]:
        """Which parameters have no gradient; those that somebody has seen and changed are told of before."""
        for cut in self._cuts():
            cut.tell()
        return tuple(local_gradient(parameter) is None for parameter in self.parameters.values())

    def step(self, number: int, groups: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> None:
        """Have optimizer `number` make a step by these groups, parameters by name, and these attributes."""
        cleared = self.cleared()
        self.hosts.tell(Ask.STEP, (number, cleared, groups, now) if self.hosts.speaks else None)

    def call(self, what: str, *args: Any) -> Any:
        """Have the tail do one of the rarer things, and wait for its answer."""
        cleared = self.cleared()
        self.hosts.tell(Ask.CALL, (what, cleared, args))
        return self.hosts.answer()

    def read(self, what: str, name: str) -> Tensor | None:
        """Values of a parameter, or its gradient, if there is one."""
        self.hosts.tell(Ask.READ, (what, name))
        found: Tensor | None = self.hosts.answer()
        return found

    def write(self, what: str, name: str, whole: Tensor | None) -> None:
        """Give a parameter other values, or another gradient."""
        self.hosts.tell(Ask.WRITE, (what, name, whole if self.hosts.speaks else None))
        self.hosts.settle()

    def _cuts(self) -> list[AtTail]:
        return [its for p in self.parameters.values() if is_cut(p) and isinstance(its := cut_of(p), AtTail)]


@final
class Run:
    """One forward of the model, and what follows from it."""

    def __init__(self, stage: Stage, number: int, its_modes: Modes) -> None:
        self.stage, self.number = stage, number
        self.tickets: list[Tensor] = []  # of each micro-batch, for autograd
        self._modes = its_modes
        self._of_gradients = torch.is_grad_enabled()
        self._index = 0
        self._forms: dict[int, Tensor] = {}  # of activations that take a gradient
        self._losses = 0
        self._slopes: dict[int, Tensor] = {}  # of the losses
        self._landing: dict[int, tuple[Pending, Tensor]] = {}
        self._gone = False
        self._output: Tensor | None = None
        self._since_s = perf_counter()  # the main thread computes

    def send(self, activation: Tensor) -> StageOutput:
        """The tail's first module is called with this."""
        index = self._index
        with torch._C.DisableTorchFunctionSubclass():  # the parts, which are empty: what autograd looks for
            parts = [parameter for parameter in self.stage.parameters.values() if parameter.requires_grad]
            ticket: Tensor = _Sent.apply(self, activation, self.stage.anchor, *parts)  # type: ignore[no-untyped-call]
        if index == self._index:
            raise AssertionError("the activation has not been sent")
        self.tickets.append(ticket)
        return StageOutput.of(self, [ticket])

    def tell_forward(self, activation: Tensor | None) -> int:
        """Send a micro-batch's activation, or that it has none: its number."""
        index, self._index = self._index, self._index + 1
        self._note(f"forward of micro-batch {index}", self._since_s)
        content = forward_letter(None if index else self._modes, activation, of_gradients=self._of_gradients)
        self.stage.hosts.tell(Ask.FORWARD, content, self.number, index, self.stage.oldest)
        self._since_s = perf_counter()
        return index

    def loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tickets: Sequence[Tensor]) -> Tensor:
        """The loss, of what this is the first argument; the rest are given."""
        number, self._losses = self._losses, self._losses + 1
        hosts = self.stage.hosts
        hosts.tell(Ask.LOSS, loss_letter(args, kwargs, of_gradients=torch.is_grad_enabled()), self.number, number)
        begin_s = perf_counter()
        value = hosts.answer()
        self._note("wait for the loss", begin_s)
        if not torch.is_grad_enabled():
            return value
        loss: Tensor = _Loss.apply(self, number, value, *tickets)  # type: ignore[no-untyped-call]
        return loss

    def slope(self, number: int, grad: Tensor) -> bool:
        """Note the gradient of a loss; whether it is the first in this backward."""
        if self._gone:
            raise UsageError(
                "a second backward through a forward whose end ran on tail hosts",
                do="call the model again, or add the losses before backward",
            )
        first = not self._slopes
        self._slopes[number] = grad
        return first

    def backward(self, index: int, weight: Tensor) -> Tensor | None:
        """The gradient of a micro-batch's activation; `weight` is what gradients are to be multiplied by."""
        hosts = self.stage.hosts
        if not self._gone:
            self._gone = True
            cleared = self.stage.cleared()
            self.stage.mark()
            hosts.tell(Ask.BACKWARD, backward_letter(cleared, float(weight), self._slopes), self.number)
            for number in sorted(self._forms, reverse=True):
                landed = torch.empty_like(self._forms[number], memory_format=torch.contiguous_format)
                self._landing[number] = hosts.receive(landed), landed
        else:
            self._note(f"backward of micro-batch {index + 1}", self._since_s)
        if index not in self._landing:
            return None
        begin_s = perf_counter()
        pending, landed = self._landing.pop(index)
        pending.wait()
        self._note(f"wait for the gradient of micro-batch {index}", begin_s)
        self._since_s = perf_counter()
        return landed

    def output(self) -> Tensor:
        """What the tail has put out for this worker's rows; a collective, once."""
        if self._output is None:
            self.stage.hosts.tell(Ask.OUTPUT, None, self.number)
            self._output = self.stage.hosts.answer()
        return self._output

    def _note(self, what: str, begin_s: float) -> None:
        recorder = self.stage.hosts.comm.recorder
        if recorder is not None:
            recorder.note(what, MAIN, begin_s)

    def keep(self, index: int, activation: Tensor) -> None:
        """Note that a micro-batch's activation takes a gradient."""
        self._forms[index] = activation.detach()


@final
class StageOutput(Tensor):
    """What tail hosts have put out: the loss takes it as it is; whoever looks at it gets it, without a gradient."""

    _run: Run
    _tickets: list[Tensor]
    _over: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, run: Run, tickets: Sequence[Tensor]) -> StageOutput:
        """The output of these micro-batches."""
        output: StageOutput = torch.empty(0).as_subclass(cls)
        output._run, output._tickets = run, list(tickets)
        return output

    def over(self, after: Callable[[Tensor], Tensor]) -> StageOutput:
        """The same, whose gradients come back through `after`."""
        return StageOutput.of(self._run, [after(ticket) for ticket in self._tickets])

    def is_of(self, run: Run) -> bool:
        """Whether it is what that forward has put out."""
        return self._run is run

    def loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The loss at the tail, of this and these."""
        return self._run.loss(args, kwargs, self._tickets)

    def whole(self) -> Tensor:
        """The output itself, whose gradient is an error."""
        output = self._run.output()
        if not torch.is_grad_enabled() or not output.is_floating_point():
            return output
        seen: Tensor = _Seen.apply(output, *self._tickets)  # type: ignore[no-untyped-call]
        return seen

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _REQUIRES_GRAD:
            return bool(args[0]._tickets) and args[0]._tickets[0].requires_grad

        def whole(leaf: Any) -> Any:
            return leaf.whole() if isinstance(leaf, StageOutput) else leaf

        args, kwargs = pytree.tree_map(whole, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Sent(torch.autograd.Function):
    """An activation on its way to the tail, and its gradient back; gives a ticket, whose gradient is the weight."""

    @staticmethod
    def forward(ctx: Any, run: Run, activation: Tensor, anchor: Tensor, *parts: Tensor) -> Tensor:
        ctx.run, ctx.others = run, 1 + len(parts)
        ctx.index = run.tell_forward(activation)
        if ctx.needs_input_grad[1]:
            run.keep(ctx.index, activation)
        return torch.zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        return None, ctx.run.backward(ctx.index, weight), *[None] * ctx.others


class _Loss(torch.autograd.Function):
    """A loss that the tail has computed; back go, beside its own gradient, tickets' of 1."""

    @staticmethod
    def forward(ctx: Any, run: Run, number: int, value: Tensor, *tickets: Tensor) -> Tensor:
        ctx.run, ctx.number, ctx.tickets = run, number, len(tickets)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        weight = float(ctx.run.slope(ctx.number, grad))
        return None, None, None, *[torch.tensor(weight, dtype=torch.float64)] * ctx.tickets


class _Seen(torch.autograd.Function):
    """An output that was brought from the tail."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *tickets: Tensor) -> Tensor:
        ctx.tickets = len(tickets)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        raise UsageError(
            "the output of a tail on hosts of its own goes into something else than the loss",
            do="train by the loss_fn that parallelize returned, called with the model's output as it is; or pin the "
            'tail\'s layers to something else than "stage"',
        )


@final
class AtTail(Cut):
    """How a parameter is cut of which tail hosts have all, and this rank nothing.

    Its local gradient has no elements either; that there is one says that there is one at the tail.
    """

    def __init__(self, name: str, parameter: nn.Parameter, stage: Stage) -> None:
        super().__init__(name, parameter, stage.hosts.comm)
        self._parameter, self.stage = parameter, stage
        self._key = stage.names[parameter]

    def part(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1)[:0]

    def whole(self, part: Tensor) -> Tensor:
        whole = self.stage.read(VALUES, self._key)
        assert whole is not None
        return whole

    def mean(self, wholes: Tensor) -> Tensor:
        raise UsageError(
            f"a gradient of parameter {self.name}, which is at tail hosts, that comes without a call of the model",
            where="a penalty on parameters",
            do='use weight_decay, or pin the layer to something else than "stage"',
        )

    def change(self, function: Callable[..., Any], subject: Tensor, others: Any, kwargs: Mapping[str, Any]) -> None:
        def whole(leaf: Any) -> Any:
            return cut_of(leaf).whole(part_of(leaf)) if isinstance(leaf, CutParameter) else leaf

        values = torch.empty(self.like.shape, dtype=self.like.dtype)
        if function.__name__ not in _OVERWRITING:
            values = self.whole(subject)
        others, kwargs = pytree.tree_map(whole, (tuple(others), dict(kwargs)))
        function(values.requires_grad_(subject.requires_grad), *others, **kwargs)  # as torch does, or refuses it
        self.stage.write(VALUES, self._key, values.detach())

    def gradient(self, parameter: Tensor, local: Tensor | None) -> Tensor | None:
        if local is None or (self._seen is not None and local is self._its_part):
            return None if local is None else self._seen
        whole = self.stage.read(GRADIENTS, self._key)
        if whole is not None:
            self._show(parameter, whole)
        return whole

    def assign(self, parameter: Tensor, whole: Tensor | None) -> None:
        super().assign(parameter, whole)
        self._version = -1  # the tail does not know it

    def tell(self) -> None:
        """Give the tail a gradient that somebody has seen and changed."""
        seen = self._seen
        if seen is not None and local_gradient(self._parameter) is self._its_part and seen._version != self._version:
            self.stage.write(GRADIENTS, self._key, seen)
            self._version = seen._version

    def begin(self) -> None:
        """A backward begins: what somebody saw of the gradient is not all of it any more."""
        self.tell()
        if self._seen is not None and local_gradient(self._parameter) is not None:
            set_local_gradient(self._parameter, torch.empty(0, dtype=self.like.dtype))
        self._seen = self._its_part = None


def modes(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> Modes:
    """What is set now."""
    return Modes(tuple(each.training for each in modules), tuple(each.requires_grad for each in parameters))


def forward_letter(its_modes: Modes | None, activation: Tensor | None, *, of_gradients: bool) -> tuple[Any, ...]:
    """A micro-batch; with the first goes what is set."""
    return its_modes, of_gradients, _autocast(), activation


def loss_letter(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, of_gradients: bool) -> tuple[Any, ...]:
    """What the loss is called with beside the output."""
    return args, dict(kwargs), of_gradients, _autocast()


def backward_letter(cleared: Sequence[bool], weight: float, slopes: Mapping[int, Tensor]) -> tuple[Any, ...]:
    """The parameters without a gradient so far, this worker's weight, and the gradients of its losses."""
    return tuple(cleared), weight, dict(slopes)


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def in_micro_batches(batch: Any, rows: int, count: int) -> list[Any]:
    """A batch cut into at most so many, by the rows of every tensor that has so many."""
    sizes = [size for size in cut_sizes(rows, count) if size]

    def split(leaf: Any) -> Any:
        whole = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows
        return leaf.split(sizes) if whole else [leaf] * len(sizes)

    leaves, form = pytree.tree_flatten(batch)
    return [pytree.tree_unflatten(list(each), form) for each in zip(*map(split, leaves), strict=True)]


_REQUIRES_GRAD = getattr(Tensor, "requires_grad").__get__  # noqa: B009
