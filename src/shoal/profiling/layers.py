"""Measures a model on a sample: for each layer its size as a product, its times, when its gradients
come, and what strategies ask for.

    1  watch     a step to warm up, in whose forward probes see every call    (contracts/probe.py)
    2  measure   some training steps: each rank's times are medians
    3  probe     each probe measures each layer
    4  agree     the profile is the maximum over ranks, the same on every rank
    5  state     what forward changes beside the gradients, and has to agree          (moving.py)

Every rank measures at the same time, so that cores which several ranks share are priced as training
will find them. Costs some training steps (of a slow model three where they agree, of a quick one
half a second's) and what the probes do. It leaves no trace: see untraced.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.contracts.probe import Layer, MeasuredStep, Probe, Trial
from shoal.contracts.sample import ComputeLoss, LossFn, Sample
from shoal.contracts.strategy import Strategy, probes_of
from shoal.core.errors import SampleError
from shoal.core.facts import (
    Facts,
    LayerProfile,
    ModelProfile,
    ParameterProfile,
    UpdatePace,
    first,
)
from shoal.core.registry import of
from shoal.core.terms import LossOfParts, Targets, Terms
from shoal.profiling.identity import model_digest, require_same_model, trainable_layers
from shoal.profiling.moving import Changes, Ways, left_local, moving
from shoal.profiling.optimizer import OptimizerCost
from shoal.profiling.products import rows_of, shape_of
from shoal.profiling.rowwise import rowwise
from shoal.profiling.sparse import is_sparse, rows_of_gradients
from shoal.profiling.terms import Outputs, SampleTerms, agreed_terms, seen
from shoal.profiling.timeline import DeviceClock, usual, watch_step
from shoal.profiling.untraced import drop_gradients, untraced
from shoal.profiling.usage import Readers, kind_of, outside_use
from shoal.profiling.weight_use import WeightUse, weight_uses

_CHECKING = "parallelize: trying the sample"
# the fewest measured steps, after one to warm up, and seconds that are enough for more: where they
# agree, and otherwise
_AT_FIRST, _AT_MOST = (2, 0.5), (3, 2.0)
_AGREE = 0.1  # what steps that agree differ by
_MOST = 200  # measured steps
_TURN_S = 0.03  # in which ranks that share cores have all had their turns
_BUDGET_S = 20.0  # for more than one


@dataclass(frozen=True)
class ProfileOptions:
    """Settings of a profile, the same on every rank."""

    # parts of a batch, if the end of the model may run on hosts of its own
    micro_batches: int | None = None
    # parts of a rank's batch in a pipeline; None: the planner may choose
    row_parts: int | None = None
    # what measures for strategies; None: all that any known strategy asks for
    probes: Iterable[type[Probe]] | None = None
    buffers: Ways = "agree"  # how what forward changes comes to agree, as `parallelize` takes it
    compute_loss: ComputeLoss | None = None  # takes (model, batch) and returns a scalar
    counted: bool = False  # the training loop will say the terms of each batch's loss


def profile_model(
    model: nn.Module,
    loss_fn: LossFn | None,
    optimizers: Sequence[Optimizer],
    sample: Any,
    comm: Comm,
    options: ProfileOptions = ProfileOptions(),
) -> ModelProfile:
    """Measure a training step of the model on one batch, on all ranks at once.

    Args:
        model: any module; it is run in training mode and left as it was.
        loss_fn: takes (output, y) and returns a scalar; None where there is a `compute_loss`, or
            the model returns its own loss.
        optimizers: those of the model; their step is measured on copies.
        sample: (x, y) with this rank's rows; x is a tensor, a tuple of positional or a dict of
            keyword arguments. With a `compute_loss`, a batch as that takes it.
        comm: the ranks that measure together; with one rank nothing is exchanged.
        options: what is measured beside the step, and how.

    Returns:
        The profile, equal on all ranks, its layers in the order in which backward finishes them.

    Raises:
        SampleError: the model or the loss does not take the sample (on every rank, if it is so on
            any).
        RanksDiffer: the ranks have different models.
    """
    compute_loss = options.compute_loss
    checked = agreed(
        comm, lambda: Sample.of(model, loss_fn, sample, compute_loss), _CHECKING, SampleError
    )
    require_same_model(model, comm)
    layers = trainable_layers(model)
    asked = probes_of(of(Strategy).values()) if options.probes is None else options.probes
    probing = [kind() for kind in asked]
    with untraced(checked, optimizers) as checked:
        _meet(comm)  # every rank has noted the random state, which threads share
        changes, outputs = Changes(model, checked.function), Outputs()
        readers, step = _measured_step(checked, layers, probing, comm, changes, outputs)  # 1, 2
        trial = Trial(
            checked,
            layers,
            tuple(optimizers),
            comm.size,
            options.micro_batches,
            options.row_parts,
            step,
            frozenset(readers.read),
        )
        on_this_rank = _profile_here(trial, readers, probing, comm)
        profiles = comm.gather_objects(on_this_rank, "measuring the model: profiles")
        moves = moving(checked, changes, comm, step.total_s, options.buffers)  # 5
        local = left_local(changes, comm, options.buffers)
        terms = _terms(checked, options, outputs, comm)
    _meet(comm)  # every rank has put the random state back
    agreed_on = agreed_terms(terms, of_batch=compute_loss is not None)
    profile = completed(_in_backward_order(_maximum(profiles)))  # 4
    return replace(profile, terms=agreed_on, moving=moves, local=local)


def _terms(
    sample: Sample, options: ProfileOptions, outputs: Outputs, comm: Comm
) -> list[SampleTerms]:
    """Return the terms of the loss that each rank's sample shows."""
    here = agreed(
        comm, lambda: seen(sample, options.counted, outputs, comm.rank), _CHECKING, SampleError
    )
    return comm.gather_objects(
        here, "measuring the model: rows", SampleTerms, Terms, Targets, LossOfParts
    )


def _profile_here(
    trial: Trial, readers: Readers, probes: Sequence[Probe], comm: Comm
) -> ModelProfile:
    """Profile the model as this rank finds it, with what each probe measures of each layer."""
    step, model = trial.step, trial.sample.model
    facts = [  # 3
        agreed(comm, _measuring(probe, trial), _CHECKING, SampleError) for probe in probes
    ]
    by_outputs = agreed(comm, lambda: trial.once(rowwise), _CHECKING, SampleError)
    uses = agreed(comm, lambda: weight_uses(trial), _CHECKING, SampleError)
    outside = outside_use(model, trial.layers, readers.borrowed, by_outputs, uses)
    update = OptimizerCost.of(trial.optimizers, rows_of_gradients(trial))
    return ModelProfile(
        layers=tuple(
            replace(
                _layer_profile(layer, step, outside[layer.name], uses[layer.name]),
                may_vary=readers.decided.get(layer.name, ""),
                facts=tuple(found[layer.name] for found in facts),
            )
            for layer in trial.layers
        ),
        forward_s=step.forward_s,
        backward_s=step.backward_s,
        optimizer_s=update.seconds,
        update=update.pace,
        state_bytes=update.state_bytes,
        digest=model_digest(model),
    )


def _meet(comm: Comm) -> None:
    """Go on when every rank is here, so that all measure the same thing at the same time."""
    comm.gather_objects(None, "measuring the model: start together")


@contextmanager
def _seen_by(probes: Sequence[Probe], layers: Sequence[Layer]) -> Iterator[None]:
    """Let probes see every call of a layer inside."""

    def tell(probe: Probe, layer: Layer) -> Any:
        @torch.no_grad()
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            with torch._C.DisableTorchFunction():  # what a probe reads is no use of a weight
                probe.called(layer, args, kwargs, output)

        return hook

    with ExitStack() as hooks:
        for probe in probes:
            for layer in layers if type(probe).called is not Probe.called else ():
                hook = layer.module.register_forward_hook(tell(probe, layer), with_kwargs=True)
                hooks.callback(hook.remove)
        yield


def _measuring(probe: Probe, trial: Trial) -> Callable[[], dict[str, Facts]]:
    """What a probe finds of each layer, by name, when it is called."""
    return lambda: {layer.name: probe.measure(layer, trial) for layer in trial.layers}


def _measured_step(
    sample: Sample,
    layers: Sequence[Layer],
    probes: Sequence[Probe],
    comm: Comm,
    changes: Changes,
    outputs: Outputs,
) -> tuple[Readers, MeasuredStep]:
    """Warm up while probes look on, then measure some steps in a row, as in training.

    Where ranks share cores, one step is long in forward and short in backward, and the next the
    other way round: so each rank's times are medians. In training all wait in every step for
    whoever is slowest in it, which is more than any rank takes in the median: the medians are
    stretched to that. Two steps that agree are enough; where they do not, more follow.

    Ranks begin each step together, as they do in training: who is done early leaves the core to
    others. Of three ranks on two cores one would else have a core for itself, and the others would
    never seem to be faster than on half of one.

    Steps that are over before the kernel has given every rank its turn are taken by the dozen: one
    that was interrupted is ten times as long, and who waits lets others have the core.
    """
    parameters, clock = list(sample.model.parameters()), DeviceClock(_device(layers))
    start = time.perf_counter()

    def warm_up() -> tuple[Readers, MeasuredStep]:
        with ExitStack() as looking_on:
            readers = looking_on.enter_context(Readers(sample.model, layers).watching())
            looking_on.enter_context(_seen_by(probes, layers))

            def forward_ended() -> None:
                looking_on.close()  # backward may go forward again (checkpointing)
                changes.forward_ended()

            step = watch_step(outputs.kept_of(sample), layers, clock, forward_ended)
        if not step.ready_s:
            raise SampleError(
                "the loss does not depend on any trainable parameter of the model",
                do="compute it of what the model gives: the one that parallelize is given, and "
                "hands to compute_loss",
            )
        changes.backward_ended()
        return readers, step

    def measure() -> MeasuredStep:
        drop_gradients(parameters)
        return watch_step(sample, layers, clock)

    readers, warm = agreed(comm, warm_up, _CHECKING, SampleError)
    # probes go forward once more
    left_s = _BUDGET_S - (time.perf_counter() - start) - warm.forward_s
    steps = [measure()]
    each_s = min(step.total_s for step in (warm, *steps))
    turn = math.ceil(_TURN_S / max(comm.gather_objects(each_s, "measuring the model: one step")))
    for fewest, enough_s in _AT_FIRST, _AT_MOST:
        affordable = min(max(fewest, int(enough_s / each_s)), int(left_s / each_s), _MOST)
        told = comm.gather_objects(affordable, "measuring the model: number of steps")
        _measure_on(steps, max(1, min(told)), measure, turn, comm)
        typical = usual(steps, warm)
        ranks: list[list[float]] = comm.gather_objects(
            [typical.total_s, *(step.total_s for step in steps)],
            "measuring the model: seconds of steps",
        )
        usual_s = max(total_s for total_s, *_ in ranks)
        slowest = _slowest([own for _, *own in ranks], turn)
        if _agree(slowest) or len(steps) == _MOST:
            break
    drop_gradients(parameters)
    slowest_s = median(slowest)
    return readers, typical.times(max(1.0, slowest_s / usual_s))


def _measure_on(
    steps: list[MeasuredStep],
    number: int,
    measure: Callable[[], MeasuredStep],
    turn: int,
    comm: Comm,
) -> None:
    """Measure until there are so many steps; ranks begin each turn together."""
    for index in range(len(steps), number):
        if index % turn == 0:
            _meet(comm)
        steps.append(measure())


def _slowest(ranks: Sequence[Sequence[float]], turn: int) -> list[float]:
    """Seconds of a step on the rank that was slowest in it, of as many steps as make a turn."""
    count = len(ranks[0])
    size = min(count, turn)
    groups = [range(i, i + size) for i in range(0, count - size + 1, size)]
    return [max(sum(own[i] for i in group) for own in ranks) / size for group in groups]


def _agree(seconds: Sequence[float]) -> bool:
    """Whether each third of the steps says the same as the others; of two, each half."""
    parts = min(3, len(seconds))
    if parts < 2:
        return False
    size = len(seconds) // parts
    medians = [median(seconds[i * size : (i + 1) * size]) for i in range(parts)]
    return max(medians) <= (1 + _AGREE) * min(medians)


def _layer_profile(layer: Layer, step: MeasuredStep, outside: str, use: WeightUse) -> LayerProfile:
    """What was measured of every layer alike."""
    watched = step.layers[layer.name]
    used = layer.parameters.keys() & step.ready_s.keys()
    if used and not watched.calls and not outside:
        outside = "its gradient comes without a call of the layer"
    inputs, outputs = shape_of(layer.module, use)
    return LayerProfile(
        name=layer.name,
        kind=kind_of(layer.module),
        parameters=tuple(
            ParameterProfile(
                name=name,
                shape=tuple(parameter.shape),
                numel=parameter.numel(),
                itemsize=parameter.element_size(),
                used=name in used,
                ready_s=step.ready_s.get(name, step.backward_s),
                sparse=is_sparse(layer, name, step),
                is_real=not parameter.is_complex(),
                again=name in step.again,
            )
            for name, parameter in layer.parameters.items()
        ),
        rows=rows_of(watched, outputs),
        inputs=inputs,
        outputs=outputs,
        calls=watched.calls,
        calls_vary=watched.calls_vary,
        needed_s=watched.needed_s,
        forward_s=watched.forward_s,
        backward_s=watched.backward_s,
        outside_use=outside,
    )


def _device(layers: Sequence[Layer]) -> torch.device:
    """Where the model computes, if not all of it is on the CPU."""
    devices = (p.device for layer in layers for p in layer.parameters.values())
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _maximum(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """The ranks' profiles in one: the most of every number."""
    return ModelProfile(
        layers=tuple(
            _maximum_layer(layers) for layers in zip(*(p.layers for p in profiles), strict=True)
        ),
        forward_s=max(p.forward_s for p in profiles),
        backward_s=max(p.backward_s for p in profiles),
        optimizer_s=max(p.optimizer_s for p in profiles),
        update=UpdatePace(
            max(p.update.call_s for p in profiles), max(p.update.parameter_s for p in profiles)
        ),
        state_bytes=max(p.state_bytes for p in profiles),
        digest=profiles[0].digest,
        rank_s=tuple(p.forward_s + p.backward_s for p in profiles),
    )


def _maximum_layer(ranks: Sequence[LayerProfile]) -> LayerProfile:
    """One layer's profiles in one: of a kind of facts, as that says."""
    return replace(
        ranks[0],
        parameters=tuple(
            replace(
                same[0],
                used=any(p.used for p in same),
                ready_s=max(p.ready_s for p in same),
                sparse=any(p.sparse for p in same),
                again=any(p.again for p in same),
            )
            for same in zip(*(layer.parameters for layer in ranks), strict=True)
        ),
        rows=max(layer.rows for layer in ranks),
        calls=max(layer.calls for layer in ranks),
        calls_vary=any(layer.calls_vary or layer.calls != ranks[0].calls for layer in ranks),
        may_vary=first(layer.may_vary for layer in ranks),
        needed_s=max(layer.needed_s for layer in ranks),
        forward_s=max(layer.forward_s for layer in ranks),
        backward_s=max(layer.backward_s for layer in ranks),
        outside_use=first(layer.outside_use for layer in ranks),
        facts=tuple(
            type(same[0]).of_ranks(same)
            for same in zip(*(layer.facts for layer in ranks), strict=True)
        ),
    )


def completed(profile: ModelProfile) -> ModelProfile:
    """The profile with facts that follow from all of it."""
    return replace(
        profile,
        layers=tuple(
            replace(layer, facts=tuple(facts.in_profile(profile) for facts in layer.facts))
            for layer in profile.layers
        ),
    )


def _in_backward_order(profile: ModelProfile) -> ModelProfile:
    """Layers by the moment of their last gradient, unused ones last; of equals the later first.

    An order that every rank saw in every step is also that of its medians, and of the ranks'
    maxima.
    """
    registered = enumerate(profile.layers)
    order = sorted(registered, key=lambda entry: (entry[1].ready_s, -entry[0]))
    return replace(profile, layers=tuple(layer for _, layer in order))
