"""The way that serves a layer, as pins and plans write it."""

from __future__ import annotations


def strategy_and_exchange(way: str) -> tuple[str, str]:
    """Split a pin into the strategy and exchange of a `Choice`.

    "replicate:ring" is split at the colon. "column+bfloat16" is split before the plus.
    """
    strategy, colon, exchange = way.partition(":")
    strategy, plus, codec = strategy.partition("+")
    return strategy, plus + codec + colon + exchange if plus else exchange


def rows_and_rest(exchange: str) -> tuple[str, str]:
    """Split "+bfloat16:2" into the codec of rows and the rank that holds the layer.

    For any other exchange return '' and the exchange itself.
    """
    if not exchange.startswith("+"):
        return "", exchange
    codec, _, rest = exchange[1:].partition(":")
    return codec, rest
