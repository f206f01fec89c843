"""Tied: a weight that tables and heads share is cut by its rows: a table's words, a head's classes.

    forward     as `embedding` for each table, and as `head` for each head
    backward    the same way back; the rows of tables and the products of heads add up to the
                gradient of the part

A table and a head cut the one weight alike, along the vocabulary, so that one part serves both.
Uncut, a rank sends 2·V·D·s·(P−1)/P for its gradient, because a head makes that dense. Here it stays
where it is, and weight, gradient, update and optimizer state are divided by P. The bias of a head
is a layer of its own, and is cut with the weight.

Reference: Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017; Shoeybi et
al., "Megatron-LM", 2019, section 3 (a parallel embedding and its head).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import final

from torch import nn

from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Transfer
from shoal.core.cost import Cost, Phase, Update, total
from shoal.core.facts import Cluster, LayerProfile
from shoal.core.pieces import cut_sizes
from shoal.core.role import Role
from shoal.profiling.products import ProductFacts
from shoal.profiling.updates import UpdateFacts, UpdateProbe
from shoal.strategies.cut_layers import run_cut, run_whole
from shoal.strategies.embedding import EmbeddingRows, look_up_parts, run_by_itself
from shoal.strategies.head import Head
from shoal.strategies.tied_uses import TiedFacts, TiedProbe
from shoal.tensors.cut import cut, is_cut, restore
from shoal.tensors.sharded_parameter import OverRanks

_TABLES = ("Embedding", "EmbeddingBag")


@final
class Tied(Strategy):
    """Cuts a weight that several modules share: tables, and heads with an output for a loss."""

    name = "tied"
    role = Role.CUT
    probes = (TiedProbe, UpdateProbe)

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        facts = layer.measured(TiedFacts)
        if not facts.uses:
            return "no other module has its weight"
        if why := layer.measured(UpdateFacts).whole:
            return why
        for use in facts.uses:
            of_use = use.under(layer.setting)
            if reason := _way_of(of_use).refuses(of_use, cluster):
                return f"{of_use.name} ({of_use.kind}), which shares its weight: {reason}"
        return None

    def needs(self, layer: LayerProfile) -> dict[str, str]:
        layers = layer.measured(TiedFacts).layers
        return {name: self.name for name in layers if name != layer.name}

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        (layer,) = layers
        facts = layer.measured(TiedFacts)
        first, *_ = cut_sizes(facts.uses[0].layer.parameters[0].shape[0], cluster.size)
        part = first / facts.uses[0].layer.parameters[0].shape[0]
        cost = Cost(memory_bytes=part * layer.nbytes, held=part, update=Update(main=part))
        if layer.name != facts.layers[0]:
            return cost  # a bias is added to rows that are already there
        uses = [use.under(layer.setting) for use in facts.uses]
        costs = [_way_of(use).estimate([use], exchange, cluster) for use in uses]
        dense_s = sum(_dense_s(use) for use in uses)
        return replace(
            cost,
            in_forward=_join_phases(each.in_forward for each in costs),
            in_backward=_join_phases(each.in_backward for each in costs),
            forward_s=sum(each.forward_s for each in costs),
            backward_s=sum(each.backward_s for each in costs) + part * dense_s,
        )

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        modules = _modules(place)
        for holder in modules.values():
            if not isinstance(holder, nn.Linear | nn.Embedding | nn.EmbeddingBag):
                raise TypeError(f"{label}: cannot cut {type(holder)}")
        for own_name, parameter in {**place.parameters, **_frozen(modules)}.items():
            assert place.comm is not None
            sizes = cut_sizes(len(parameter), place.ranks)
            cut(
                parameter,
                OverRanks(own_name, parameter, 0, sizes, place.comm, place.weighs),
            )
        for holder_name, holder in modules.items():
            if isinstance(holder, nn.Linear):
                run_cut(holder_name, Head(), holder, place)
            elif isinstance(holder, nn.Embedding | nn.EmbeddingBag):
                look_up_parts(holder_name, holder, place, by_autograd=True)
        return []

    def release(self, place: Place, transfers: Sequence[Transfer]) -> None:
        modules = _modules(place)
        for holder in modules.values():
            if isinstance(holder, nn.Linear):
                run_whole(holder)
            else:
                run_by_itself(holder)
        for parameter in (*place.parameters.values(), *_frozen(modules).values()):
            if is_cut(parameter):
                restore(parameter)


def _way_of(use: LayerProfile) -> Strategy:
    """Return the strategy that would serve a use if the weight were not shared."""
    return EmbeddingRows() if use.kind in _TABLES else Head()


def _dense_s(use: LayerProfile) -> float:
    """Return the seconds of a table's dense gradient; a table that shares no weight makes none."""
    product = use.measured(ProductFacts)
    if use.kind not in _TABLES:
        return 0.0
    return max(0.0, product.own_s - product.s_per_row * use.rows)


def _join_phases(phases: Iterable[Phase | None]) -> Phase | None:
    """Return one phase with the traffic of several, one after the other."""
    found = [phase for phase in phases if phase is not None]
    if not found:
        return None
    beside_s = sum(phase.beside_s for phase in found)
    return replace(found[0], traffic=total(p.traffic for p in found), beside_s=beside_s)


def _modules(place: Place) -> dict[str, nn.Module]:
    """Return the modules that run on a site's weight; none if the site is only a bias."""
    (module,) = place.layers.values()
    if all(parameter is not module.weight for parameter in place.parameters.values()):
        return {}
    return {**place.layers, **place.ways.sharing}


def _frozen(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return the biases that are not trained, so that no layer has them."""
    found = {name: module._parameters.get("bias") for name, module in modules.items()}
    return {
        f"{name}.bias": bias
        for name, bias in found.items()
        if bias is not None and not bias.requires_grad
    }
