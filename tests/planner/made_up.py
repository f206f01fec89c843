"""Profiles and clusters made of round numbers."""

from __future__ import annotations

from dataclasses import replace

from shoal.core.facts import (
    Cluster,
    Facts,
    LayerProfile,
    Link,
    ModelProfile,
    ParameterProfile,
    Topology,
)
from shoal.profiling.products import ProductFacts
from shoal.strategies.cut_layers import CutFacts


def layer(
    name: str, ready_s: float, numel: int, kind: str = "Conv2d", **sizes: float
) -> LayerProfile:
    """A layer of one float32 weight whose gradient comes at `ready_s`."""
    weight = ParameterProfile(f"{name}.weight", (numel,), numel, 4, used=True, ready_s=ready_s)
    return LayerProfile(name, kind, (weight,), **sizes)  # type: ignore[arg-type]


def linear(
    name: str, ready_s: float, inputs: int, outputs: int, rows: int, product_s: float = 0.0
) -> LayerProfile:
    """An nn.Linear whose weight's product over its own rows takes `product_s`, all of it growing
    with rows.
    """
    made = layer(
        name,
        ready_s,
        inputs * outputs,
        "Linear",
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        backward_s=2 * product_s,
    )
    return measured(
        made,
        CutFacts(input_elements=rows * inputs, rowwise=True),
        ProductFacts(s_per_row=product_s / rows, own_s=product_s),
    )


def measured(layer: LayerProfile, *facts: Facts) -> LayerProfile:
    """The layer with these facts in place of its own of their kinds."""
    kept = [own for own in layer.facts if type(own) not in map(type, facts)]
    return replace(layer, facts=(*kept, *facts))


def model(
    *layers: LayerProfile, forward_s: float = 1.0, backward_s: float = 2.0, optimizer_s: float = 0.5
) -> ModelProfile:
    """A model of these layers."""
    return ModelProfile(layers, forward_s, backward_s, optimizer_s, digest="made up")


def cluster(
    ranks: int, bytes_per_s: float, latency_s: float = 0.0, cores: float = 2.0, cpu: float = 0.0
) -> Cluster:
    """Ranks on hosts of their own."""
    hosts = tuple(f"h{rank}" for rank in range(ranks))
    return Cluster(Topology(hosts), Link(latency_s, bytes_per_s, cpu), cores)
