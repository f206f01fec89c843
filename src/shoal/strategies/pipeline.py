"""Pipeline: each rank holds a run of the model's layers, and computes them for all ranks' rows.

    forward     the rows of each rank are a micro-batch; values for the next run of layers go to
                the rank that holds it
    loss        targets go to the rank that has the end, and each rank's loss comes back
    backward    gradients of these values come back, the last micro-batch first

For the rows of all ranks, a rank sends its layers' outputs and the gradients of their inputs:
2·T·w·s bytes for T rows of width w, whatever the number of layers. Weights, gradients and
optimizer state are divided by the number of ranks.

Reference: Huang et al., "GPipe", 2019, section 2; multi-node Caffe, with nets cut over nodes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shoal.codecs.coded_exchange import read_codec
from shoal.contracts.exchange import Exchange
from shoal.contracts.row_weights import Weighing
from shoal.contracts.state import OF_LOSS, TensorSlot
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Transfer
from shoal.contracts.ways import HeldWay
from shoal.core.cost import Cost, Phase, Update, Wait
from shoal.core.eager_methods import eager
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, LayerProfile, MovingState, Setting
from shoal.core.rank_groups import RankGroups
from shoal.core.role import Role
from shoal.pipeline.group_prices import group_bytes, step_of_groups, traffic_in_groups
from shoal.pipeline.model import PipelinedModel
from shoal.pipeline.model_calls import PipelineCalls
from shoal.pipeline.moving_buffers import MovingBuffer
from shoal.pipeline.output import EndOutput, as_bound
from shoal.pipeline.prices import RowPassage, front_of, stations_at, step_of, traffic_of
from shoal.pipeline.route import EACH
from shoal.pipeline.uses import UseFacts, uses_of
from shoal.profiling.identity import trainable_layers
from shoal.profiling.updates import UpdateFacts, UpdateProbe
from shoal.remote.far_parameters import AtHost, FarParameters
from shoal.strategies.copies import class_served_by, kind_before, plain
from shoal.strategies.group_gradients import GroupTransfer
from shoal.strategies.row_parts import RowFacts, RowProbe
from shoal.strategies.state_agreement import OfState, of_holders, transfers_of
from shoal.strategies.uses import UseProbe
from shoal.tensors.cut import cut, cut_of, is_cut, opened, restore
from shoal.tensors.rank_parameter import OnRank
from shoal.tensors.row_crossing import RowCrossing

_SLOT = "_runner"  # attribute of a module: the object that runs it
_NUMBER = 4  # bytes of a number that crosses, if its type is not known


@final
class Pipeline(Strategy):
    """Gives each rank a run of layers, and sends the rows of all ranks through the runs."""

    name = "pipeline"
    role = Role.PIPELINE
    probes = (UseProbe, UpdateProbe, RowProbe)
    codes_rows = True

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        return layer.measured(UseFacts).reason or layer.measured(UpdateFacts).joint or None

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        held = {layer.name: (layer.setting.rank, *layer.setting.copies) for layer in layers}
        if any(len(ranks) > 1 for ranks in held.values()):
            return _cost_in_groups(layers, held, cluster)
        holders = {layer.name: layer.setting.rank for layer in layers}
        front = front_of(layers, holders, cluster.size)
        stations = stations_at(layers, holders, front)
        uses = [use for station in stations for use in station.uses]
        passage = passage_of(layers[0].setting, layers[0].measured(RowFacts), cluster)
        forward_s, backward_s = step_of(stations, cluster, passage, front)
        nbytes = dict.fromkeys(range(cluster.size + len(cluster.tail)), 0)
        for layer in layers:
            nbytes[layer.setting.rank] += layer.nbytes
        whole = max(1, sum(nbytes.values()))
        paces = {station.rank: station.pace for station in stations}
        most = max(nbytes.values()) / whole
        slowest = max(nbytes[rank] * pace for rank, pace in paces.items())
        there = traffic_of(stations, len(nbytes), passage, cluster.size)
        back = replace(there, sent=there.received, received=there.sent)
        return Cost(
            in_forward=Phase(there, cluster.move_pace, Wait.AT_ONCE, shown=0.0),
            in_backward=Phase(back, cluster.move_pace, Wait.AT_ONCE, shown=0.0),
            forward_s=forward_s - sum(use.forward_s for use in uses),
            backward_s=backward_s - sum(use.backward_s for use in uses),
            memory_bytes=0.0 if front else max(nbytes.values()),  # gradients
            held=0.0 if front else most,
            # hosts that bring no rows make their step beside the ranks'
            update=Update(main=0.0, host=most) if front else Update(main=slowest / whole),
        )

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        assert place.comm is not None and place.ways.model is not None
        pipeline = _pipeline_at(place)
        pipeline.outbox.crossing = RowCrossing(place.rows.codec)
        far = {} if pipeline.guide is None else pipeline.guide.by_name
        replica, held = place.ways.replica, dict[str, nn.Parameter]()
        for name, parameter in place.parameters.items():
            if name in far:
                _give(name, parameter, far[name], place.weighs)
                continue
            layer = pipeline.layers[name]
            first, *copies = place.ways.holders.get(layer, (pipeline.holders[layer],))
            its_cut = OnRank(name, parameter, first, place.comm, place.weighs, copies)
            cut(parameter, its_cut)
            if its_cut.is_here:
                held[name] = parameter
        calls = PipelineCalls(pipeline)
        _run_here(place.ways.model, calls)
        run_by(place.ways.model, calls)
        if pipeline.guide is None and replica is None:
            pipeline.homes.frozen = {
                name: parameter
                for name, parameter in place.ways.model.named_parameters()
                if type(parameter) is nn.Parameter and not parameter.requires_grad
            }
        pipeline.homes.hold = functools.partial(_hold, calls)
        return [] if replica is None else [GroupTransfer(held, replica.holding, replica.share)]

    def release(self, place: Place, transfers: Sequence[Transfer]) -> None:
        assert place.ways.model is not None
        pipeline_of(place.ways.model).outbox.finish()
        pipeline_of(place.ways.model).forget_output()
        for module in place.ways.model.modules():
            run_no_more(module)
        for parameter in filter(is_cut, place.ways.model.parameters()):
            restore(parameter)


def _cost_in_groups(
    layers: Sequence[LayerProfile], held: Mapping[str, Sequence[int]], cluster: Cluster
) -> Cost:
    """Return the cost of layers that groups of ranks hold."""
    groups = RankGroups(tuple(sorted({tuple(ranks) for ranks in held.values()})), cluster.size)
    passage = passage_of(layers[0].setting, layers[0].measured(RowFacts), cluster)
    forward_s, backward_s = step_of_groups(layers, held, groups, cluster, passage)
    there, back = traffic_in_groups(layers, held, groups, cluster, passage)
    uses, nbytes = uses_of(layers), group_bytes(layers, held)
    paces = layers[0].measured(UseFacts).paces or (1.0,) * cluster.size
    slowest = [max(paces[rank] for rank in group) for group in groups.groups]
    whole = max(1, sum(nbytes))
    return Cost(
        in_forward=Phase(there, cluster.move_pace, Wait.AT_ONCE, shown=0.0),
        in_backward=Phase(back, cluster.move_pace, Wait.AT_ONCE, shown=0.0),
        forward_s=forward_s - sum(use.forward_s for use in uses),
        backward_s=backward_s - sum(use.backward_s for use in uses),
        memory_bytes=int(max(nbytes)),  # gradients
        held=max(nbytes) / whole,
        update=Update(main=max(map(operator.mul, nbytes, slowest)) / whole),
    )


def _pipeline_at(place: Place) -> PipelinedModel:
    """Return the model of a place, with the rank of each layer."""
    model, comm, apart = place.ways.model, place.comm, place.ways.apart
    assert comm is not None and model is not None
    layers: dict[str, str] = {}
    for layer in trainable_layers(model):
        layers |= dict.fromkeys(layer.parameters, layer.name)
    named, replica = place.ways.holders, place.ways.replica
    if replica is not None:
        holders, number = replica.holders(named), replica.number
        return PipelinedModel(model, holders, layers, replica.comm, place.weighs, replica=number)
    if apart is None:
        holders = {layer: ranks[0] for layer, ranks in named.items()}
        return PipelinedModel(model, holders, layers, comm, place.weighs)
    guide = apart.guide(model, comm)
    return PipelinedModel(model, apart.holders, layers, apart.comm, place.weighs, guide)


def _give(name: str, parameter: nn.Parameter, far: FarParameters, weighs: Weighing) -> None:
    """Give a parameter to a host that brings no rows, and leave this rank its form."""
    at_host = AtHost(name, parameter, far, weighs)
    far.write_values(name, parameter.detach())
    if parameter.grad is not None:
        far.write_gradient(name, parameter.grad)
    cut(parameter, at_host)


def passage_of(setting: Setting, facts: RowFacts, cluster: Cluster) -> RowPassage:
    """Return how rows go through a pipeline under a setting, for numbers of four bytes."""
    whole = RowPassage(setting.parts, facts.slower(setting.parts))
    if not setting.codec:
        return whole
    codec, pace = read_codec(setting.codec), cluster.coding(setting.codec)
    sent = codec.nbytes(1, _NUMBER) / _NUMBER
    return replace(whole, sent=sent, code_s=pace.encode_s / _NUMBER, read_s=pace.decode_s / _NUMBER)


def error_of_crossing(model: nn.Module) -> float | None:
    """Return the relative error of the values that were checked last; None if none is coded."""
    return pipeline_of(model).outbox.crossing.error


def _hold(calls: PipelineCalls, name: str, parameter: nn.Parameter, rank: int) -> None:
    """Make this rank number the holder of a parameter."""
    pipeline = calls.pipeline
    cut(parameter, OnRank(name, parameter, rank, pipeline.comm, pipeline.weighs))
    _run_here(pipeline.model, calls)


def _run_here(model: nn.Module, calls: PipelineCalls) -> None:
    """Make layers with parameters on this rank run here."""
    for module in model.modules():
        if module is model or runs_by(module) is not None:
            continue
        own = [cut_of(p) for p in module.parameters(recurse=False) if is_cut(p)]
        if any(isinstance(each, OnRank) and each.is_here for each in own):
            run_by(module, _Held(module, calls))


@final
class _Held:
    """A layer with its parameters on this rank. It runs in a call of the model, and in backward.

    All ranks take part in a call of the layer alone, and read its parameters.
    """

    def __init__(self, module: nn.Module, calls: PipelineCalls) -> None:
        self._parameters, self._calls = list(module.parameters()), calls

    def called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._calls.runs and torch._C._current_graph_task_id() == -1:
            return forward(*args, **kwargs)
        with opened(self._parameters):
            return forward(*args, **kwargs)


def take_state(
    model: nn.Module,
    moving: Sequence[MovingState],
    known: Mapping[str, TensorSlot],
    apart: HeldWay | None = None,
) -> Callable[[int], Sequence[OfState]]:
    """Let one rank keep each buffer that training changes; return a function that makes transfers.

    Hosts that bring no rows send theirs by themselves. Buffers of layers that all ranks with rows
    have stay as they are.

    Raises:
        PlanError: training changes a buffer of the loss.
    """
    running = pipeline_of(model)
    homes: dict[str, int | Callable[[], int]] = {}
    for state in moving:
        if state.name.startswith(OF_LOSS):
            raise PlanError(
                "a pipeline does not keep buffers of the loss that training changes",
                where=f"buffer {state.name.removeprefix(OF_LOSS)} of the loss",
                do="make the buffer a part of the model, or leave out the pipeline",
            )
        buffer = MovingBuffer(known[state.name], state.how == "mean")
        layer = state.name.rpartition(".")[0]
        home = functools.partial(running.homes.of, state.name)
        if apart is None:
            running.keep(state.name, buffer, layer)
            homes[state.name] = running.holders.get(layer, home)
        elif (at := apart.homes[state.name]) != EACH:
            running.keep_at(state.name, buffer, at)
            homes[state.name] = at
    among = running.comm.workers
    kept = [s for s in moving if s.name in homes and (callable(h := homes[s.name]) or h < among)]
    others = [s for s in moving if s.name not in homes]

    def transfers(ranks: int) -> Sequence[OfState]:
        return [*of_holders(kept, known, homes), *transfers_of(others, known, ranks)]

    return transfers


def far_of(model: nn.Module) -> Sequence[FarParameters]:
    """Return the parameters of a model that hosts without rows have."""
    if not is_pipeline(model) or (guide := pipeline_of(model).guide) is None:
        return ()
    return guide.far


def with_counters(
    model: nn.Module, moving: Sequence[MovingState], known: Mapping[str, TensorSlot]
) -> list[MovingState]:
    """Return the changing state and the counters: a rank without the layer does not count calls."""
    running = pipeline_of(model)
    counters = (
        []
        if running.guide is not None
        else [
            MovingState(name, 1, slot.tensor.element_size(), "first")
            for name, slot in known.items()
            if slot.is_buffer
            and name.rpartition(".")[0] in running.holders
            and slot.tensor is not None
            and not slot.tensor.dim()
            and not slot.tensor.is_floating_point()
        ]
    )
    names = {state.name for state in moving}
    return [*moving, *(state for state in counters if state.name not in names)]


def pipeline_of(model: nn.Module) -> PipelinedModel:
    """Return a model's pipeline."""
    calls = runs_by(model)
    assert isinstance(calls, PipelineCalls)
    return calls.pipeline


def is_pipeline(model: nn.Module) -> bool:
    """Return whether a model's layers are in a pipeline."""
    return isinstance(runs_by(model), PipelineCalls)


def loss_at_end(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss, computed on the rank with the end of a pipeline if that has the output.

    A module is changed in place, a function is wrapped. A module that is a layer of the model stays
    as it is: each rank computes it on the output that it reads.
    """
    if isinstance(loss_fn, nn.Module):
        is_layer = any(map(is_cut, loss_fn.parameters()))
        if not is_layer and not isinstance(runs_by(loss_fn), _LossAtEnd):  # a model before has it
            run_by(loss_fn, _LossAtEnd())
        return loss_fn

    @functools.wraps(loss_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _LossAtEnd().called(loss_fn, *args, **kwargs)

    return wrapped


@final
class _LossAtEnd:
    """A loss that runs on the rank that has the output."""

    def called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(as_bound, (args, kwargs))
        given = pytree.tree_leaves((args, kwargs))
        output = next((each for each in given if isinstance(each, EndOutput)), None)
        return (
            forward(*args, **kwargs)
            if output is None
            else output.forward.loss(forward, args, kwargs)
        )


def run_by(module: nn.Module, runner: Any) -> None:
    """Make calls of the module call `runner.called(forward, …)` instead."""
    kind = type(module)
    module.__class__ = class_served_by(_OtherRun, kind, f"Staged{kind.__name__}")
    module.__dict__[_SLOT] = runner


def run_no_more(module: nn.Module) -> None:
    """Undo `run_by`, if it was done."""
    if issubclass(type(module), _OtherRun):
        del module.__dict__[_SLOT]
        module.__class__ = kind_before(module)


def runs_by(module: nn.Module) -> Any:
    """Return the object that runs a module; None if the module runs as it is."""
    return module.__dict__.get(_SLOT)


class _OtherRun(nn.Module):
    """A module that another object runs. Its parameters, names and repr are the same.

    A copy of it is an ordinary module.
    """

    _runner: Any = None

    @eager
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._runner is None:
            return super().forward(*args, **kwargs)
        return self._runner.called(super().forward, *args, **kwargs)

    def _get_name(self) -> str:
        return kind_before(self).__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, kind_before(self), _SLOT)
