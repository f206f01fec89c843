"""`ShoalEstimator` and `ShoalModel`: stages of Spark ML's pipelines. Imported with pyspark only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self, final

import pyarrow as pa
import torch
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasSeed
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)
from pyspark.sql.functions import arrow_udf

from shoal.core.errors import UsageError
from shoal.integrations.spark.batches import columns_of
from shoal.integrations.spark.pickles import dumps, loads
from shoal.integrations.spark.run import arrays, as_array, run, selected
from shoal.integrations.spark.training import OUTPUT, Parts, Trained, Training

_OUTPUTS = "shoal outputs"  # a column while transform computes
_SUMS = "losses double, right double, of_all double, num long"


class _Writer(MLWriter):
    """Saves Spark's parameters as Spark ML does, and the stage's own as a pickle."""

    def __init__(self, stage: Any, payload: Any) -> None:
        super().__init__()
        self._stage, self._payload = stage, payload

    def saveImpl(self, path: str) -> None:
        """Into a folder, of any file system that Spark has."""
        DefaultParamsWriter.saveMetadata(self._stage, path, self.sparkSession)
        rows = [(bytearray(dumps(self._payload, "the model")),)]
        frame = self.sparkSession.createDataFrame(rows, "data binary")
        frame.coalesce(1).write.parquet(f"{path}/shoal")


class _Reader(MLReader):
    """Reads what `_Writer` wrote."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """The stage."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        (row,) = self.sparkSession.read.parquet(f"{path}/shoal").collect()
        stage = self._kind(loads(bytes(row.data), "the saved model"))
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage


class _Settings(HasFeaturesCol, HasLabelCol, HasSeed, MLReadable, MLWritable):
    """Parameters that estimator and model have in common, and how both are saved."""

    batchSize = Param(
        Params._dummy(), "batchSize", "rows of each rank in a step", TypeConverters.toInt
    )
    outputCols = Param(
        Params._dummy(),
        "outputCols",
        'columns of transform by layer: {"fc7": "features"}, and "" for the output',
        TypeConverters.identity,
    )

    def __init__(self, payload: Any, **params: Any) -> None:
        super().__init__()
        self.payload = payload  # what is not Spark's own kind of parameter
        self._setDefault(batchSize=32, seed=0, outputCols={OUTPUT: "output"})
        self._set(**params)

    def setOutputCols(self, columns: dict[str, str]) -> Self:
        """Choose what `transform` adds, by layer; "" is the model's own output."""
        self._set(outputCols=dict(columns))
        return self

    def write(self) -> Any:
        """Spark ML's writer."""
        return _Writer(self, self.payload)

    @classmethod
    def read(cls) -> Any:
        """Spark ML's reader."""
        return _Reader(cls)


@final
class ShoalModel(Model, _Settings):
    """A trained model as a stage of a pipeline: `ShoalEstimator.fit` gives it.

    Its parameters are `featuresCol`, `labelCol`, `batchSize` and `outputCols`.
    """

    losses: list[float]  # of each epoch, where it was trained in this session

    @property
    def trained(self) -> Trained:
        """The model's functions and weights: `trained.model()` is the module."""
        found: Trained = self.payload
        return found

    def evaluate(self, df: Any) -> dict[str, float]:
        """The mean loss over rows, and what of them is right if there is a metric.

        Args:
            df: rows with the features and labels.

        Returns:
            `{"loss": …, "rows": …}`, and `"right"` as a part of 1.
        """
        names = [self.getOrDefault("featuresCol"), self.getOrDefault("labelCol")]
        frame = arrays(selected(df, names))
        summing = _summing(self.trained, names, self.getOrDefault("batchSize"))
        sums = frame.mapInArrow(summing, _SUMS).collect()
        rows = sum(each.num for each in sums)
        if not rows:
            raise UsageError("there are no rows to evaluate", do="give a DataFrame that has some")
        found = {"loss": sum(each.losses for each in sums) / rows, "rows": float(rows)}
        of_all = sum(each.of_all for each in sums)
        return found | ({"right": sum(each.right for each in sums) / of_all} if of_all else {})

    def _transform(self, df: Any) -> Any:
        features, outputs = self.getOrDefault("featuresCol"), self.getOrDefault("outputCols")
        self.trained.check_layers(outputs)
        taken = [name for name in outputs.values() if name in df.columns]
        if taken:
            raise UsageError(
                "the DataFrame has that column already",
                got=", ".join(map(repr, taken)),
                do='choose another name: setOutputCols({"layer": "column"})',
            )
        selected(df, [features])
        kind = "double" if self.trained.is_double else "float"
        fields = ", ".join(f"v{number}: array<{kind}>" for number in range(len(outputs)))
        computing = _computing(self.trained, tuple(outputs), self.getOrDefault("batchSize"))
        found = arrow_udf(computing, f"struct<{fields}>")
        frame = df.withColumn(_OUTPUTS, found(as_array(df, features)))
        for number, name in enumerate(outputs.values()):
            frame = frame.withColumn(name, frame[_OUTPUTS][f"v{number}"])
        return frame.drop(_OUTPUTS)


@final
class ShoalEstimator(Estimator, _Settings):
    """Trains a model on the ranks of a barrier stage.

    Args:
        parts: the functions that make model, loss and optimizer.
        params: Spark ML's own parameters: `featuresCol`, `labelCol`, `batchSize` (rows of each rank
            in a step), `epochs`, `numRanks`, `seed`, `outputCols`. And `checkpointFolder`, which
            all executors see: a run is saved there after each epoch, and gone on with.
    """

    epochs = Param(Params._dummy(), "epochs", "passes over the rows", TypeConverters.toInt)
    numRanks = Param(Params._dummy(), "numRanks", "tasks, a rank each", TypeConverters.toInt)
    checkpointFolder = Param(
        Params._dummy(), "checkpointFolder", "where a run is saved", TypeConverters.toString
    )

    def __init__(self, parts: Parts, **params: Any) -> None:
        super().__init__(parts)
        self._setDefault(epochs=1, numRanks=2, checkpointFolder="")
        self._set(**params)

    def _fit(self, df: Any) -> ShoalModel:
        of = self.getOrDefault
        features, label = of("featuresCol"), of("labelCol")
        training = Training(
            self.payload, features, label, of("epochs"), of("seed"), of("checkpointFolder")
        )
        (state, losses), *_ = run(
            training,
            df,
            num_ranks=of("numRanks"),
            batch_size=of("batchSize"),
            epochs=of("epochs"),
            columns=[features, label],
            to_batch=training.batch,
            seed=of("seed"),
        )
        model = ShoalModel(Trained(self.payload, state or {}))
        model.losses = losses
        self._copyValues(model)  # the parameters that both have
        return model


def _summing(trained: Trained, names: list[str], batch_size: int) -> Any:
    """For mapInArrow: one row of sums for each partition that has rows."""

    def summing(batches: Iterator[Any]) -> Iterator[Any]:
        found = []
        for batch in batches:
            if batch.num_rows:
                columns = columns_of(pa.Table.from_batches([batch]))
                found.append(trained.sums(columns[names[0]], columns[names[1]], batch_size))
        losses, right, of_all, num = (
            map(sum, zip(*found, strict=True)) if found else (0.0, 0.0, 0.0, 0)
        )
        yield pa.RecordBatch.from_pydict(
            {"losses": [losses], "right": [right], "of_all": [of_all], "num": [num]}
        )

    return summing


def _computing(trained: Trained, names: tuple[str, ...], batch_size: int) -> Any:
    """For arrow_udf: a struct of the layers' outputs for every row."""
    kind = pa.float64() if trained.is_double else pa.float32()

    def computing(parts: Iterator[pa.Array]) -> Iterator[pa.Array]:
        model = trained.model()
        for part in parts:
            features = columns_of(pa.table({"features": part}))["features"]
            found = trained.computed(model, features, names, batch_size)
            yield pa.StructArray.from_arrays(
                [_lists(found[name], kind) for name in names],
                names=[f"v{number}" for number in range(len(names))],
            )

    return computing


def _lists(values: torch.Tensor, kind: Any) -> Any:
    rows, width = values.shape
    flat = pa.array(values.cpu().reshape(-1).numpy(), kind)
    return pa.ListArray.from_arrays(pa.array(range(0, (rows + 1) * width, width), pa.int32()), flat)
