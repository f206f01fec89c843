"""Checks that an exchange and the strategy it carries fit, and puts coded parameters first.

The checks run before anything else does. In a bucket, the parameters that a codec codes come first.
Small parameters (by their number of dimensions), complex ones and control follow, and travel
exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from shoal.codecs.coded_exchange import read_codec, read_exchange
from shoal.contracts.codec import Codec
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.facts import LayerProfile, ParameterProfile
from shoal.core.registry import named, of
from shoal.core.way import rows_and_rest


def check_carried(layer: str, name: str, exchange: str) -> None:
    """Raise PlanError if the strategy or the exchange is unknown, or if they do not fit.

    Args:
        layer: its dotted name.
        name: the strategy's name.
        exchange: as plans write it, "" for none.
    """
    strategy = named(Strategy, name)
    codec, rest = rows_and_rest(exchange)
    if codec:
        _check_rows(layer, strategy, exchange)
    if codec and not strategy.role.names_ranks:
        return
    if strategy.role.takes_exchange:
        if not strategy.takes(read_exchange(exchange)):
            raise PlanError(
                f"{exchange} cannot carry {name}",
                where=f"layer {layer}",
                expected="one of " + ", ".join(carriers(strategy)),
                do="change the layer's exchange",
            )
    elif strategy.role.names_ranks:
        if not rest.isdecimal():
            raise PlanError(
                f"{name} names the rank that holds the layer",
                where=f"layer {layer}",
                got=rest or "no rank",
                do=f'write for instance "{name}:0"',
            )
    elif exchange and not strategy.role.is_at_tail:
        raise PlanError(
            f"{name} takes no exchange",
            where=f"layer {layer}",
            got=exchange,
            do='leave its "exchange" empty',
        )


def check_holder(layer: str, name: str, exchange: str, ranks: int) -> None:
    """Raise PlanError if a layer of a pipeline names no rank, or one that there is not.

    Args:
        layer: its dotted name.
        name: the strategy's name.
        exchange: the rank, as plans write it.
        ranks: number of ranks.
    """
    check_carried(layer, name, exchange)
    if int(rank := rows_and_rest(exchange)[1]) >= ranks:
        raise PlanError(
            "the plan gives a layer to a rank that there is not",
            where=f"layer {layer}",
            got=f"rank {rank}",
            expected=f"one of the ranks 0 … {ranks - 1}",
            do="change the rank",
        )


def check_beside_holders(strategies: Mapping[str, str]) -> None:
    """Raise PlanError if a layer before those on hosts without rows is cut over ranks.

    Args:
        strategies: the strategy of each layer that is on no such host.
    """
    for layer, name in strategies.items():
        if named(Strategy, name).role.is_cut:
            raise PlanError(
                f"{name} does not serve layers beside those on hosts that bring no rows",
                where=f"layer {layer}",
                do='pin it to "replicate", "sliced" or "factor"',
            )


def _check_rows(layer: str, strategy: Strategy, exchange: str) -> None:
    if strategy.role.takes_exchange:
        first = carriers(strategy)[0]
        raise PlanError(
            f"{strategy.name} has an exchange, which stands before the codec",
            where=f"layer {layer}",
            got=strategy.name + exchange,
            do=f'write for instance "{strategy.name}:{first}{exchange}"',
        )
    if not strategy.codes_rows:
        able = [name for name, kind in of(Strategy).items() if kind.codes_rows]
        raise PlanError(
            f"{strategy.name} takes no codec",
            where=f"layer {layer}",
            got=strategy.name + exchange,
            expected="one whose rows may cross as codes: " + ", ".join(able),
            do=f'write "{strategy.name}"',
        )
    row_codec(exchange)


def row_codec(exchange: str) -> Codec | None:
    """Return the codec that a plan's exchange gives to rows, as "+bfloat16"; None if it has none.

    Raises:
        PlanError: no codec has this name, or its error in one step is too large for rows.
    """
    text, _ = rows_and_rest(exchange)
    if not text:
        return None
    codec = read_codec(text)
    if not codec.by_value:
        able = [name for name, kind in of(Codec).items() if kind.by_value]
        raise PlanError(
            f"{codec} cannot have the rows of a layer that is cut: what it loses of them is never "
            "sent",
            expected="one that codes each value by itself: " + ", ".join(able),
            do=f'write "+{able[0]}", or leave rows exact',
        )
    return codec


def carriers(strategy: Strategy) -> list[str]:
    """List the names of the exact exchanges that a strategy takes."""
    return [name for name, kind in of(Exchange).items() if kind.exact and strategy.takes(kind())]


def first_coded(
    parameters: Mapping[str, nn.Parameter], exchange: Exchange
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return a bucket's parameters in their order, and the first of them, which may be coded."""
    coded = {
        name: p
        for name, p in parameters.items()
        if _may_be_coded(p.dim(), not p.is_complex(), exchange)
    }
    return coded | dict(parameters), coded


def profiles_coded_first(
    layers: Iterable[LayerProfile], exchange: Exchange
) -> tuple[list[ParameterProfile], int]:
    """Return the profiles of a bucket's parameters in the same order, and how many may be coded."""
    parameters = [p for layer in layers for p in layer.parameters]
    coded = [p for p in parameters if _may_be_coded(len(p.shape), p.is_real, exchange)]
    others = [p for p in parameters if not _may_be_coded(len(p.shape), p.is_real, exchange)]
    return coded + others, len(coded)


def _may_be_coded(num_dims: int, is_real: bool, exchange: Exchange) -> bool:
    return num_dims >= exchange.least_dims and (is_real or exchange.exact)
