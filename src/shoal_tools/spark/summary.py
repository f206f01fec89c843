"""How training went, as Spark ML's own summaries tell it."""

from __future__ import annotations

import importlib
from typing import Any, final

_SCHEMA = "epoch long, step long, loss double, right double, rows long"


@final
class Summary:
    """What `ShoalModel.summary` is.

    Args:
        losses: the mean loss of each epoch.
        validations: a row for each time that the model was validated.
    """

    def __init__(self, losses: list[float], validations: list[dict[str, Any]]) -> None:
        self._losses, self.validations = losses, validations

    @property
    def objectiveHistory(self) -> list[float]:
        """The mean loss of each epoch, while it was trained."""
        return list(self._losses)

    @property
    def totalIterations(self) -> int:
        """Passes over the rows."""
        return len(self._losses)

    @property
    def validation(self) -> Any:
        """A DataFrame with a row for each validation: `epoch` (from 0), `step` (so many were made
        before), `loss`, `right` (a part of 1; null without a metric) and `rows`.
        """
        names = [part.split()[0] for part in _SCHEMA.split(", ")]
        rows = [tuple(each[name] for name in names) for each in self.validations]
        session = importlib.import_module("pyspark.sql").SparkSession.active()
        return session.createDataFrame(rows, _SCHEMA)
