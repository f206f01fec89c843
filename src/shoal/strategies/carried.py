"""Whether a strategy takes the exchange that a plan or pin gives it: said before anything runs."""

from __future__ import annotations

from shoal.codecs.coded import exchange_named
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.registry import named, of


def check_carried(layer: str, name: str, exchange: str) -> None:
    """Raise PlanError where there is no such strategy or exchange, or they do not go together.

    Args:
        layer: its dotted name.
        name: of the strategy.
        exchange: as plans write it, "" for none.
    """
    strategy = named(Strategy, name)
    if strategy.role.takes_exchange:
        if not strategy.takes(exchange_named(exchange)):
            raise PlanError(
                f"{exchange} cannot carry {name}",
                where=f"layer {layer}",
                expected="one of " + ", ".join(carriers(strategy)),
                do="change the layer's exchange",
            )
    elif exchange and not strategy.role.is_at_tail:
        raise PlanError(
            f"{name} takes no exchange",
            where=f"layer {layer}",
            got=exchange,
            do='leave its "exchange" empty',
        )


def carriers(strategy: Strategy) -> list[str]:
    """Names of the exact exchanges that a strategy takes."""
    return [name for name, kind in of(Exchange).items() if kind.exact and strategy.takes(kind())]
