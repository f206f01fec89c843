"""Measures a model on a sample: each layer's size as a product, its times, the moments of its
gradients, and the facts that strategies ask for.

    1  watch     a warm-up step, in which probes see every call of forward  (contracts/probe.py)
    2  measure   some training steps: each rank's times are medians
    3  probe     each probe measures each layer
    4  agree     the profile is the maximum over ranks, the same on every rank
    5  state     find the state that forward changes and that ranks must agree on  (moving_state.py)

Every rank measures at the same time, so that cores which several ranks share are priced as training
will find them. The cost is some training steps, and the time of the probes: three steps of a slow
model, if they agree, and half a second of steps of a quick one. It leaves no trace: see
untraced_runs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from shoal.core.known_figures import KnownFigures
from shoal.core.registry import of
from shoal.core.terms import LossOfParts, Targets, Terms
from shoal.profiling.identity import (
    model_digest,
    require_same_model,
    tied_modules,
    trainable_layers,
)
from shoal.profiling.moving_state import Changes, Ways, left_local, moving
from shoal.profiling.optimizer import OptimizerCost
from shoal.profiling.products import rows_of, shape_of
from shoal.profiling.row_layers import rowwise
from shoal.profiling.sparse import is_sparse, rows_of_gradients
from shoal.profiling.steps import Watching, measured_step
from shoal.profiling.terms import Outputs, SampleTerms, agreed_terms, seen
from shoal.profiling.untraced_runs import without_traces
from shoal.profiling.usage import Readers, kind_of, outside_use
from shoal.profiling.weight_use import UNUSED, WeightUse, weight_uses

_CHECKING = "parallelize: trying the sample"
_UNLIKE = 1.5  # limit on a rank's seconds over the fastest rank's: a slower rank has other hardware


@dataclass(frozen=True)
class ProfileOptions:
    """Settings of a profile, the same on every rank."""

    # parts of a rank's batch in a pipeline; None: the planner may choose
    row_parts: int | None = None
    # probes that measure for strategies; None: all that any known strategy asks for
    probes: Iterable[type[Probe]] | None = None
    buffers: Ways = "agree"  # how changed buffers come to agree, as in `parallelize`
    compute_loss: ComputeLoss | None = None  # takes (model, batch) and returns a scalar
    counted: bool = False  # the training loop will say the terms of each batch's loss
    known: KnownFigures = field(default_factory=KnownFigures)  # figures of an earlier start


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
        model: any module; it runs in training mode, and is left unchanged.
        loss_fn: takes (output, y) and returns a scalar; None if there is a `compute_loss`, or
            the model returns its own loss.
        optimizers: the model's optimizers. Their step is measured on copies.
        sample: (x, y) with this rank's rows; x is a tensor, a tuple of positional or a dict of
            keyword arguments. With a `compute_loss`, a batch as this function takes it.
        comm: the ranks that measure together; with one rank nothing is exchanged.
        options: further things to measure, and settings.

    Returns:
        The profile, equal on all ranks, its layers in the order in which backward finishes them.

    Raises:
        SampleError: the model or the loss does not take the sample (on every rank, if it is so on
            any).
        RanksDiffer: the ranks have different models.
    """
    checked = _checked_sample(model, loss_fn, sample, comm, options)
    require_same_model(model, comm)
    layers = trainable_layers(model)
    asked = probes_of(of(Strategy).values()) if options.probes is None else options.probes
    probing = [kind() for kind in asked]
    with without_traces(checked, optimizers) as checked:
        _meet(comm)  # every rank has noted the random state, which threads share
        changes, outputs = Changes(model, checked.function), Outputs()
        watching = Watching(probing, changes, outputs)
        watched = (*layers, *tied_modules(model, layers))
        readers, step = measured_step(checked, watched, watching, comm, options.known)  # 1, 2
        trial = _trial(checked, layers, optimizers, comm.size, options, readers, step)
        on_this_rank = _profile_here(trial, readers, probing, comm)
        profiles = comm.gather_objects(on_this_rank, "measuring the model: profiles")
        moves = moving(checked, changes, comm, step.total_s, options.buffers)  # 5
        local = left_local(changes, comm, options.buffers)
        terms = _terms(checked, options, outputs, comm)
    _meet(comm)  # every rank has put the random state back
    agreed_on = agreed_terms(terms, of_batch=options.compute_loss is not None)
    profile = complete_profile(_in_backward_order(_maximum(_by_the_fastest(profiles))))  # 4
    return replace(profile, terms=agreed_on, moving=moves, local=local)


def _trial(
    sample: Sample,
    layers: tuple[Layer, ...],
    optimizers: Sequence[Optimizer],
    ranks: int,
    options: ProfileOptions,
    readers: Readers,
    step: MeasuredStep,
) -> Trial:
    """Return the context in which probes measure."""
    return Trial(
        sample,
        layers,
        tuple(optimizers),
        ranks,
        options.row_parts,
        step,
        frozenset(readers.read),
        options.known,
        tied_modules(sample.model, layers),
        readers.borrowed,
    )


def _checked_sample(
    model: nn.Module, loss_fn: LossFn | None, sample: Any, comm: Comm, options: ProfileOptions
) -> Sample:
    """Return the sample, if its form is right on every rank (SampleError)."""
    compute_loss = options.compute_loss
    return agreed(
        comm, lambda: Sample.of(model, loss_fn, sample, compute_loss), _CHECKING, SampleError
    )


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
    """Profile the model as this rank finds it, with the facts that each probe measures."""
    step, model = trial.step, trial.sample.model
    facts = [  # 3
        agreed(comm, _measuring(probe, trial), _CHECKING, SampleError) for probe in probes
    ]
    by_outputs = agreed(comm, lambda: trial.once(rowwise), _CHECKING, SampleError)
    uses = agreed(comm, lambda: weight_uses(trial), _CHECKING, SampleError)
    outside = outside_use(model, trial.layers, readers.borrowed, by_outputs, uses)
    update = trial.known.figure(
        "optimizer",
        OptimizerCost,
        lambda: OptimizerCost.of(trial.optimizers, rows_of_gradients(trial)),
    )
    return ModelProfile(
        layers=tuple(
            replace(
                layer_profile(layer, step, outside[layer.name], uses[layer.name]),
                may_vary=first(readers.decided.get(name, "") for name in _names(layer, trial)),
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


def _measuring(probe: Probe, trial: Trial) -> Callable[[], dict[str, Facts]]:
    """Return a function that lets a probe measure each layer, and returns the facts by name."""
    return lambda: {layer.name: probe.measure(layer, trial) for layer in trial.layers}


def _names(layer: Layer, trial: Trial) -> list[str]:
    """Return the names of a layer, and of the modules that use its parameters."""
    own = {id(parameter) for parameter in layer.parameters.values()}
    using = (
        tied.name
        for tied in trial.tied
        if any(id(parameter) in own for parameter in tied.module._parameters.values())
    )
    return [layer.name, *using]


def layer_profile(
    layer: Layer, step: MeasuredStep, outside: str, use: WeightUse = UNUSED
) -> LayerProfile:
    """Return the part of a layer's profile that a step measures for every layer alike.

    Args:
        layer: the layer.
        step: the measured step.
        outside: why its weight cannot be served through its own forward; '' if it can.
        use: the use that its forward makes of its weight.
    """
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


def _by_the_fastest(profiles: Sequence[ModelProfile]) -> Sequence[ModelProfile]:
    """Return the ranks' profiles, with the fastest rank's proportions among layers.

    If hosts are unlike, a slow one often has a processor quota: it sleeps for some milliseconds at
    a time inside one layer or another, which then looks ten times as long. A rank's total seconds
    of forward and of backward stay its own. If ranks are alike, nothing changes.
    """
    fastest = min(profiles, key=lambda profile: profile.forward_s + profile.backward_s)
    slowest = max(profiles, key=lambda profile: profile.forward_s + profile.backward_s)
    fastest_s, slowest_s = (p.forward_s + p.backward_s for p in (fastest, slowest))
    if slowest_s <= _UNLIKE * fastest_s or not (fastest.forward_s and fastest.backward_s):
        return profiles
    return [_in_proportions(fastest, profile) for profile in profiles]


def _in_proportions(like: ModelProfile, profile: ModelProfile) -> ModelProfile:
    """Return a rank's profile, with its seconds dealt to layers as in another rank's profile."""
    forward = profile.forward_s / like.forward_s
    backward = profile.backward_s / like.backward_s
    layers = tuple(
        replace(
            layer,
            needed_s=of_other.needed_s * forward,
            forward_s=of_other.forward_s * forward,
            backward_s=of_other.backward_s * backward,
            parameters=tuple(
                replace(parameter, ready_s=same.ready_s * backward)
                for parameter, same in zip(layer.parameters, of_other.parameters, strict=True)
            ),
        )
        for layer, of_other in zip(profile.layers, like.layers, strict=True)
    )
    return replace(profile, layers=layers)


def _maximum(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Merge the ranks' profiles: the largest of every number."""
    return ModelProfile(
        layers=tuple(
            maximum_layer(layers) for layers in zip(*(p.layers for p in profiles), strict=True)
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


def maximum_layer(ranks: Sequence[LayerProfile]) -> LayerProfile:
    """Merge one layer's profiles. Each kind of facts says how its ranks' facts are merged."""
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


def complete_profile(profile: ModelProfile) -> ModelProfile:
    """Return the profile with the facts that follow from all of it."""
    return replace(
        profile,
        layers=tuple(
            replace(layer, facts=tuple(facts.in_profile(profile) for facts in layer.facts))
            for layer in profile.layers
        ),
    )


def _in_backward_order(profile: ModelProfile) -> ModelProfile:
    """Order layers by the moment of their last gradient, with unused ones last.

    Of layers with equal moments, the later one comes first. If every rank saw the same order in
    every step, the medians and the maxima over ranks have it too.
    """
    registered = enumerate(profile.layers)
    order = sorted(registered, key=lambda entry: (entry[1].ready_s, -entry[0]))
    return replace(profile, layers=tuple(layer for _, layer in order))
