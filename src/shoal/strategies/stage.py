"""Stage: the end of the model runs on T hosts of its own, fed by W workers in micro-batches.

    forward     a micro-batch's activation goes to the worker's tail host, K·M·s in all, while the
                next is computed
    loss        the target follows; the loss of all of the worker's rows comes back
    backward    the activation's gradient comes back, K·M·s in all, the last micro-batch first,
                while the worker's backward goes on with the micro-batches that have come

Micro-batches go through the tail one by one. If its passes cost more time than they hide, they go
through it at once (`Plan.joined`).

A tail host's link carries W·K·M·s/T each way, and its processor the rows of W/T workers, which it
joins into one product. Workers hold nothing of the tail: no parameter, no gradient, no state.
Several tail hosts share its layers as the ranks of any job do (the plan's `exchange` says how:
"column_pair", "sliced" …). Body, link and tail are a pipeline of three stations. A worker waits for
the rest of it after its last micro-batch: docs/ideas/how-it-chooses.md.

Reference: Huang et al., "GPipe", 2019, section 2; multi-node Caffe, which ran fully connected
layers on separate nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.codecs.coded_exchange import read_codec
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Transfer
from shoal.core.cost import Cost, Phase, Traffic, Update, Wait
from shoal.core.eager_methods import eager
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, LayerProfile
from shoal.core.names import pins
from shoal.core.role import Role
from shoal.profiling.products import ProductProbe
from shoal.profiling.tails import Tail, TailFacts, TailProbe, tail_of
from shoal.profiling.updates import UpdateFacts, UpdateProbe
from shoal.remote.far_parameters import AtTail
from shoal.remote.far_tail import FarTail
from shoal.remote.stage_output import StagedRun, StageOutput, in_micro_batches, micro_batch_sizes
from shoal.strategies.copies import class_served_by, kind_before, plain
from shoal.strategies.pieces import Pieces
from shoal.tensors.cut import cut

_LEAST_S = 1e-12
_SLOT = "_stage"  # attribute of a module: the object that runs it


@final
class Stage(Strategy):
    """Runs layers, from one of them to the loss, on tail hosts."""

    name = "stage"
    role = Role.STAGE
    codes_rows = True
    probes = (TailProbe, ProductProbe, UpdateProbe)
    stays = "the end of a model does not come back from tail hosts"

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        facts = layer.measured(TailFacts)
        if facts.tail is None:
            return (
                facts.reason
                or "it was profiled for no tail hosts, "
                "or is not of the model that is parallelised first"
            )
        return layer.measured(UpdateFacts).joint or None

    def needs(self, layer: LayerProfile) -> dict[str, str]:
        tail = layer.measured(TailFacts).tail
        members = tail.layers if tail else ()
        return {other: self.name for other in members if other != layer.name}

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        tail, joined = tail_of(layers), layers[0].setting.joined
        assert tail is not None
        profiled, tail = tail, _coded(tail, layers[0].setting.codec, cluster)
        workers, hosts, count = cluster.size, len(cluster.tail), tail.micro_batches
        served = -(-workers // hosts)  # workers of a tail host, at most
        out, back = (
            _traffic(cluster, tail.sent_bytes, 0.0),
            _traffic(cluster, 0.0, tail.received_bytes),
        )
        pace = cluster.move_pace
        # if ranks share cores, waiting workers leave theirs to the tail
        turn = cluster.turn
        forward_s = _pipe_s(
            tail, tail.body_forward_s, pace.wall.of(out), tail.forward_s * turn, served, joined
        )
        backward_s = _pipe_s(
            tail, tail.body_backward_s, pace.wall.of(back), tail.backward_s * turn, served, joined
        )
        shown = 1 / count  # part of the bytes that does not hide while workers compute
        return Cost(
            in_forward=Phase(out, pace, Wait.AT_ONCE, shown=shown),
            in_backward=Phase(back, pace, Wait.AT_ONCE, shown=shown),
            forward_s=forward_s
            - shown * pace.wall.of(out)
            - profiled.body_forward_s
            - profiled.forward_s,
            backward_s=backward_s
            - shown * pace.wall.of(back)
            - profiled.body_backward_s
            - profiled.backward_s,
            held=0.0,
            update=Update(main=0.0, host=1.0),
        )

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        tail = place.ways.tail
        assert isinstance(tail, FarTail)
        for name, parameter in tail.parameters.items():
            at_tail = AtTail(name, parameter, tail)
            tail.write_values(name, parameter.detach())
            if parameter.grad is not None:
                tail.write_gradient(name, parameter.grad)
            cut(parameter, at_tail)
        first, *rest = tail.modules.values()
        run_by(first, _First(tail))
        for module in rest:
            run_by(module, _Rest())
        run_by(tail.model, _Body(tail))
        return []


def run_by(module: nn.Module, stage: Any) -> None:
    """Make calls of the module call `stage.called(forward, …)` instead."""
    kind = type(module)
    module.__class__ = class_served_by(_Staged, kind, f"Staged{kind.__name__}")
    module.__dict__[_SLOT] = stage


def run_no_more(module: nn.Module) -> None:
    """Undo `run_by`, if it was done."""
    if issubclass(type(module), _Staged):
        del module.__dict__[_SLOT]
        module.__class__ = kind_before(module)


def runs_by(module: nn.Module) -> Any:
    """Return the object that runs a module; None if the module runs as it is."""
    return module.__dict__.get(_SLOT)


class _Staged(nn.Module):
    """A module that another object runs. Its parameters, names and repr are the same.

    A copy of it is an ordinary module.
    """

    _stage: Any = None

    @eager
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._stage is None:
            return super().forward(*args, **kwargs)
        return self._stage.called(super().forward, *args, **kwargs)

    def _get_name(self) -> str:
        return kind_before(self).__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, kind_before(self), _SLOT)


@final
class _Body:
    """Runs a model that ends on tail hosts, micro-batch by micro-batch."""

    def __init__(self, tail: FarTail) -> None:
        self._tail = tail

    @property
    def error(self) -> float | None:
        """Relative error of the activations that were checked last."""
        return self._tail.feed.crossing.error

    def called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tail, feed = self._tail, self._tail.feed
        if tail.running is not None:
            return forward(*args, **kwargs)
        tensors = [
            leaf
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and leaf.dim()
        ]
        rows = len(tensors[0]) if tensors else 1
        sizes = micro_batch_sizes(rows, feed.micro_batches, alike=feed.alike)
        pieces = in_micro_batches((args, kwargs), rows, feed.micro_batches, alike=feed.alike)
        run = StagedRun(tail)
        tickets: list[Tensor] = []
        beside = Pieces(tail.model, tail.layers) if len(pieces) > 1 else None
        try:
            for (its_args, its_kwargs), its_rows in zip(pieces, sizes, strict=True):
                with beside.hooked() if beside is not None else nullcontext():
                    output = forward(*its_args, **its_kwargs)
                if beside is not None:
                    beside.ended(its_rows)
                if not isinstance(output, StageOutput) or not output.is_of(run):
                    raise UsageError(
                        "the model's output is not what its end has put out, which runs on tail "
                        "hosts",
                        got=type(output).__name__,
                        do=f"return it as it is, or give parallelize {pins(tail.layers)}",
                    )
                tickets += output.tickets
            if beside is not None:
                beside.join()
            for _ in range(len(pieces), feed.micro_batches):
                run.tell_forward(None, back=False)
        finally:
            tail.running = None
        return StageOutput.of(run, tickets) if torch.is_grad_enabled() else run.output()


@final
class _First:
    """Sends the tail's input to the tail hosts."""

    def __init__(self, tail: FarTail) -> None:
        self._tail = tail

    def called(self, forward: Callable[..., Any], activation: Tensor) -> StageOutput:
        run: StagedRun | None = self._tail.running
        if run is None:
            raise UsageError(
                "a module was called by itself that runs on tail hosts",
                do="call the model, as training does",
            )
        return run.send(activation)


@final
class _Rest:
    """Returns its input, because tail hosts run the layer."""

    def called(self, forward: Callable[..., Any], output: StageOutput) -> StageOutput:
        return output


@final
class _LossAtTail:
    """A loss of an output that tail hosts hold."""

    def called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], StageOutput):
            return args[0].loss(args[1:], kwargs)
        if not args and isinstance(kwargs.get("input"), StageOutput):
            return kwargs["input"].loss(
                (), {name: value for name, value in kwargs.items() if name != "input"}
            )
        return forward(*args, **kwargs)


def loss_at_tail(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss, computed by tail hosts if they hold the output.

    A module is changed in place, a function is wrapped.
    """
    if isinstance(loss_fn, nn.Module):
        run_by(loss_fn, _LossAtTail())
        return loss_fn

    @functools.wraps(loss_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _LossAtTail().called(loss_fn, *args, **kwargs)

    return wrapped


def error_at_tail(model: nn.Module) -> float | None:
    """Return the relative error of the activations that were checked last; None if exact."""
    stage = model.__dict__.get(_SLOT)
    return stage.error if isinstance(stage, _Body) else None


def _coded(tail: Tail, codec: str, cluster: Cluster) -> Tail:
    """Return the tail's bytes and times if activations and gradients travel as codes."""
    part = read_codec(codec).nbytes(1, tail.itemsize) / tail.itemsize if codec else 1.0
    if part >= 1:
        return tail
    pace = cluster.coding(codec)
    out, back = tail.activation_bytes / tail.itemsize, tail.gradient_bytes / tail.itemsize
    return replace(
        tail,
        sent_bytes=tail.sent_bytes - (1 - part) * tail.activation_bytes,
        received_bytes=tail.received_bytes - (1 - part) * tail.gradient_bytes,
        body_forward_s=tail.body_forward_s + out * pace.encode_s,
        forward_s=tail.forward_s + out * pace.decode_s,
        body_backward_s=tail.body_backward_s + back * pace.decode_s,
        backward_s=tail.backward_s + back * pace.encode_s,
    )


def _pipe_s(
    tail: Tail, body_s: float, link_s: float, own_s: float, workers: int, joined: bool
) -> float:
    """Return the seconds until the last micro-batch is through body, link and tail.

    `own_s` is the tail's time for one worker.
    """
    share = own_s / max(tail.forward_s + tail.backward_s, _LEAST_S)
    pass_s = min(own_s, tail.pass_s * share)
    rows_s, count = workers * (own_s - pass_s), tail.micro_batches
    stations = [body_s, link_s] if joined else [body_s, link_s, rows_s + count * pass_s]
    return (sum(stations) + (count - 1) * max(stations)) / count + (
        rows_s + pass_s if joined else 0.0
    )


def _traffic(cluster: Cluster, out: float, back: float) -> Traffic:
    """Return the traffic if each worker sends `out` bytes to its tail host, and gets `back`."""
    workers, hosts = cluster.size, len(cluster.tail)
    served = [len(range(t, workers, hosts)) for t in range(hosts)]
    apart = [host != cluster.tail[w % hosts] for w, host in enumerate(cluster.topology.hosts)]
    afar = [sum(apart[t::hosts]) for t in range(hosts)]
    return Traffic(
        sent=(*[out] * workers, *[back * num_workers for num_workers in served]),
        received=(*[back] * workers, *[out * num_workers for num_workers in served]),
        rounds=1,
        leaving=(*[out * far for far in apart], *[back * far for far in afar]),
    )
