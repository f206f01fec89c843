"""Finds modules that share one weight, such as a table and a head, and measures each use of it.

A plan knows such a weight by one layer: the first that holds it. A head with a bias is also a layer
of its own, for the bias. A strategy that serves the weight serves all uses at once, and needs the
cost of each. The measured step has these costs (profiling/layers.py). If a model shares a weight,
one more forward follows the outputs of heads to their losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

from shoal.contracts.probe import Layer, Probe, Trial
from shoal.core.facts import Excerpt, Facts, LayerProfile, Setting, first
from shoal.profiling.layers import layer_profile, maximum_layer
from shoal.profiling.products import ProductFacts, ProductProbe
from shoal.profiling.row_layers import rowwise
from shoal.profiling.usage import unlike
from shoal.strategies.cut_layers import CutFacts, CutProbe
from shoal.strategies.embedding import IdFacts, IdProbe
from shoal.strategies.head import LossFacts, LossProbe


@dataclass(frozen=True)
class TiedUse:
    """A module that uses a shared weight, as it was measured.

    Facts stand apart from the profile, so that a file keeps their kinds.
    """

    layer: LayerProfile
    cut: CutFacts
    product: ProductFacts
    ids: IdFacts
    losses: LossFacts

    @classmethod
    def of_ranks(cls, ranks: Sequence[TiedUse]) -> TiedUse:
        """Join the ranks' measurements into one."""
        return cls(
            maximum_layer([use.layer for use in ranks]),
            CutFacts.of_ranks([use.cut for use in ranks]),
            ProductFacts.of_ranks([use.product for use in ranks]),
            IdFacts.of_ranks([use.ids for use in ranks]),
            LossFacts.of_ranks([use.losses for use in ranks]),
        )

    def under(self, setting: Setting) -> LayerProfile:
        """Return the use as a layer with its facts, under a plan's setting of the weight."""
        facts = (self.cut, self.product, self.ids, self.losses)
        return replace(self.layer, setting=setting, facts=facts)


@dataclass(frozen=True)
class TiedFacts(Facts):
    """The uses of a weight that several modules share.

    Args:
        layers: the plan's layers among these modules, first the one with the weight.
        uses: the modules; none if the layer shares no weight.
    """

    layers: tuple[str, ...] = ()
    uses: tuple[TiedUse, ...] = ()

    @classmethod
    def of_ranks(cls, ranks: Sequence[Self]) -> Self:
        uses = zip(*(facts.uses for facts in ranks), strict=True)
        return cls(ranks[0].layers, tuple(TiedUse.of_ranks(same) for same in uses))

    def in_excerpt(self, layer: LayerProfile, excerpt: Excerpt) -> Self:
        return type(self)()  # an end of the model that is tied to the rest cannot go elsewhere


@final
class TiedProbe(Probe):
    """Measures each module that shares a weight with others."""

    def __init__(self) -> None:
        self._ids = IdProbe()

    def called(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        self._ids.called(layer, args, kwargs, output)

    def measure(self, layer: Layer, trial: Trial) -> TiedFacts:
        tie = trial.once(_ties).get(layer.name)
        if tie is None:
            return TiedFacts()
        uses = (self._use(member, tie, trial) for member in tie.members)
        return TiedFacts(tie.layers, tuple(uses))

    def _use(self, member: Layer, tie: _Tie, trial: Trial) -> TiedUse:
        profile = layer_profile(member, trial.step, tie.why(member))
        return TiedUse(
            replace(profile, parameters=(tie.weight,)),
            CutProbe().measure(member, tie.trial),
            ProductProbe().measure(member, trial),
            self._ids.measure(member, trial),
            LossProbe().measure(member, tie.trial),
        )


@dataclass(frozen=True)
class _Tie:
    """Modules that share parameters. The first layer of them has the weight.

    Args:
        trial: the trial, with these modules as all its layers.
        own: the plan's layers among them.
    """

    trial: Trial
    own: tuple[Layer, ...]

    @property
    def members(self) -> tuple[Layer, ...]:
        return self.trial.layers

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.own)

    @property
    def weight(self) -> Any:
        """Profile of the parameter that they share."""
        profile = layer_profile(self.own[0], self.trial.step, "")
        return next(
            (p for p in profile.parameters if p.name.rpartition(".")[2] == "weight"),
            profile.parameters[0],
        )

    def why(self, member: Layer) -> str:
        """Return why a member cannot be served through its own forward, or ''."""
        shared = self.own[0].module._parameters.get("weight")
        if shared is None or member.module._parameters.get("weight") is not shared:
            return f"{member.name} shares another parameter than its weight"
        borrowed = first(self.trial.borrowed.get(layer.name, "") for layer in self.own)
        return borrowed or unlike(member, rowwise=self.trial.once(rowwise)[member.name])


def _ties(trial: Trial) -> dict[str, _Tie]:
    """Return the tie of each layer that shares a parameter with another module."""
    modules = (*trial.layers, *trial.tied)
    holders = Counter(number for module in modules for number in _parameters(module))
    found: dict[str, _Tie] = {}
    for layer in trial.layers:
        shares = any(holders[id(parameter)] > 1 for parameter in layer.parameters.values())
        if shares and layer.name not in found:
            members = _sharing(layer, modules)
            own = tuple(member for member in members if member.parameters)
            tie = _Tie(replace(trial, layers=members, tied=(), _found={}), own)
            found |= dict.fromkeys(tie.layers, tie)
    return found


def _sharing(layer: Layer, modules: Iterable[Layer]) -> tuple[Layer, ...]:
    """Return the modules that share trainable parameters with a layer, and with one another."""
    known = set[int]()
    members: tuple[Layer, ...] = (layer,)
    while (more := {number for member in members for number in _parameters(member)}) != known:
        known = more
        members = tuple(module for module in modules if known & _parameters(module))
    return members


def _parameters(module: Layer) -> set[int]:
    own = module.module._parameters.values()
    return {id(parameter) for parameter in own if parameter is not None and parameter.requires_grad}
