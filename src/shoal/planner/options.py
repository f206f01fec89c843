"""The options that a search has for each layer, without hopeless ones, and the meaning of pins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from shoal.codecs.coded_exchange import read_codec, read_exchange
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.facts import LayerProfile, Link
from shoal.core.names import matched
from shoal.core.plan import MICRO_BATCHES, Choice, Plan, Site
from shoal.core.registry import named, of
from shoal.core.way import rows_and_rest, strategy_and_exchange
from shoal.exchange.direct import Direct
from shoal.planner.timeline import Predictor
from shoal.profiling.usage import unable_before
from shoal.strategies.carrier_terms import check_carried, row_codec
from shoal.strategies.replicate import Replicate

Option = tuple[str, str]  # a strategy, and its own exchange or ''
PLAIN = Replicate.name
# least size of a layer or pair that is cut unasked: in bytes, and in seconds of the link
_LEAST_CUT_BYTES, _LEAST_CUT_S = 1 << 20, 0.02


def options_of(
    predictor: Predictor, allowed: Sequence[str], pinned: Mapping[str, Option], every_cut: bool
) -> dict[str, list[Option]]:
    """Return the choices for each layer as (strategy, its own exchange or ''), the plainest first.

    A layer that no allowed strategy serves by itself is replicated.
    """
    options: dict[str, list[Option]] = {}
    for layer in predictor.profile.layers:
        if layer.name in pinned:
            options[layer.name] = [pinned[layer.name]]
            continue
        names = sorted(
            (n for n in allowed if _reason(predictor, layer, n) is None), key=lambda n: n != PLAIN
        )
        # a strategy that needs a partner is added as a pair
        names = [name for name in names if not predictor.needs(layer.name, name)]
        if not every_cut:
            names = _worth_trying(predictor, layer, names)
        if not names and (refused := _reason(predictor, layer, PLAIN)) is not None:
            pairs_only = "it serves pairs only"
            reasons = {n: _reason(predictor, layer, n) or pairs_only for n in allowed}
            raise unserved_error(layer.name, {**reasons, PLAIN: refused})
        options[layer.name] = [(name, "") for name in names or [PLAIN]]
    return options


def with_pairs(
    predictor: Predictor,
    options: Mapping[str, list[Option]],
    allowed: Sequence[str],
    pinned: Mapping[str, Option],
    every: bool,
) -> tuple[dict[str, list[Option]], list[dict[str, Option]]]:
    """Return the options, and pairs that are worth trying.

    If no allowed strategy serves the layers of a pair by themselves, the pair is all they have.
    """
    alone = {
        name
        for name, ways in options.items()
        if PLAIN not in allowed and name not in pinned and ways == [(PLAIN, "")]
    }
    pairs = pairs_of(predictor, options, allowed, pinned, every=every or bool(alone))
    only: dict[str, list[Option]] = {}
    for pair in pairs:
        is_at_tail = any(predictor.role(way).is_at_tail for way, _ in pair.values())
        if pair.keys() <= alone - only.keys() and not is_at_tail:
            only |= {name: [way] for name, way in pair.items()}
    return {**options, **only}, pairs


def micro_batches_of(asked: int | None, strategies: Iterable[str]) -> int:
    """Return the number of parts that each rank's batch is cut into.

    Args:
        asked: the number that a caller asks for; None for the usual one.
        strategies: names of the strategies that serve layers.
    """
    if asked is not None:
        return asked
    return (
        1 if any(named(Strategy, name).role.names_ranks for name in strategies) else MICRO_BATCHES
    )


def check_able(
    modules: Mapping[str, nn.Module],
    pinned: Mapping[str, str],
    allowed: Sequence[str],
    servers: int,
    tail_hosts: int,
) -> None:
    """Refuse, before anything is measured, strategies that cannot serve a layer or a pinned layer.

    Args:
        modules: the module of each layer, by the layer's name.
        pinned: the strategies of layers that have one already.
        allowed: names of the strategies that may serve the other layers.
        servers: number of hosts that own parameters and do not train.
        tail_hosts: number of hosts that run the end of the model.

    Raises:
        PlanError: no strategy that may serve layers can serve one. The error says why.
    """
    free: dict[str, Mapping[str, str]] = {}  # reasons of layers without a pin
    for layer, module in modules.items():
        names = [pinned[layer]] if layer in pinned else allowed
        reasons = {
            name: unable_before(named(Strategy, name), module, servers, tail_hosts)
            for name in names
        }
        if layer not in pinned:
            free[layer] = reasons
        elif all(reasons.values()):
            raise _unable(layer, *reasons.popitem())
    if free and all(all(reasons.values()) for reasons in free.values()):
        raise unserved_error(*next(iter(free.items())))


def unserved_error(layer: str, reasons: Mapping[str, str]) -> PlanError:
    """Return the error of a layer that no listed strategy serves, with the reason of each."""
    return PlanError(
        f"no allowed strategy serves layer {layer}",
        got="; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
        do=f'add "{PLAIN}" to strategies, or leave strategies out',
    )


def _unable(layer: str, strategy: str, reason: str, able: Sequence[str] = ()) -> PlanError:
    if named(Strategy, strategy).role.names_ranks:
        return PlanError(
            f"the model cannot be given to ranks as a {strategy}: {reason}",
            do="leave the pin out: the planner finds a way for each layer",
        )
    other = " or ".join(able) or "another strategy"
    return PlanError(
        f"{strategy} cannot serve layer {layer}: {reason}",
        where=f"pin of {layer}",
        do=f"pin the layer to {other}, or leave it to the planner",
    )


def _reason(predictor: Predictor, layer: LayerProfile, strategy: str) -> str | None:
    """Return why a strategy does not serve a layer without a pin, or None."""
    return predictor.refusal(layer, strategy) or predictor.unasked(layer, strategy)


def _worth_trying(predictor: Predictor, layer: LayerProfile, names: Sequence[str]) -> list[str]:
    """Keep only the cheapest way to cut the layer, and only if it may be worth it.

    Cuts differ in their traffic. Traffic that the layer does not hide is waited for, and a cut
    saves at most the layer's cost in another strategy.
    """
    whole = [name for name in names if not predictor.role(name).is_cut]
    cuts = sorted(
        (n for n in names if n not in whole), key=lambda name: _seconds(predictor, layer, name)
    )
    if whole and cuts:
        least_s = min(_seconds(predictor, layer, name) for name in whole)
        is_small = layer.nbytes < least_cut_bytes(predictor.cluster.link)
        if is_small or _seconds(predictor, layer, cuts[0]) >= least_s:
            return whole
    return [*whole, *cuts[:1]]


def least_cut_bytes(link: Link) -> float:
    """Return the least bytes of a layer or pair to cut unasked: fewer on a slower link."""
    return min(_LEAST_CUT_BYTES, link.bytes_per_s * _LEAST_CUT_S)


def _seconds(predictor: Predictor, layer: LayerProfile, strategy: str) -> float:
    """Return the seconds that a strategy adds to a layer, if only the layer hides traffic."""
    cost = predictor.cost(Site((layer.name,), strategy, predictor.carriers(strategy)[0]))
    added_s = cost.alone_s + cost.forward_s + cost.backward_s - cost.beside_s
    return added_s + predictor.update_s(layer, cost.held + cost.update.host)


def pairs_of(
    predictor: Predictor,
    options: Mapping[str, Sequence[Option]],
    allowed: Sequence[str],
    pinned: Mapping[str, Option],
    every: bool,
) -> list[dict[str, Option]]:
    """Return pairs of layers that may be served only together, if that may be worth it."""
    pairs: list[dict[str, Option]] = []
    for layer in predictor.profile.layers:
        for name in allowed:
            if _reason(predictor, layer, name) is not None:
                continue
            needed = predictor.needs(layer.name, name)
            served = {layer.name: name, **needed}
            pair = {layer_name: (way, "") for layer_name, way in served.items()}
            if not needed or pair in pairs or pair.keys() & pinned.keys():
                continue
            layers = {layer_name: predictor.layer(layer_name) for layer_name in served}
            if any(
                way not in allowed or _reason(predictor, layers[layer_name], way)
                for layer_name, way in needed.items()
            ):
                continue
            if predictor.role(name).is_at_tail:
                pairs.append(pair)
                continue
            together_s = sum(_seconds(predictor, layers[n], way) for n, way in served.items())
            apart_s = sum(
                min(_seconds(predictor, layers[n], way) for way, _ in options[n]) for n in served
            )
            nbytes = sum(member.nbytes for member in layers.values())
            large = nbytes >= least_cut_bytes(predictor.cluster.link)
            if every or (large and together_s < apart_s):
                pairs.append(pair)
    return pairs


def add_needed(
    predictor: Predictor, pinned: Mapping[str, Option], named_layers: Collection[str]
) -> dict[str, Option]:
    """Return the pins, and the choices that follow for other layers.

    Args:
        predictor: the model's predictor.
        pinned: the pins by layer.
        named_layers: layers that a pin spells out. They win over layers that a glob matches.

    Raises:
        PlanError: the pins cannot be kept.
    """
    yielding = {
        other
        for name, (strategy, _) in pinned.items()
        if name in named_layers
        for other, needed in predictor.needs(name, strategy).items()
        if other in pinned and other not in named_layers and pinned[other][0] != needed
    }
    pinned = {name: option for name, option in pinned.items() if name not in yielding}
    complete = dict(pinned)
    for name, (strategy, exchange) in pinned.items():
        _check_pin(predictor, predictor.layer(name), strategy, exchange)
        for other, needed in predictor.needs(name, strategy).items():
            if other in pinned and pinned[other][0] != needed:
                raise PlanError(
                    f"{strategy} serves layer {name} only beside {needed} for layer {other}",
                    got=f"{pinned[other][0]} for layer {other}",
                    where=f"pins of {name} and {other}",
                    do="pin both layers to those two, or neither",
                )
            _check_pin(predictor, predictor.layer(other), needed, "")
            # all layers of a pair send their rows with one codec
            rows = Choice(name, strategy, exchange).rows if needed == strategy else ""
            complete.setdefault(other, (needed, rows))
    return complete


def _check_pin(predictor: Predictor, layer: LayerProfile, strategy: str, exchange: str) -> None:
    reason = predictor.refusal(layer, strategy)
    if predictor.role(strategy).runs_elsewhere:
        # the exchange says how tail hosts share the layer (plan_details.py), or names the rank
        # (holders.py)
        exchange = ""
    if exchange.startswith("+"):
        exchange = ""  # a codec of rows: carrier_terms.py
    if reason is None and exchange and not predictor.role(strategy).takes_exchange:
        reason = "it takes no exchange"
    if (
        reason is None
        and exchange
        and not predictor.strategy(strategy).takes(read_exchange(exchange))
    ):
        reason = f"{exchange} cannot carry it, but {', '.join(predictor.carriers(strategy))} can"
    if reason is not None:
        able = [
            name
            for name, kind in of(Strategy).items()
            if not kind.role.names_ranks and _reason(predictor, layer, name) is None
        ]
        raise _unable(layer.name, strategy, reason, able)


def known(strategies: Iterable[str] | None) -> tuple[str, ...]:
    """Return the strategies that may be used, by default all (PlanError for an unknown name)."""
    if strategies is None:
        return tuple(of(Strategy))
    listed = (
        []
        if isinstance(strategies, str) or not isinstance(strategies, Iterable)
        else list(strategies)
    )
    if not listed or not all(isinstance(name, str) for name in listed):
        raise PlanError(
            "strategies is a list of names, at least one",
            got=repr(strategies)[:200],
            do=f"write {[strategies] if isinstance(strategies, str) else ['replicate']}",
        )
    return tuple(named(Strategy, name).name for name in listed)


def resolve(pins: Mapping[str, str], names: Sequence[str]) -> dict[str, Option]:
    """Return pins by layer name, among `names`. A later pin wins over an earlier one."""
    resolved: dict[str, Option] = {}
    check_pins(pins)
    for pattern, value in pins.items():
        strategy, exchange = strategy_and_exchange(value)
        role = named(Strategy, strategy).role
        # put the rank first, because an exchange comes first
        if role.names_ranks and "+" in exchange[1:]:
            rank, _, codec = exchange.partition("+")
            exchange = f"+{codec}:{rank}"
        codec, rest = rows_and_rest(exchange)
        if codec:
            exchange = f"+{read_codec(codec)}" + (f":{rest}" if rest else "")
        elif exchange and not role.runs_elsewhere:
            exchange = str(read_exchange(exchange))
        layers = matched(pattern, names, "pin", "layer")
        if role.names_ranks and not rest:  # the planner finds the rank
            row_codec(exchange)
        elif exchange:
            check_carried(layers[0], strategy, exchange)
        resolved |= dict.fromkeys(layers, (strategy, exchange))
    return resolved


def with_pins(plan: Plan, pins: Mapping[str, str]) -> Plan:
    """Return a plan in which pinned layers are served by their pins.

    If a pin leaves out the exchange, another layer of the strategy gives it, or it is the simplest.
    """
    pinned = resolve(pins, [choice.layer for choice in plan.choices])
    known_ones = {choice.strategy: choice.exchange for choice in plan.choices}
    for layer, (strategy, exchange) in pinned.items():
        if not exchange and named(Strategy, strategy).role.takes_exchange:
            exchange = known_ones.get(strategy) or Direct.name
        plan = plan.with_choice(Choice(layer, strategy, exchange))
    return plan


def check_pins(pins: Any) -> None:
    """Raise PlanError for a value that is no mapping from layers to names of strategies."""
    form = 'write for instance pins={"classifier.*": "factor"}'
    if not isinstance(pins, Mapping):
        what = "pins is not a mapping from layers to strategies"
        raise PlanError(what, got=repr(pins)[:200], do=form)
    for pattern, value in pins.items():
        if not isinstance(pattern, str):
            what = "a pin is not by the name of a layer, or a glob"
            raise PlanError(what, got=repr(pattern)[:200], do=form)
        if not isinstance(value, str):
            what = f"the pin of {pattern!r} is not a strategy's name"
            raise PlanError(what, got=repr(value)[:200], do=form)


def common(names: Sequence[str], options: Mapping[str, Sequence[Option]]) -> list[Option]:
    """Return the options that all of these layers have."""
    return [
        option for option in options[names[0]] if all(option in options[name] for name in names)
    ]
