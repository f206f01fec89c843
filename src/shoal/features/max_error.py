"""`max_error`: a codec that is off by more than a bound gives way to exact exchange.

codecs/ledger.py says how the error is measured. Guarded by tests/codecs/test_codecs.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from shoal.codecs.carrier_memory import coded_carriers
from shoal.contracts.feature import Attachment, Feature
from shoal.core.numbers import check_number
from shoal.core.option import option
from shoal.remote.verbs import Aspect, Write
from shoal.remote.wire import Data
from shoal.session.opening import Opening
from shoal.session.running import Running

_BOUNDS = 1e-9, 1e9  # a relative error of 1 is already as large as the value


@final
@dataclass(frozen=True)
class MaxError(Feature[Opening]):
    """Bound of a codec's relative error of a parameter's mean over 100 steps.

    If the error is larger, the parameter's bucket goes exactly from then on, with a warning.

    Args:
        bound: the largest error. By default each codec has a bound of its own.

    Examples:
        >>> from shoal.features.max_error import MaxError
        >>> MaxError(0.1).bound
        0.1
    """

    name: ClassVar[str] = "max_error"
    bound: float | None = option(None, keyword="max_error")

    def __post_init__(self) -> None:
        if self.bound is not None:
            check_number(
                "max_error is a bound of a relative error, above 0",
                self.bound,
                *_BOUNDS,
                do="give for instance 0.1, or None for each codec's own",
            )

    def attach(self, opening: Opening) -> Attachment[Running] | None:
        return None if self.bound is None else _Bound(self.bound)


@final
class _Bound(Attachment[Running]):
    """The bound of one model's codecs, also at servers."""

    def __init__(self, most_error: float) -> None:
        self._most_error = most_error

    def start(self, running: Running) -> None:
        for carrier in coded_carriers(running.engine.transfers):
            carrier.most_error = self._most_error
        owners = running.owners
        if owners is not None and any(coded_carriers(owners.served)):
            owners.tell(Write(Aspect.ERROR_BOUND, Data(self._most_error)))
