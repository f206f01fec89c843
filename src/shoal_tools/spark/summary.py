"""The losses of a training, with the names that Spark ML's own summaries have."""

from __future__ import annotations

import importlib
from typing import Any, final

_SCHEMA = "epoch long, step long, loss double, right double, rows long"


@final
class Summary:
    """Losses and validations of a training, as `ShoalModel.summary` returns them.

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
