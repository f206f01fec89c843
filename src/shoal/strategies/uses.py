"""Finds the uses of a model's layers in a record of the sample's forward."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

from torch import nn
from torch.utils import _pytree as pytree

from shoal.contracts.loss_attributes import keep, kept_values_of
from shoal.contracts.probe import Layer, Probe, Trial
from shoal.contracts.sample import Sample
from shoal.core.errors import PlanError, ShoalError
from shoal.pipeline.absent_tensors import Forms
from shoal.pipeline.record import INPUT, ForwardRecord, recorded
from shoal.pipeline.replay import FIRST
from shoal.pipeline.stations import cut_between
from shoal.pipeline.uses import NO_CUT, UseFacts
from shoal.pipeline.walk import Position
from shoal.profiling.identity import ROOT


@final
class UseProbe(Probe):
    """Finds the uses of each layer in a record of the sample's forward."""

    def measure(self, layer: Layer, trial: Trial) -> UseFacts:
        return uses_in(trial)[layer.name]


def uses_in(trial: Trial) -> Mapping[str, UseFacts]:
    """Return the uses of each layer, by name."""
    return trial.once(_uses)


def _uses(trial: Trial) -> dict[str, UseFacts]:
    groups = _together(trial)
    try:
        return _find_uses(_record(trial.sample), groups, trial.layers)
    except ShoalError as error:
        reason = f"{error.what}" + (f" ({error.where})" if error.where else "")
    except Exception as error:  # forward is the user's code, and may raise anything
        reason = f"its forward cannot be recorded: {type(error).__name__}: {error}"[:300]
    return {
        name: UseFacts("" if group == name else group, reason=reason)
        for name, group in groups.items()
    }


def _record(sample: Sample) -> ForwardRecord:
    args, kwargs = _arguments(sample)
    with _as_it_was(sample.model):
        record, _ = recorded(sample.model, Forms(), sample.model.forward, args, kwargs)
    return record


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore the attributes that a model's forward changes while it is recorded."""
    before = [
        (
            module,
            {**vars(module)},
            {**module._buffers},
            pytree.tree_map(_same, kept_values_of(module)),
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, buffers, kept in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            for name, value in kept.items():
                keep(module, name, value)


def _same(leaf: Any) -> Any:
    return leaf


class _Called(BaseException):
    """The model was called. No Exception, which a loss function might catch."""


def _arguments(sample: Sample) -> tuple[Any, Any]:
    """Return the arguments of the first call of the model."""
    found: list[tuple[Any, Any]] = []

    def hook(module: nn.Module, args: Any, kwargs: Any) -> NoReturn:
        found.append((args, kwargs))
        raise _Called

    handle = sample.model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        sample.output()
    except _Called:
        return found[0]
    finally:
        handle.remove()
    raise _Uncalled


class _Uncalled(Exception):
    def __str__(self) -> str:
        return "the model itself is not called"


def _find_uses(
    record: ForwardRecord, groups: Mapping[str, str], layers: Sequence[Layer]
) -> dict[str, UseFacts]:
    group_of = {name: groups[layer.name] for layer in layers for name in layer.parameters}
    order = sorted({*record.calls, *record.functions})
    events: list[tuple[str, Position]] = []  # the last event of each run of one group
    cuts, before_bytes = [FIRST], [0.0]
    for position, names in sorted(record.parameters.items()):
        for group in sorted({group_of[name] for name in names if name in group_of}):
            if events and events[-1][0] == group:
                events[-1] = group, position
                continue
            if events:
                try:
                    cuts.append(cut_between(record, order, events[-1][1], position))
                    before_bytes.append(float(record.live_bytes.at(cuts[-1])))
                except PlanError:
                    cuts.append(position)
                    before_bytes.append(NO_CUT)
            events.append((group, position))
    inputs = _inputs(record, cuts)
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, (group, _) in enumerate(events):
        numbers[group].append(number)
    return {
        layer.name: UseFacts(
            with_layer="" if groups[layer.name] == layer.name else groups[layer.name],
            numbers=tuple(own := numbers[layer.name] if groups[layer.name] == layer.name else ()),
            before_bytes=tuple(before_bytes[i] for i in own),
            inputs=tuple(tuple(inputs[i].items()) for i in own),
            reason="",
        )
        for layer in layers
    }


def _inputs(record: ForwardRecord, cuts: Sequence[Position]) -> list[dict[int, float]]:
    """Return the inputs that are needed between each cut and the next, with their bytes."""
    found: list[dict[int, float]] = [{} for _ in cuts]
    for position, numbers in record.inputs.items():
        at = bisect_right(cuts, position) - 1
        for number in numbers - record.looked_at:
            found[at][number] = float(record.values[INPUT, number].nbytes)
    return found


def _together(trial: Trial) -> dict[str, str]:
    """Return, for each layer, the first of the layers that must stay on one rank with it.

    One module uses parameters of both: a head with the weight of an embedding. Or a layer is never
    called, because the module around it uses the parameters of both in one function, as
    nn.MultiheadAttention does.
    """
    owners = {id(p): layer.name for layer in trial.layers for p in layer.parameters.values()}
    firsts = {layer.name: layer.name for layer in trial.layers}

    def join(names: Iterable[str]) -> None:
        groups = {firsts[name] for name in names}
        one = next((name for name in firsts if name in groups), "")
        firsts.update({name: one for name, group in firsts.items() if group in groups})

    for module in trial.sample.model.modules():
        join(owners[id(p)] for p in module.parameters(recurse=False) if id(p) in owners)
    called = [name for name, step in trial.step.layers.items() if step.calls]
    for name in firsts.keys() - set(called):
        around = [other for other in called if name.startswith(f"{other}.") or other == ROOT]
        join([name, *sorted(around, key=lambda other: other != ROOT and len(other))[-1:]])
    return firsts
