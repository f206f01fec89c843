"""A model in a pipeline of Spark ML: fit, transform, evaluate, features, saved and loaded."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from shoal.core.errors import UsageError
from shoal.integrations.spark import Parts

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]

SIZES = (400, 30, 0, 170, 900, 1, 296)  # rows of each partition: all digits


def digits(spark: Any) -> Any:
    """Digits in seven uneven partitions, one of them empty."""
    data = load_digits()
    rows, start = [], 0
    for size in SIZES:
        part = [(i, data.data[i].tolist(), int(data.target[i])) for i in range(start, start + size)]
        rows.append(part)
        start += size
    parts = spark.sparkContext.parallelize(rows, len(rows)).flatMap(lambda part: part)
    return spark.createDataFrame(parts, "id long, x array<double>, y long")


def parts() -> Parts:
    """Functions that are sent by value: executors do not have the tests."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    return Parts(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        to_input=lambda x: x.float() / 16,
        metric=lambda output, y: (int((output.argmax(1) == y).sum()), len(y)),
    )


def test_digits_from_fit_to_a_loaded_pipeline(spark: Any, tmp_path: Path) -> None:
    stages = importlib.import_module("shoal.integrations.spark.estimator")
    ml = importlib.import_module("pyspark.ml")
    df = digits(spark)
    estimator = stages.ShoalEstimator(
        parts(), featuresCol="x", labelCol="y", numRanks=3, epochs=12, batchSize=16
    ).setOutputCols({"1": "features", "": "scores"})
    estimator.write().overwrite().save(str(tmp_path / "estimator"))
    loaded = stages.ShoalEstimator.load(str(tmp_path / "estimator"))
    assert loaded.getOrDefault("numRanks") == 3 and loaded.uid == estimator.uid

    fitted = ml.Pipeline(stages=[loaded]).fit(df)
    (model,) = fitted.stages
    assert len(model.losses) == 12 and model.losses[-1] < model.losses[0] / 5
    found = model.evaluate(df)
    assert found["right"] >= 0.97 and found["rows"] == sum(SIZES)

    fitted.write().overwrite().save(str(tmp_path / "pipeline"))
    again = ml.PipelineModel.load(str(tmp_path / "pipeline"))
    given = {row.id: row for row in again.transform(df).collect()}
    assert sorted(given) == list(range(sum(SIZES)))
    module, x = model.trained.model(), torch.tensor(load_digits().data).float() / 16
    with torch.no_grad():
        features, scores = module[:2](x), module(x)
    for name, expected in (("features", features), ("scores", scores)):
        values = torch.tensor([given[row][name] for row in range(len(x))])
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)

    with pytest.raises(UsageError, match="no such layer"):
        model.copy().setOutputCols({"fc7": "features"}).transform(df)
    with pytest.raises(UsageError, match="no such column"):
        stages.ShoalEstimator(parts(), featuresCol="image", labelCol="y").fit(df)
    with pytest.raises(UsageError, match="has that column already"):
        model.copy().setOutputCols({"": "x"}).transform(df)
