"""The planner's own plan against plans that pins make: none of those is predicted to be shorter.

Each counts what a search takes it for: cuts must gain something, and what the library's all-reduce
does not carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from made_up import cluster, layer, linear, measured, model

from shoal.contracts.strategy import Strategy
from shoal.core.cost import Pace, Price
from shoal.core.facts import Cluster, LayerProfile, ModelProfile
from shoal.core.plan import Plan
from shoal.core.registry import of
from shoal.planner.plan_details import plan_for
from shoal.planner.search import CUT_WORTH, OTHER_WORTH, search
from shoal.planner.simpler_plans import LEAD
from shoal.planner.timeline import Predictor
from shoal.strategies.cut_layers import CutFacts

ROWS = 6
SLICED, FACTOR, CUT = ("sliced",), ("factor",), ("column", "embedding")


def conv(name: str, inputs: int, outputs: int, size: int) -> LayerProfile:
    """Kernels of three by three on `ROWS` images of so many pixels a side."""
    made = layer(name, 0.0, 9 * inputs * outputs, rows=ROWS * size**2, inputs=9 * inputs)
    made = replace(made, outputs=outputs)
    return measured(made, CutFacts(ROWS * inputs * size**2, rowwise=True))


def whole(*layers: LayerProfile, compute_s: float) -> ModelProfile:
    """A model whose gradients come from the last layer to the first, at even distances."""
    forward_s, backward_s = compute_s / 3, compute_s * 2 / 3
    ordered = []
    for index, each in enumerate(reversed(layers)):
        part = (index + 1) / len(layers)
        ready = tuple(replace(p, ready_s=part * backward_s) for p in each.parameters)
        ordered.append(replace(each, parameters=ready, needed_s=(1 - part) * forward_s))
    return model(*ordered, forward_s=forward_s, backward_s=backward_s, optimizer_s=0.1 * compute_s)


def unet() -> ModelProfile:
    """Down and up again: none of its layers has a MiB."""
    widths, sizes = (16, 32, 64, 128), (32, 16, 8, 4)
    down = [
        conv(f"down.{i}.{half}", widths[i - 1] if half == "a" and i else width, width, size)
        for i, (width, size) in enumerate(zip(widths, sizes, strict=True))
        for half in "ab"
    ]
    up = [
        conv(f"up.{i}.{half}", widths[i] * (2 if half == "a" else 1), widths[i], sizes[i])
        for i in (2, 1, 0)
        for half in "ab"
    ]
    return whole(*down, *up, compute_s=0.14)


def transformer() -> ModelProfile:
    """Four blocks of norms and products."""
    width, rows = 144, 512
    blocks = [
        part
        for i in range(4)
        for part in (
            layer(f"block.{i}.norm", 0.0, 2 * width, kind="LayerNorm"),
            linear(f"block.{i}.qkv", 0.0, width, 3 * width, rows),
            linear(f"block.{i}.out", 0.0, width, width, rows),
            linear(f"block.{i}.wide", 0.0, width, 4 * width, rows),
            linear(f"block.{i}.back", 0.0, 4 * width, width, rows),
        )
    ]
    return whole(*blocks, linear("head", 0.0, width, 100, 8), compute_s=0.3)


def perceptron() -> ModelProfile:
    """Wide products of few rows behind small convolutions."""
    convs = [conv(f"conv.{i}", 32, 32, 16) for i in range(3)]
    products = [linear(f"fc.{i}", 0.0, 1024, 1024, 16, 1e-3) for i in range(3)]
    return whole(*convs, *products, compute_s=0.1)


MODELS = {"unet": unet, "transformer": transformer, "perceptron": perceptron}


def hosts(ranks: int, bytes_per_s: float) -> Cluster:
    """Hosts whose exchanges differ, as they do where they are measured."""
    made = cluster(ranks, bytes_per_s, latency_s=4e-4, cores=0.5, cpu=4e-9)
    slower = {"allreduce": 1.05, "direct": 1.15, "ring": 1.0, "tree": 1.2}
    paces = {
        name: Pace(Price(1e-3, times / bytes_per_s), Price(1e-4, 4e-9))
        for name, times in slower.items()
    }
    return replace(made, paces=paces)


def rivals(profile: ModelProfile, where: Cluster) -> Iterator[tuple[str, Plan]]:
    """All layers by one exchange; or what a strategy serves by it, of cuts the two largest."""
    predictor = Predictor(profile, where)
    plain = dict.fromkeys((each.name for each in profile.layers), "replicate")
    for exchange in ("allreduce", "tree", "ring"):
        yield exchange, plan_for(profile, where, pins={"*": f"replicate:{exchange}"})
    for ways in (SLICED, FACTOR, CUT):
        able = {
            each.name: way
            for each in sorted(profile.layers, key=lambda each: -each.nbytes)
            for way in ways
            if predictor.refusal(each, way) is None
        }
        pins = plain | dict(list(able.items())[: 2 if ways is CUT else None])
        yield ways[0], plan_for(profile, where, pins=pins)


def counted_s(plan: Plan, predictor: Predictor) -> float:
    """What the search takes the plan's step for."""
    roles = {choice.layer: of(Strategy)[choice.strategy].role for choice in plan.choices}
    other = sum(
        roles[choice.layer].takes_exchange and not predictor.native(choice.exchange)
        for choice in plan.choices
    )
    cut = any(role.is_cut for role in roles.values())
    worth = (1 + OTHER_WORTH * other / len(plan.choices)) * (1 + CUT_WORTH * cut)
    return plan.predicted_s * worth


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("ranks", "bytes_per_s"), [(4, 6e6), (8, 12e6), (2, 120e6)])
def test_no_plan_of_pins_is_predicted_to_be_shorter(
    name: str, ranks: int, bytes_per_s: float
) -> None:
    profile, where = MODELS[name](), hosts(ranks, bytes_per_s)
    predictor = Predictor(profile, where)
    best = search(profile, where)
    own_s = counted_s(best, predictor)
    for way, plan in rivals(profile, where):
        assert own_s <= 1.001 * counted_s(plan, predictor), way
    # a simpler plan may be taken, if it is nearly as fast
    assert (1 - LEAD) * plan_for(profile, where).predicted_s <= 1.001 * best.predicted_s


def test_layers_of_a_small_model_are_cut_where_the_link_is_slow() -> None:
    profile, where = unet(), hosts(4, 6e6)
    assert max(each.nbytes for each in profile.layers) < 1 << 20
    plan = plan_for(profile, where)
    cut = {choice.layer for choice in plan.choices if choice.strategy == "column"}
    assert cut == {"down.3.a", "down.3.b"}
    whole_s = plan_for(profile, where, strategies=["replicate", "sliced", "factor"]).predicted_s
    assert plan.predicted_s < 0.85 * whole_s
    fast = plan_for(profile, hosts(4, 1e9))
    assert not any(of(Strategy)[choice.strategy].role.is_cut for choice in fast.choices)
