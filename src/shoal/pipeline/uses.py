"""Uses of layers by a model's forward, in its order, and the bytes that cross before each.

The planner deals layers to ranks by this. Layers that share a parameter are used as one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Self

from shoal.core.facts import Excerpt, Facts, LayerProfile, ModelProfile, first

NO_CUT = 1e15  # bytes that are said to cross where no cut can lie
_ALIKE = 0.75  # of the slowest rank's seconds: ranks that take turns on cores differ by less


@dataclass(frozen=True)
class UseFacts(Facts):
    """Uses of one layer, and of the layers that one rank must hold with it.

    Args:
        with_layer: the first of the layers that are held together, if that is another one: then
            it has their uses.
        numbers: the place of each use in the order of forward.
        before_bytes: of each use, the bytes that cross before it, of one rank's rows.
        inputs: of each use, the inputs of forward that it needs: their numbers and bytes.
        reason: the reason why the forward cannot be cut; '' if it can.
        after: the whole of forward, and of backward, as a multiple of the time until the last
            layer of each is through.
        paces: the seconds of each rank, as a part of those of the slowest one; () if ranks compute
            alike.
        backward_s: seconds of the model's whole backward.
    """

    with_layer: str = ""
    numbers: tuple[int, ...] = ()
    before_bytes: tuple[float, ...] = ()
    inputs: tuple[tuple[tuple[int, float], ...], ...] = ()
    reason: str = "its forward was not recorded"
    after: tuple[float, float] = (1.0, 1.0)
    paces: tuple[float, ...] = ()
    backward_s: float = 0.0

    @classmethod
    def of_ranks(cls, ranks: Sequence[Self]) -> Self:
        reason = first(facts.reason for facts in ranks)
        if not reason and len({facts.numbers for facts in ranks}) > 1:
            reason = "forward goes another way on other ranks"
        most = max(ranks, key=lambda facts: sum(facts.before_bytes))
        return replace(most, reason=reason)

    def in_profile(self, profile: ModelProfile) -> Self:
        forward_s = max(layer.needed_s + layer.forward_s for layer in profile.layers)
        backward_s = max(layer.ready_s for layer in profile.layers)
        after = (
            profile.forward_s / forward_s if forward_s else 1.0,
            profile.backward_s / backward_s if backward_s else 1.0,
        )
        slowest_s = max(profile.rank_s, default=0.0)
        paces = tuple(own_s / slowest_s for own_s in profile.rank_s) if slowest_s else ()
        paces = paces if min(paces, default=1.0) < _ALIKE else ()
        return replace(self, after=after, paces=paces, backward_s=profile.backward_s)

    def in_excerpt(self, layer: LayerProfile, excerpt: Excerpt) -> Self:
        return replace(
            self,
            before_bytes=tuple(
                nbytes if nbytes >= NO_CUT else nbytes * excerpt.rows
                for nbytes in self.before_bytes
            ),
            inputs=tuple(
                tuple((number, nbytes * excerpt.rows) for number, nbytes in own)
                for own in self.inputs
            ),
        )


@dataclass(frozen=True)
class LayerUse:
    """One use of layers that are held together.

    Args:
        layer: the first of these layers.
        forward_s: seconds from this use to the next in forward.
        backward_s: seconds of the same in backward.
        before_bytes: bytes that cross before it, of one rank's rows.
        inputs: the bytes of each input of forward that it needs, by the input's number.
        gradient_bytes: bytes of its layers' gradients, which each micro-batch adds to.
    """

    layer: str
    forward_s: float
    backward_s: float
    before_bytes: float
    inputs: Mapping[int, float]
    gradient_bytes: float = 0.0


def uses_of(layers: Sequence[LayerProfile], begin_s: float = 0.0) -> list[LayerUse]:
    """Return the uses of layers in the order of forward.

    The seconds between layers count for the layer before. Uses of layers with names that
    differ in numbers only, as those of alike blocks, take the mean of their seconds.

    Args:
        layers: the layers.
        begin_s: seconds of forward before the first use, which count for no layer.
    """
    groups: dict[str, list[LayerProfile]] = defaultdict(list)
    for layer in layers:
        groups[layer.measured(UseFacts).with_layer or layer.name].append(layer)
    uses = sorted(
        (
            _GroupUse(number, min(layer.needed_s for layer in members), name, at, members)
            for name, members in groups.items()
            for at, number in enumerate(_facts(name, members).numbers or (-1,))
        ),
        key=lambda use: (use.number, use.needed_s),
    )
    forward_s, backward_s = _forward_seconds(uses, layers, begin_s), _backward_seconds(uses, layers)
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, use in enumerate(uses):
        alike[use.kind].append(index)
    return [
        LayerUse(
            use.name,
            fmean(forward_s[other] for other in alike[use.kind]),
            fmean(backward_s[other] for other in alike[use.kind]),
            *use.crossing,
            sum(layer.nbytes for layer in use.layers),
        )
        for use in uses
    ]


@dataclass(frozen=True)
class _GroupUse:
    """One use of a group of layers: its place in forward, and its number among the group's."""

    number: int
    needed_s: float
    name: str
    at: int
    layers: Sequence[LayerProfile]

    @property
    def kind(self) -> tuple[Any, ...]:
        """The name without its numbers, and the shapes: alike layers have these in common."""
        shapes = [(layer.kind, [p.shape for p in layer.parameters]) for layer in self.layers]
        return re.sub(r"\d+", "#", self.name), self.at, str(shapes)

    @property
    def crossing(self) -> tuple[float, Mapping[int, float]]:
        """Bytes that cross before it, and the inputs that it needs."""
        facts = _facts(self.name, self.layers)
        known = bool(facts.numbers)
        return facts.before_bytes[self.at] if known else 0.0, dict(
            facts.inputs[self.at] if known else ()
        )

    @property
    def part(self) -> float:
        """The part of its layers' seconds, if each use takes as long."""
        return 1 / max(1, len(_facts(self.name, self.layers).numbers))


def _facts(name: str, layers: Sequence[LayerProfile]) -> UseFacts:
    return next((each for each in layers if each.name == name), layers[0]).measured(UseFacts)


def _forward_seconds(
    uses: Sequence[_GroupUse], layers: Sequence[LayerProfile], begin_s: float
) -> list[float]:
    """Return the seconds from each use to the next, the last to the end of forward."""
    begins, at_s = list[float](), begin_s
    for use in uses:
        needed = [layer.needed_s for layer in use.layers if layer.calls and not use.at]
        at_s = max([at_s, *needed[:1]]) if begins else begin_s
        begins.append(at_s)
        at_s += use.part * sum(layer.forward_s for layer in use.layers)
    after, _ = layers[0].measured(UseFacts).after
    end_s = max(layer.needed_s + layer.forward_s for layer in layers) * after
    return [max(0.0, end - begin) for begin, end in zip(begins, [*begins[1:], end_s], strict=True)]


def _backward_seconds(uses: Sequence[_GroupUse], layers: Sequence[LayerProfile]) -> list[float]:
    """Return the seconds of each use in backward, until its gradients are there."""
    ready, at_s = [0.0], 0.0
    for use in reversed(uses):
        own_s = use.part * sum(layer.backward_s for layer in use.layers)
        is_known = not use.at  # gradients of the first use come last
        at_s = max(at_s, max(layer.ready_s for layer in use.layers)) if is_known else at_s + own_s
        ready.append(at_s)
    _, after = layers[0].measured(UseFacts).after
    ready[-1] = max(ready[-1], max(layer.ready_s for layer in layers) * after)
    return [later - before for before, later in pairwise(ready)][::-1]
