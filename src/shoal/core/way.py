"""The way that serves a layer, as pins and plans write it."""

from __future__ import annotations


def strategy_and_exchange(way: str) -> tuple[str, str]:
    """Split a pin into the strategy and exchange of a `Choice`.

    "replicate:ring" is split at the colon. "column+bfloat16" is split before the plus.
    """
    strategy, colon, exchange = way.partition(":")
    strategy, plus, codec = strategy.partition("+")
    return strategy, plus + codec + colon + exchange if plus else exchange


def codec_first(exchange: str) -> str:
    """Put the codec of a layer in a pipeline before its ranks, as plans write it.

    Examples:
        >>> codec_first("2+bfloat16"), codec_first("0+1"), codec_first("0+1+bfloat16")
        ('+bfloat16:2', '0+1', '+bfloat16:0+1')
    """
    if exchange.startswith("+"):
        return exchange
    ranks, plus, last = exchange.rpartition("+")
    return f"+{last}:{ranks}" if plus and not last.isdecimal() else exchange


def ranks_in(rest: str) -> tuple[int, ...]:
    """Return the ranks that hold a layer of a pipeline, ascending; () if these are no ranks.

    Examples:
        >>> ranks_in("2"), ranks_in("0+1"), ranks_in("ring+int8")
        ((2,), (0, 1), ())
    """
    parts = rest.split("+")
    return tuple(sorted(map(int, parts))) if all(part.isdecimal() for part in parts) else ()


def bare_and_codec(exchange: str) -> tuple[str, str]:
    """Return the exchange of a plan without its codec, and the codec, or ''.

    Examples:
        >>> bare_and_codec("ring+int8"), bare_and_codec("+bfloat16:0+1"), bare_and_codec("0+1")
        (('ring', 'int8'), ('0+1', 'bfloat16'), ('0+1', ''))
    """
    codec, rest = rows_and_rest(exchange)
    if codec or ranks_in(rest):
        return rest, codec
    bare, _, codec = rest.partition("+")
    return bare, codec


def rows_and_rest(exchange: str) -> tuple[str, str]:
    """Split "+bfloat16:2" into the codec of rows and the rank that holds the layer.

    For any other exchange return '' and the exchange itself.
    """
    if not exchange.startswith("+"):
        return "", exchange
    codec, _, rest = exchange[1:].partition(":")
    return codec, rest
