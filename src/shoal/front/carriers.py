"""The exchanges and codecs that a caller asks for, in plan, pins or `codecs`: they are measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.codecs.coded_exchange import Coded, read_codec, read_exchange
from shoal.codecs.summed_terms import Summed
from shoal.contracts.codec import Codec
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.plan import Plan
from shoal.core.registry import named, of
from shoal.core.way import strategy_and_exchange
from shoal.strategies.carrier_terms import row_codec


def codecs_of(asked: Any) -> tuple[str, ...]:
    """Return the codecs that are asked for, as plans write them (PlanError for an unknown one)."""
    if asked == "all":
        return tuple(of(Codec))
    if asked is None:
        return ()
    if isinstance(asked, str | bytes) or not isinstance(asked, Iterable):
        texts: list[Any] = [None]
    else:
        texts = list(asked)
    if not all(isinstance(text, str) for text in texts):
        raise PlanError(
            "codecs is a list of names",
            got=repr(asked)[:200],
            expected="some of " + ", ".join(of(Codec)),
            do='write codecs=["bfloat16", "int8"], or codecs="all"',
        )
    return tuple(dict.fromkeys(str(read_codec(text)) for text in texts))


def exchanges_of(plan: Plan | None, pins: Mapping[str, str] | None) -> list[str]:
    """Return the exchanges that a plan or pins ask for, as plans write them.

    A coded exchange counts as the exchange that carries its codes.
    """
    return sorted(
        {str(e.exchange if isinstance(e, Coded | Summed) else e) for e in _exchanges(plan, pins)}
    )


def all_codecs(
    plan: Plan | None, pins: Mapping[str, str] | None, allowed: Sequence[str]
) -> list[str]:
    """Return the codecs that a plan or pins ask for, and the allowed ones."""
    codecs = [e.codec for e in _exchanges(plan, pins) if isinstance(e, Coded | Summed)]
    codecs += filter(None, (row_codec(exchange) for _, exchange in _ways(plan, pins)))
    codecs += map(read_codec, allowed)
    return sorted({str(way) for codec in codecs for way in (codec, codec.there)})


def _exchanges(plan: Plan | None, pins: Mapping[str, str] | None) -> list[Exchange]:
    asked = _ways(plan, pins)
    texts = {text for name, text in asked if text and named(Strategy, name).role.takes_exchange}
    return [read_exchange(text) for text in texts]


def _ways(plan: Plan | None, pins: Mapping[str, str] | None) -> list[tuple[str, str]]:
    """Return the strategies and exchanges that they ask for."""
    asked = [strategy_and_exchange(pin) for pin in (pins or {}).values()]
    return asked + [(c.strategy, c.exchange) for c in (plan.choices if plan else ())]
