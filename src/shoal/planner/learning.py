"""Prices plans in samples: a lossy way that learns later must gain more than it learns later.

    time to a loss   =   predicted step   ×   samples, as a multiple of exact steps'

A plan has the highest price of its codecs: only whole models were measured. Local steps have
prices of their own. Prices are data with a source: `Codec.learning`, and local_prices.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.codecs.coded_exchange import Coded, read_codec, read_exchange
from shoal.codecs.summed_terms import Summed
from shoal.contracts.learning import UNMEASURED, LearningPrice
from shoal.core.plan import Choice, Plan
from shoal.core.way import rows_and_rest
from shoal.planner.local_prices import local_price


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
    if not plan.is_local:
        return max(_prices(plan), key=_times, default=UNMEASURED)
    codecs = dict.fromkeys(choice.codec for choice in plan.choices)
    exact = local_price(plan)
    assert exact is not None  # every rule was measured with rounds that are exact
    found = [local_price(plan, codec) or max(exact, _of(codec), key=_times) for codec in codecs]
    return max(found, key=_times, default=exact)


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
        f"learning: {price.times:.3g} times the samples for a loss ({price.source}); so this step "
        f"is worth an exact one of {as_exact}",
    )


def product_line(plan: Plan, exact_s: float, alone_s: float) -> tuple[str, ...]:
    """Return the line about a lossy plan's time to a loss; none if the plan is exact.

    Args:
        plan: a plan with its predicted step.
        exact_s: the predicted step of exact data parallelism.
        alone_s: the step of a rank that sends nothing.
    """
    if not learning_line(plan) or not exact_s or not alone_s:
        return ()
    product_s = seconds_to_a_loss(plan)
    return (
        f"time to a loss: {1e3 * plan.predicted_s:.1f} ms for a step, {1e3 * product_s:.1f} ms "
        f"for each exact step; that is {product_s / exact_s:.2g} of data parallel steps of "
        f"{1e3 * exact_s:.1f} ms, and {product_s / alone_s:.2f} times {1e3 * alone_s:.1f} ms with "
        "nothing sent",
    )


def _times(price: LearningPrice) -> float:
    return price.times


def _of(codec: str) -> LearningPrice:
    return read_codec(codec).learning if codec else UNMEASURED


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
