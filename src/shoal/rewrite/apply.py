"""Puts a plan into a model, in place, and takes it out again.

    check     the plan fits this model and this many ranks, and has every layer once
    placed    the plan's sites, and where in the model each is
    align     every rank gets rank 0's parameters and buffers    (align.py; the caller does it)
    apply     site by site, in the plan's order, each strategy changes its layers and names its
              transfers
    release   the other way round: the layers are as they were before

Objects, names and parameters stay the same, both ways, and that is checked.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.modules import module as torch_modules

from shoal.codecs.coded_exchange import read_exchange
from shoal.contracts.exchange import Exchange
from shoal.contracts.period import Period
from shoal.contracts.probe import Layer
from shoal.contracts.strategy import Place, RowTraffic, Strategy
from shoal.contracts.transfer import Transfer
from shoal.contracts.ways import Ways
from shoal.core.buckets import Buckets
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.placement import check_placement
from shoal.core.plan import Choice, Plan, Site
from shoal.core.registry import named
from shoal.core.role import Role
from shoal.profiling.identity import ROOT, model_digest, trainable_layers
from shoal.profiling.usage import unable_before
from shoal.strategies.carrier_terms import (
    check_beside_holders,
    check_carried,
    check_holder,
    row_codec,
)


@dataclass(frozen=True)
class PlacedSite:
    """A site of a plan, and its place in the model."""

    site: Site
    place: Place
    label: str  # name in messages

    @property
    def strategy(self) -> Strategy:
        """The strategy that serves the site."""
        return named(Strategy, self.site.strategy)

    @property
    def exchange(self) -> Exchange | None:
        """The exchange that carries the site, if it needs one."""
        takes = self.strategy.role.takes_exchange and self.site.exchange
        return read_exchange(self.site.exchange) if takes else None


@dataclass(frozen=True)
class Rewritten:
    """Applied sites of a model, each with its transfers.

    The places have no layers and no tail, which would keep the model alive.
    """

    sites: tuple[tuple[PlacedSite, tuple[Transfer, ...]], ...]
    layers: Mapping[str, ref[nn.Module]]

    @property
    def transfers(self) -> list[Transfer]:
        """The transfers that an engine sends, in order."""
        return [transfer for _, transfers in self.sites for transfer in transfers]


def placed(
    model: nn.Module, plan: Plan, rank: int, servers: int = 0, buckets: Buckets | None = None
) -> list[PlacedSite]:
    """Return the plan's sites in order, each with its place in the model."""
    layers = {layer.name: layer for layer in trainable_layers(model)}
    in_model = Place(
        layers={},
        parameters={},
        rank=rank,
        ranks=plan.ranks,
        servers=servers,
        stale=plan.runs_ahead,
        buckets=buckets or Buckets(),
        owners=plan.owners({name: list(layer.parameters) for name, layer in layers.items()}),
    )
    roles = {name: named(Strategy, name).role for name in {c.strategy for c in plan.choices}}
    holders = {c.layer: c.holder for c in plan.choices if roles[c.strategy].names_ranks}
    ways = Ways(holders=holders, backward_hooks=backward_hooks(model))
    holding = _holders(model)
    periods = {every: Period(every) for every in plan.periods.values() if every > 1}

    def place(site: Site) -> Place:
        parameters = _parameters(site, layers)
        spans = _spans(site, parameters)
        return replace(
            in_model,
            layers={name: layers[name].module for name in site.layers},
            parameters={name: parameters[name] for name in spans or parameters},
            spans=spans,
            rows=RowTraffic(plan.chunks, row_codec(site.exchange)),
            period=periods.get(site.every),
            ways=replace(ways, sharing=_sharing(holding, site.layers, parameters)),
        )

    return [
        PlacedSite(site, place(site), label(number, site))
        for number, site in enumerate(sites(plan, layers))
    ]


def by_strategy(placed: PlacedSite) -> list[Transfer]:
    """Have a site's own strategy rewrite it."""
    return placed.strategy.apply(placed.place, placed.exchange, placed.label)


def apply(
    model: nn.Module,
    placed_sites: Sequence[PlacedSite],
    serve: Callable[[PlacedSite], Sequence[Transfer]] = by_strategy,
) -> Rewritten:
    """Rewrite the model, site by site. Every rank makes the same calls.

    The places have the ways that their strategies need: a channel where layers are cut, tables at
    servers, the end of the model on hosts of its own.

    Args:
        model: the module.
        placed_sites: the plan's sites, in order.
        serve: rewrites one site.
    """
    before = _identity(model)
    applied = [(_without_model(placed), tuple(serve(placed))) for placed in placed_sites]
    assert _identity(model) == before, "a strategy changed the model's names or parameters"
    layers = {name: ref(m) for placed in placed_sites for name, m in placed.place.layers.items()}
    return Rewritten(tuple(applied), layers)


def release(model: nn.Module, rewritten: Rewritten) -> None:
    """Undo `apply`, from the last site to the first. Every rank makes the same calls."""
    before, holding = _identity(model), _holders(model)
    for placed, transfers in reversed(rewritten.sites):
        names = placed.site.layers
        layers = {name: module for name in names if (module := rewritten.layers[name]())}
        sharing = _sharing(holding, names, placed.place.parameters)
        ways = replace(placed.place.ways, model=model, sharing=sharing)
        place = replace(placed.place, layers=layers, ways=ways)
        placed.strategy.release(place, transfers)
    assert _identity(model) == before, "a strategy changed the model's names or parameters"


def check_release(model: nn.Module, rewritten: Rewritten) -> None:
    """Refuse to undo a rewrite that must stay.

    Raises:
        UsageError: a strategy cannot be undone, or a layer is not the model's any more.
    """
    modules = set(model.modules())
    for name, module in rewritten.layers.items():
        if module() not in modules:
            raise UsageError(
                f"layer {name} is not the model's any more, so it cannot be undone",
                where=f"layer {name}",
                do="put back the layer that was there",
            )
    for placed, _ in rewritten.sites:
        if placed.strategy.stays:
            raise UsageError(
                f"{placed.site.strategy} cannot be undone: {placed.strategy.stays}",
                where=placed.label,
                do="save a checkpoint, and start again from it",
            )


def _without_model(placed_site: PlacedSite) -> PlacedSite:
    place = placed_site.place
    ways = replace(place.ways, tail=None, model=None, sharing={})
    return replace(placed_site, place=replace(place, layers={}, ways=ways))


def _holders(model: nn.Module) -> dict[int, dict[str, nn.Module]]:
    """Return the modules that hold each parameter, by its id and by their dotted names."""
    holders: dict[int, dict[str, nn.Module]] = defaultdict(dict)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            holders[id(parameter)][name or ROOT] = module
    return holders


def _sharing(
    holders: Mapping[int, Mapping[str, nn.Module]],
    layers: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
) -> dict[str, nn.Module]:
    """Return other modules that hold parameters of some layers, by dotted name."""
    return {
        name: module
        for parameter in parameters.values()
        for name, module in holders[id(parameter)].items()
        if name not in layers
    }


def _parameters(site: Site, layers: Mapping[str, Layer]) -> dict[str, nn.Parameter]:
    """Return the parameters of a site's layers, by dotted name."""
    own = (layers[name].parameters for name in site.layers)
    return {name: parameter for of_layer in own for name, parameter in of_layer.items()}


def _spans(site: Site, parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, int]]:
    """Return the (start, stop) of each parameter in a part of a layer; {} for a whole layer."""
    if site.parts == 1:
        return {}
    names = list(parameters)
    sizes = [parameter.numel() for parameter in parameters.values()]
    return {names[index]: (start, stop) for index, start, stop in site.spans(sizes)}


def check(plan: Plan, model: nn.Module, ranks: int, servers: int = 0, tail_hosts: int = 0) -> None:
    """Refuse a plan of another model or size, or one that does not name every layer once."""
    parameters = {layer.name: list(layer.parameters) for layer in trainable_layers(model)}
    layers = list(parameters)
    if plan.ranks != ranks:
        raise PlanError(
            "the plan is for another number of ranks",
            got=f"a plan for {plan.ranks} ranks",
            expected=f"one for {ranks}",
            do=_REPLAN,
        )
    names = [choice.layer for choice in plan.choices]
    for name in names:
        if name not in layers:
            near = difflib.get_close_matches(name, layers, n=3) or layers[:3]
            raise PlanError(
                "the plan names a layer that the model lacks",
                got=repr(name)[:200],
                expected=", ".join(near),
                do=_REPLAN,
            )
    missing = [name for name in layers if name not in names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if missing or twice:
        layers_listed = ", ".join(map(repr, (missing or twice)[:3]))
        problem = (
            f"leaves out {layers_listed}, which the model has"
            if missing
            else f"names {layers_listed} more than once"
        )
        raise PlanError(
            f"the plan {problem}",
            got=f"a plan of {len(names)} layers",
            expected=f"each of the model's {len(layers)} layers with trainable parameters, once",
            do=_REPLAN,
        )
    if plan.model != model_digest(model):
        raise PlanError(
            "the plan was made for another model: the layers' names agree, but not their shapes or "
            "types",
            got=f"a plan for model {plan.model[:12]}",
            expected=f"one for {model_digest(model)[:12]}",
            do=_REPLAN,
        )
    _check_holders(plan, tail_hosts)
    modules = {layer.name: layer.module for layer in trainable_layers(model)}
    for choice in plan.choices:
        strategy, module = named(Strategy, choice.strategy), modules[choice.layer]
        _check_serves(choice, unable_before(strategy, module, servers, tail_hosts=1))
        check_carried(choice.layer, choice.strategy, choice.exchange)
    check_placement(plan.placement, parameters, ranks, servers, stale=plan.runs_ahead)


def _check_holders(plan: Plan, tail_hosts: int) -> None:
    """Refuse a pipeline of some layers only on ranks that train, or a rank that does not exist."""
    ranked = [c for c in plan.choices if named(Strategy, c.strategy).role.names_ranks]
    is_apart = tail_hosts and all(choice.holder >= plan.ranks for choice in ranked)
    if ranked and len(ranked) < len(plan.choices) and not is_apart:
        raise PlanError(
            f"{ranked[0].strategy} serves all layers of a model, or none",
            got=f"{len(ranked)} of {len(plan.choices)} layers",
            do=_REPLAN,
        )
    for choice in ranked:
        check_holder(choice.layer, choice.strategy, choice.exchange, plan.ranks + tail_hosts)
    if ranked:
        beside = {choice.layer: choice.strategy for choice in plan.choices if choice not in ranked}
        check_beside_holders(beside)


def check_served(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Refuse a plan if a strategy cannot serve its layer, or does not exist."""
    placed = profile.with_owners(plan.owners(profile.names))
    for choice in plan.choices:
        strategy = named(Strategy, choice.strategy)
        check_carried(choice.layer, choice.strategy, choice.exchange)
        _check_serves(choice, strategy.refusal(placed.layer(choice.layer), cluster))
        for other, needed in strategy.needs(placed.layer(choice.layer)).items():
            if plan.choice(other).strategy != needed:
                raise PlanError(
                    f"{choice.strategy} serves layer {choice.layer} only beside {needed} for layer "
                    f"{other}",
                    got=f"{plan.choice(other).strategy} for layer {other}",
                    do="give both layers those two, or neither",
                )


def _check_serves(choice: Choice, reason: str | None) -> None:
    """Raise PlanError if there is a reason why a choice cannot serve its layer."""
    if reason:
        raise PlanError(
            f"{choice.strategy} cannot serve layer {choice.layer}: {reason}",
            do='give the layer "replicate", which serves everything that is not given to a rank',
        )


def sites(plan: Plan, layers: Mapping[str, Layer]) -> list[Site]:
    """Return the plan's sites for this model's layers."""
    nbytes = {
        name: sum(p.numel() * p.element_size() for p in layer.parameters.values())
        for name, layer in layers.items()
    }
    names = {choice.strategy for choice in plan.choices}
    roles = {name: named(Strategy, name).role for name in names}
    return list(plan.sites(nbytes, roles))


def cuts(plan: Plan) -> bool:
    """Return whether any layer is cut over the ranks."""
    return any(named(Strategy, choice.strategy).role.is_cut for choice in plan.choices)


def splits(plan: Plan) -> bool:
    """Return whether each rank has a part of the parameters or of the optimizer's state."""
    roles = {named(Strategy, choice.strategy).role for choice in plan.choices}
    return bool(roles & {Role.CUT, Role.PIPELINE}) or (Role.OWNED in roles and plan.in_step)


_REPLAN = 'make a new one: plan="auto", or `shoal plan RECIPE --save FILE`'


def label(number: int, site: Site) -> str:
    """Name a site for messages."""
    names = ", ".join(site.layers[:2]) + (
        f" and {len(site.layers) - 2} more" if len(site.layers) > 2 else ""
    )
    names += f", part {site.part + 1} of {site.parts}" if site.parts > 1 else ""
    return f"site {number} ({site.strategy}{' ' + site.exchange if site.exchange else ''}: {names})"


def backward_hooks(model: nn.Module) -> list[Mapping[int, Any]]:
    """Return the backward hooks of each module, as mappings that later hooks are added to."""
    of_all = (torch_modules._global_backward_hooks, torch_modules._global_backward_pre_hooks)
    own = [(m._backward_hooks, m._backward_pre_hooks) for m in model.modules()]
    return [hooks for pair in (of_all, *own) for hooks in pair]


def _identity(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
