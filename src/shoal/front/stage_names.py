"""Reads "stage", an older name: hosts that bring no rows run the end of the model.

A pipeline does that today, with layers on these hosts. A pin of one layer still stands for this
layer and all layers after it in the same module. Older plans may name a way by which such hosts
share a layer, as "stage:column": then each of them holds some of the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from shoal.contracts.feature import PlanFacts
from shoal.core.errors import PlanError
from shoal.core.names import matched
from shoal.core.plan import Choice, Plan
from shoal.core.way import rows_and_rest, strategy_and_exchange
from shoal.front.options import Options
from shoal.planner.holders import in_runs
from shoal.planner.options import STAGE, STAGE_NOW
from shoal.profiling.identity import trainable_layers
from shoal.strategies.replicate import Replicate

_READ = f'"{STAGE}" is an older name, and is read as "{STAGE_NOW}" on hosts that bring no rows'
_SHARED = "they share no layer: each holds some of the layers"


def with_pipeline(options: Options, model: nn.Module, facts: PlanFacts) -> tuple[Options, str]:
    """Return options that name a pipeline in place of a stage, and a line for the log.

    Args:
        options: the options that are asked for.
        model: the model.
        facts: facts with the number of hosts that bring no rows.

    Raises:
        PlanError: there are no such hosts.
    """
    said = ""
    if options.strategies is not None and STAGE in options.strategies:
        named = [name for name in options.strategies if name != STAGE]
        if not named and not facts.tail_hosts:
            raise _no_hosts("strategies")
        more = [STAGE_NOW] if facts.tail_hosts else []
        both = [*(named or [Replicate.name]), *more]
        options, said = replace(options, strategies=tuple(dict.fromkeys(both))), _READ
    if options.pins and any(map(_is_stage, options.pins.values())):
        pins, said = _pins(options.pins, model, facts)
        options = replace(options, pins=pins)
    return options, said


def plan_with_pipeline(plan: Plan, model: nn.Module, facts: PlanFacts) -> tuple[Plan, str]:
    """Return a plan with a pipeline in place of a stage, and a line for the log.

    Args:
        plan: a plan.
        model: the model.
        facts: facts with the number of hosts that bring no rows.

    Raises:
        PlanError: there are no such hosts.
    """
    at_end = {c.layer: c for c in plan.choices if c.strategy == STAGE}
    if not at_end:
        return plan, ""
    ranks = _ranks(list(at_end), model, facts, plan.ranks)
    for layer, choice in at_end.items():
        before = f"{choice.rows}:" if choice.rows else ""
        plan = plan.with_choice(Choice(layer, STAGE_NOW, f"{before}{ranks[layer]}"))
    return plan, _line(ranks, (choice.exchange for choice in at_end.values()))


def _is_stage(pin: Any) -> bool:
    return isinstance(pin, str) and strategy_and_exchange(pin)[0] == STAGE


def _pins(
    pins: Mapping[str, str], model: nn.Module, facts: PlanFacts
) -> tuple[dict[str, str], str]:
    """Return the pin of each layer, and a line for the log."""
    names = [layer.name for layer in trainable_layers(model)]
    ways: dict[str, str] = {}
    for pattern, pin in pins.items():
        ways |= dict.fromkeys(matched(pattern, names, "pin", "layer"), pin)
    staged = [name for name in names if _is_stage(ways.get(name))]
    for name in staged:
        inside = name.rpartition(".")[0]
        for later in names[names.index(name) :]:
            if not inside or later.startswith(f"{inside}."):
                ways.setdefault(later, ways[name])
    staged = [name for name in names if _is_stage(ways.get(name))]
    if not staged:  # later pins have won
        return ways, ""
    ranks = _ranks(staged, model, facts, facts.topology.size)
    exchanges = {name: strategy_and_exchange(ways[name])[1] for name in staged}
    is_dealt = facts.tail_hosts > 1 and len(staged) < len(names)  # the planner knows seconds
    for name in staged:
        codec, _ = rows_and_rest(exchanges[name])
        rank = "" if is_dealt else f":{ranks[name]}"
        ways[name] = f"{STAGE_NOW}{f'+{codec}' if codec else ''}{rank}"
    return ways, _line({} if is_dealt else ranks, exchanges.values())


def _ranks(layers: Sequence[str], model: nn.Module, facts: PlanFacts, first: int) -> dict[str, int]:
    """Return the host of each layer, as its rank: runs of layers with about as many bytes."""
    if not facts.tail_hosts:
        raise _no_hosts(f"layer {layers[0]}")
    own = [layer for layer in trainable_layers(model) if layer.name in layers]
    sizes = [sum(p.nbytes for p in layer.parameters.values()) for layer in own]
    hosts = min(facts.tail_hosts, len(own))
    (runs,) = in_runs([(float(size), 0.0) for size in sizes], [1.0] * hosts, [1.0])
    return {layer.name: first + run for layer, run in zip(own, runs, strict=True)}


def _line(ranks: Mapping[str, int], exchanges: Any) -> str:
    """Return the line for the log."""
    where = ", ".join(f"{layer} on rank {rank}" for layer, rank in ranks.items())
    is_shared = any(rows_and_rest(exchange)[1] for exchange in exchanges)
    return ". ".join([_READ + (f": {where}" if where else ""), *([_SHARED] if is_shared else [])])


def _no_hosts(where: str) -> PlanError:
    return PlanError(
        "there are no hosts that could run the end of the model",
        where=where,
        got=f'"{STAGE}"',
        do=f'start some (shoal lab --tail, or SHOAL_TAIL beside torchrun), or leave "{STAGE}" out',
    )
