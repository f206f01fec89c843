"""What a plan writes of an exchange, as the exchange that is meant."""

from __future__ import annotations

from shoal.contracts.exchange import Exchange
from shoal.core.written import read


def exchange_named(text: str) -> Exchange:
    """The exchange that a plan or a pin writes, such as `ring` or `ring(chunk_bytes=1048576)`.

    Raises:
        PlanError: there is none of that name, or it has no such options.
    """
    return read(Exchange, text)
