"""Prices plans in samples: a lossy way that learns later must gain more than it learns later.

    time to a loss   =   predicted step   ×   samples, as a multiple of exact steps'

A plan has the highest price of its codecs: only whole models were measured. Local steps have a
price of their own. Prices are data with a source: `Codec.learning`, and `_LOCAL` here.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.codecs.coded_exchange import Coded, read_codec, read_exchange
from shoal.codecs.summed_terms import Summed
from shoal.contracts.learning import UNMEASURED, LearningPrice
from shoal.core.plan import Choice, Plan
from shoal.core.way import rows_and_rest

_LOCAL_SOURCE = "docs/lab/local.md, text from random weights, H = 16"
_WARM_SOURCE = "docs/lab/local.md, text, a quarter of the steps exact first, H = 16"
# rounds in `sparse_bits` without exact steps before them
_COLD_SPARSE_BITS = LearningPrice(5.78, "docs/lab/race.md, text from random weights, one seed")
# price of local steps by outer rule: from random weights, and after exact steps
_LOCAL: dict[str, tuple[float, float]] = {
    "average": (1.36, 1.22),
    "bmuf": (1.48, 1.48),  # not measured after exact steps: the dearer figure stands
    "nesterov": (1.37, 1.0),
    "slowmo": (1.37, 1.0),
}


def price_of(plan: Plan) -> LearningPrice:
    """Return the samples that a run under a plan needs, as a multiple of an exact run's.

    Args:
        plan: a plan, with codecs and local steps or without.

    Examples:
        >>> from shoal.core.plan import Choice, Plan
        >>> from shoal.planner.learning import price_of
        >>> choices = (Choice("fc", "sliced", "direct+top_k"), Choice("norm", "sliced", "direct"))
        >>> price_of(Plan(2, "", choices, bucket_bytes=1 << 20, lanes=3)).times
        1.4
    """
    dearest = max(_prices(plan), key=lambda price: price.times, default=UNMEASURED)
    if not plan.is_local:
        return dearest
    assert plan.outer is not None
    first = bool(plan.outer.warmup_steps)
    cold, warm = _LOCAL[plan.outer.rule]
    is_measured = first and warm != cold
    local = LearningPrice(warm if first else cold, _WARM_SOURCE if is_measured else _LOCAL_SOURCE)
    if not first and any("sparse_bits" in choice.exchange for choice in plan.choices):
        dearest = _COLD_SPARSE_BITS
    return max(local, dearest, key=lambda price: price.times)


def seconds_to_a_loss(plan: Plan) -> float:
    """Return the predicted step, multiplied by the plan's price in samples.

    Exact steps reach some loss in so many seconds for each of their steps.
    """
    return plan.predicted_s * price_of(plan).times


def learning_line(plan: Plan) -> tuple[str, ...]:
    """Return the line that a report shows about a lossy plan's price; none if it is exact."""
    if not plan.is_local and not any(choice.codec for choice in plan.choices):
        return ()
    price = price_of(plan)
    if not price.source:
        return ("learning: nobody has measured how many samples these codecs need for a loss",)
    if price.is_near:
        return (f"learning: as many samples for a loss as exact steps ({price.source})",)
    as_exact = f"{1e3 * seconds_to_a_loss(plan):.1f} ms"
    return (
        f"learning: {price.times:g} times the samples for a loss ({price.source}); so this step "
        f"is worth an exact one of {as_exact}",
    )


def _prices(plan: Plan) -> Iterator[LearningPrice]:
    for way in dict.fromkeys((choice.strategy, choice.exchange) for choice in plan.choices):
        choice = Choice("", *way)
        if choice.codec:
            yield _price(choice)


def _price(choice: Choice) -> LearningPrice:
    """Return the price of a choice with a codec."""
    codec, _ = rows_and_rest(choice.exchange)
    if codec:
        return read_codec(codec).learning
    exchange = read_exchange(choice.exchange)
    if isinstance(exchange, Summed):
        return exchange.codec.learning_added
    assert isinstance(exchange, Coded)
    return exchange.codec.learning
