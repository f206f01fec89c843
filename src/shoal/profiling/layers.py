"""Measures a model on a sample: for each layer its size as a product, its times, and when its
gradients come.

Every rank measures at the same time, so that cores which several ranks share are priced as training
will find them; the profile is the maximum over ranks, the same on every rank. Costs some training
steps (of a slow model two, of a quick one half a second's) and leaves no trace: see untraced.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.core.errors import SampleError
from shoal.core.facts import LayerProfile, ModelProfile, ParameterProfile
from shoal.profiling.ends import Ends, ids_counted
from shoal.profiling.identity import Layer, model_digest, require_same_model, trainable_layers
from shoal.profiling.optimizer import OptimizerCost
from shoal.profiling.products import Product, ProductCost, measure_products
from shoal.profiling.rowwise import rowwise
from shoal.profiling.sample import LossFn, Sample
from shoal.profiling.tails import Tails, timed
from shoal.profiling.timeline import Clock, Step, Watched, usual, watch_step
from shoal.profiling.untraced import drop_gradients, untraced
from shoal.profiling.updates import whole_updates
from shoal.profiling.usage import Readers, kind_of, outside_use

_FEWEST, _MOST = 5, 200  # measured steps, after one to warm up
_TURN_S = 0.03  # in which ranks that share cores have all had their turns
_ENOUGH_S, _BUDGET_S = 2.0, 20.0  # for more than the fewest; for more than one


def profile_model(
    model: nn.Module,
    loss_fn: LossFn | None,
    optimizers: Sequence[Optimizer],
    sample: Any,
    comm: Comm,
    micro_batches: int | None = None,
) -> ModelProfile:
    """Measure a training step of the model on one batch, on all ranks at once.

    Args:
        model: any module; it is run in training mode and left as it was.
        loss_fn: takes (output, y) and returns a scalar; None where the model returns its own loss.
        optimizers: those of the model; their step is measured on copies.
        sample: (x, y) with this rank's rows; x is a tensor, a tuple of positional or a dict of
            keyword arguments.
        comm: the ranks that measure together; with one rank nothing is exchanged.
        micro_batches: that a batch is cut into, where the end of the model may run on hosts of its
            own.

    Returns:
        The profile, equal on all ranks, its layers in the order in which backward finishes them.

    Raises:
        SampleError: the model or the loss does not take the sample (on every rank, if it is so on
            any).
        RanksDiffer: the ranks have different models.
    """
    checked = agreed(comm, lambda: Sample.of(model, loss_fn, sample), SampleError)
    require_same_model(model, comm)
    layers = trainable_layers(model)
    clock = Clock(_device(layers))
    with untraced(checked):
        _meet(comm)  # every rank has noted the random state, which threads share
        by_rows = agreed(comm, lambda: rowwise(checked, layers, comm.size), SampleError)
        readers, distinct, seen, tails, step = _measured_step(
            checked, layers, by_rows, clock, comm, micro_batches
        )
        rows = {layer.name: _rows(layer.module, step.layers[layer.name]) for layer in layers}
        products = {layer.name: Product.of(layer.module, rows[layer.name]) for layer in layers}
        _meet(comm)
        costs = measure_products(
            {name: product for name, product in products.items() if product}, comm.size
        )
        known = sum(cost.page_faults for cost in costs.values())
        # at most: backward takes other memory too
        anew = min(1.0, step.page_faults / known) if known else 1.0
        _meet(comm)
        update = OptimizerCost.of(optimizers)
        outside = outside_use(model, layers, readers.borrowed, by_rows)
        together = whole_updates(model.parameters(), optimizers)
        fed_by = {taker: feeder for feeder, taker in seen.feeds.items()}
        mine = ModelProfile(
            layers=tuple(
                replace(
                    _layer_profile(
                        layer,
                        step,
                        rows[layer.name],
                        costs.get(layer.name, ProductCost()),
                        anew,
                        outside[layer.name],
                    ),
                    rowwise=by_rows[layer.name],
                    loss_rows=sum(use.loss_rows for use in seen.losses.get(layer.name, [])),
                    loss_calls=len(seen.losses.get(layer.name, [])),
                    softmax_rows=sum(use.softmax_rows for use in seen.losses.get(layer.name, [])),
                    feeds=seen.feeds.get(layer.name, ""),
                    fed_by=fed_by.get(layer.name, ""),
                    distinct=distinct.get(layer.name, 0),
                    whole_update=_first(
                        together[p].whole for p in layer.parameters.values() if p in together
                    ),
                    joint_update=_first(
                        together[p].joint for p in layer.parameters.values() if p in together
                    ),
                    unread=bool(layer.parameters.keys() & step.ready_s.keys() - readers.read),
                    tail=tails.found.get(layer.name),
                    no_tail=tails.reasons.get(layer.name, ""),
                )
                for layer in layers
            ),
            forward_s=step.forward_s,
            backward_s=step.backward_s,
            optimizer_s=update.seconds,
            state_bytes=update.state_bytes,
            digest=model_digest(model),
        )
        profiles = comm.gather_objects(mine)
    _meet(comm)  # every rank has put the random state back
    return timed(_in_backward_order(_maximum(profiles)))


def _meet(comm: Comm) -> None:
    """Go on when every rank is here, so that all measure the same thing at the same time."""
    comm.gather_objects(None)


def _measured_step(
    sample: Sample,
    layers: Sequence[Layer],
    by_rows: Mapping[str, bool],
    clock: Clock,
    comm: Comm,
    pieces: int | None,
) -> tuple[Readers, dict[str, int], Ends, Tails, Step]:
    """Warm up, finding borrowed weights, what goes into the loss, and the model's ends; then
    measure some steps in a row, as in training.

    Where ranks share cores, one step is long in forward and short in backward, and the next the
    other way round: so each rank's times are medians. In training all wait in every step for
    whoever is slowest in it, which is more than any rank takes in the median: the medians are
    stretched to that. Steps that are over before the kernel has given every rank its turn are taken
    by the dozen: one that was interrupted is ten times as long, and who waits lets others have the
    core.
    """
    parameters = list(sample.model.parameters())
    start = time.perf_counter()

    def warm_up() -> tuple[Readers, dict[str, int], Ends, Tails, Step]:
        with Readers(sample.model, layers).watching() as readers, ids_counted(layers) as distinct:
            sample.loss()
        tails = Tails.find(sample, layers, pieces) if pieces else Tails({}, {})
        return (
            readers,
            distinct,
            Ends.of(sample, layers, by_rows),
            tails,
            watch_step(sample, layers, clock),
        )

    def measure() -> Step:
        drop_gradients(parameters)
        return watch_step(sample, layers, clock)

    readers, distinct, seen, tails, first = agreed(comm, warm_up, SampleError)
    left_s = _BUDGET_S - (time.perf_counter() - start)
    steps = [measure()]
    each_s = min(step.total_s for step in (first, *steps))
    affordable = min(max(_FEWEST, int(_ENOUGH_S / each_s)), int(left_s / each_s), _MOST)
    count = max(1, min(comm.gather_objects(affordable)))
    steps += [measure() for _ in range(1, count)]
    drop_gradients(parameters)
    mine = usual(steps)
    ranks: list[list[float]] = comm.gather_objects(
        [mine.total_s, *(step.total_s for step in steps)]
    )
    usual_s = max(total_s for total_s, *_ in ranks)
    size = min(count, math.ceil(_TURN_S / usual_s))
    groups = [range(i, i + size) for i in range(0, count - size + 1, size)]
    slowest_s = median(
        max(sum(each[1 + i] for i in group) for each in ranks) / size for group in groups
    )
    return readers, distinct, seen, tails, mine.times(max(1.0, slowest_s / usual_s))


def _layer_profile(
    layer: Layer, step: Step, rows: int, product: ProductCost, anew: float, outside: str
) -> LayerProfile:
    """What was measured of a layer; of the memory of its gradient the part `anew` was new in every
    step.
    """
    watched = step.layers[layer.name]
    used = layer.parameters.keys() & step.ready_s.keys()
    if used and not watched.calls and not outside:
        outside = "its gradient comes without a call of the layer"
    inputs, outputs = _shape(layer.module)
    product_s = product.fixed_s + product.s_per_row * rows
    # as much for x's own
    others_s = product_s if watched.input_grad and isinstance(layer.module, nn.Linear) else 0.0
    # page faults take any time, but no more than was taken
    most_s = max(product_s, watched.backward_s - others_s)
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
            )
            for name, parameter in layer.parameters.items()
        ),
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        calls=watched.calls,
        calls_vary=watched.calls_vary,
        taken=watched.taken,
        input_grad=watched.input_grad,
        needed_s=watched.needed_s,
        forward_s=watched.forward_s,
        backward_s=watched.backward_s,
        activation_bytes=watched.activation_bytes,
        product_fixed_s=product.fixed_s,
        product_s_per_row=product.s_per_row,
        own_product_s=min(product_s + anew * product.anew_s, most_s),
        outside_use=outside,
    )


def _shape(module: nn.Module) -> tuple[int, int]:
    """M and N of the layer as a product, (0, 0) where it is none."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, _ConvNd):
        return module.weight.numel() // module.out_channels, module.out_channels
    return 0, 0


def _rows(module: nn.Module, watched: Watched) -> int:
    """K: what the layer puts out, counted in rows of N."""
    outputs = _shape(module)[1]
    return watched.elements // outputs if outputs else 0


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
        state_bytes=max(p.state_bytes for p in profiles),
        digest=profiles[0].digest,
    )


def _maximum_layer(layers: Sequence[LayerProfile]) -> LayerProfile:
    return replace(
        layers[0],
        parameters=tuple(
            replace(same[0], used=any(p.used for p in same), ready_s=max(p.ready_s for p in same))
            for same in zip(*(layer.parameters for layer in layers), strict=True)
        ),
        whole_update=_first(layer.whole_update for layer in layers),
        joint_update=_first(layer.joint_update for layer in layers),
        unread=any(layer.unread for layer in layers),
        outside_use=_first(layer.outside_use for layer in layers),
        rows=max(layer.rows for layer in layers),
        calls=max(layer.calls for layer in layers),
        calls_vary=any(layer.calls_vary or layer.calls != layers[0].calls for layer in layers),
        input_grad=any(layer.input_grad for layer in layers),
        taken=max(layer.taken for layer in layers),
        rowwise=all(layer.rowwise for layer in layers),
        distinct=max(layer.distinct for layer in layers),
        loss_rows=max(layer.loss_rows for layer in layers)
        if all(layer.loss_rows for layer in layers)
        else 0,
        loss_calls=max(layer.loss_calls for layer in layers),
        softmax_rows=max(layer.softmax_rows for layer in layers),
        feeds=_same(layer.feeds for layer in layers),
        fed_by=_same(layer.fed_by for layer in layers),
        needed_s=max(layer.needed_s for layer in layers),
        forward_s=max(layer.forward_s for layer in layers),
        backward_s=max(layer.backward_s for layer in layers),
        activation_bytes=max(layer.activation_bytes for layer in layers),
        product_fixed_s=max(layer.product_fixed_s for layer in layers),
        product_s_per_row=max(layer.product_s_per_row for layer in layers),
        own_product_s=max(layer.own_product_s for layer in layers),
    )


def _first(reasons: Iterable[str]) -> str:
    """The first reason that there is, or ''."""
    return next(filter(None, reasons), "")


def _same(names: Iterable[str]) -> str:
    """The name that every rank has, or ''."""
    every = set(names)
    return every.pop() if len(every) == 1 else ""


def _in_backward_order(profile: ModelProfile) -> ModelProfile:
    """Layers by the moment of their last gradient, unused ones last; what registers later comes
    sooner among equals.

    An order that every rank saw in every step is also that of its medians, and of the ranks'
    maxima.
    """
    registered = enumerate(profile.layers)
    order = sorted(registered, key=lambda entry: (entry[1].ready_s, -entry[0]))
    return replace(profile, layers=tuple(layer for _, layer in order))
