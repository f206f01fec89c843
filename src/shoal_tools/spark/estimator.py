"""`ShoalEstimator` and `ShoalModel`: stages of Spark ML's pipelines. The module needs pyspark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, final

import pyarrow as pa
import torch
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasInputCols,
    HasLabelCol,
    HasSeed,
    HasValidationIndicatorCol,
)
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)
from pyspark.sql.functions import arrow_udf, lit

from shoal.checkpoint.store import place_of
from shoal.core.errors import UsageError
from shoal_tools.spark.batches import columns_of
from shoal_tools.spark.estimator_ranks import FitFunction
from shoal_tools.spark.parts import Parts, Sums
from shoal_tools.spark.pickles import dumps, loads
from shoal_tools.spark.run import arrays, as_array, run, select_columns
from shoal_tools.spark.summary import Summary
from shoal_tools.spark.trained_model import OUTPUT, TrainedModel

_OUTPUTS = "shoal outputs"  # a column while transform computes
_MARK = "shoal validation"  # a column: true if a row comes from the validation DataFrame
_SUMS = "losses double, weight double, right double, of_all double, rows long"


class _Writer(MLWriter):
    """Saves Spark's parameters as Spark ML does, and the stage's own as a pickle."""

    def __init__(self, stage: Any, payload: Any) -> None:
        super().__init__()
        self._stage, self._payload = stage, payload

    def saveImpl(self, path: str) -> None:
        """Save to a folder, in any file system that Spark has."""
        DefaultParamsWriter.saveMetadata(self._stage, path, self.sparkSession)
        rows = [(bytearray(dumps(self._payload, "the model")),)]
        frame = self.sparkSession.createDataFrame(rows, "data binary")
        frame.coalesce(1).write.parquet(f"{path}/shoal")


class _Reader(MLReader):
    """Loads a stage from the folder that `_Writer` saved it to."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Load the stage from a folder."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        (row,) = self.sparkSession.read.parquet(f"{path}/shoal").collect()
        stage = self._kind(loads(bytes(row.data), "the saved model"))
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage


class _Settings(HasFeaturesCol, HasLabelCol, HasInputCols, HasSeed, MLReadable, MLWritable):
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
        self.payload = payload  # the stage's own value, which is no parameter of Spark's
        self._setDefault(batchSize=32, seed=0, inputCols=[], outputCols={OUTPUT: "output"})
        self.setParams(**params)

    def setParams(self, **params: Any) -> Self:
        """Set parameters by name.

        Raises:
            UsageError: there is no parameter of that name.
        """
        unknown = [name for name in params if not self.hasParam(name)]
        if unknown:
            raise UsageError(
                f"{type(self).__name__} has no such parameter",
                got=", ".join(unknown),
                expected="of " + ", ".join(each.name for each in self.params),
                do="correct the name",
            )
        self._set(**params)
        return self

    def setOutputCols(self, columns: dict[str, str]) -> Self:
        """Choose the columns that `transform` adds, by layer; "" is the model's own output."""
        self._set(outputCols=dict(columns))
        return self

    def columns(self, parts: Parts) -> list[str]:
        """Return the names of the columns that the loss needs."""
        of = self.getOrDefault
        return parts.columns(of("featuresCol"), of("labelCol"), of("inputCols"))

    def write(self) -> Any:
        """Return Spark ML's writer."""
        return _Writer(self, self.payload)

    @classmethod
    def read(cls) -> Any:
        """Return Spark ML's reader."""
        return _Reader(cls)


@final
class ShoalModel(Model, _Settings):
    """A trained model as a stage of a pipeline, returned by `ShoalEstimator.fit`.

    Its parameters are `featuresCol`, `labelCol`, `batchSize` and `outputCols`.
    """

    _summary: Summary | None = None

    @property
    def trained(self) -> TrainedModel:
        """The model's functions and weights: `trained.model()` is the module."""
        found: TrainedModel = self.payload
        return found

    @property
    def hasSummary(self) -> bool:
        """Whether it was trained in this session: a summary is not saved."""
        return self._summary is not None

    @property
    def summary(self) -> Summary:
        """The losses and validations of the training.

        Raises:
            UsageError: the model was loaded, so it has no summary.
        """
        if self._summary is None:
            raise UsageError(
                "a model that was loaded has no summary",
                do="look at model.hasSummary; write summary.validation to a table before",
            )
        return self._summary

    def evaluate(self, df: Any) -> dict[str, float]:
        """Compute the mean loss over rows, and the share of right rows if there is a metric.

        Args:
            df: rows with the features and labels.

        Returns:
            `{"loss": …, "rows": …}`, and with a metric `"right"`, from 0 to 1.

        Raises:
            UsageError: there are no rows, or a column is missing.
        """
        names, of = self.columns(self.trained.parts), self.getOrDefault
        frame = arrays(select_columns(df, names))
        summing = _summing(self.trained, of("featuresCol"), of("labelCol"), of("batchSize"))
        sums = sum((Sums(*row) for row in frame.mapInArrow(summing, _SUMS).collect()), Sums())
        if not sums.rows:
            raise UsageError("there are no rows to evaluate", do="give a DataFrame that has some")
        found = {"loss": sums.losses / sums.weight, "rows": float(sums.rows)}
        return found | ({"right": sums.right / sums.of_all} if sums.of_all else {})

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
        select_columns(df, [features])
        kind = "double" if self.trained.is_double else "float"
        fields = ", ".join(f"v{number}: array<{kind}>" for number in range(len(outputs)))
        computing = _computing(self.trained, tuple(outputs), self.getOrDefault("batchSize"))
        found = arrow_udf(computing, f"struct<{fields}>")
        frame = df.withColumn(_OUTPUTS, found(as_array(df, features)))
        for number, name in enumerate(outputs.values()):
            frame = frame.withColumn(name, frame[_OUTPUTS][f"v{number}"])
        return frame.drop(_OUTPUTS)


@final
class ShoalEstimator(Estimator, _Settings, HasValidationIndicatorCol):
    """Trains a model on the ranks of a barrier stage.

    Args:
        parts: the functions that make model, loss and optimizer.
        params: Spark ML's own parameters: `featuresCol`, `labelCol`, `inputCols` (further columns
            for `Parts.to_batch`), `batchSize` (rows of each rank in a step), `epochs`, `numRanks`,
            `seed`, `outputCols`.
            `validationIndicatorCol`: rows where this column is true are not trained on. They
            validate the model at the end of each epoch, and every `validationInterval` steps.
            `checkpointFolder`: a path that all executors see, or the address of a store, such as
            "s3://bucket/run" (fsspec). A run is saved there after each epoch, and resumes from it.
            `checkpointInterval`: the run is also saved after every so many steps.
    """

    epochs = Param(Params._dummy(), "epochs", "passes over the rows", TypeConverters.toInt)
    numRanks = Param(Params._dummy(), "numRanks", "tasks, a rank each", TypeConverters.toInt)
    numServers = Param(Params._dummy(), "numServers", "tasks that serve", TypeConverters.toInt)
    numTail = Param(Params._dummy(), "numTail", "tasks for the model's end", TypeConverters.toInt)
    checkpointFolder = Param(
        Params._dummy(), "checkpointFolder", "where a run is saved", TypeConverters.toString
    )
    checkpointInterval = Param(
        Params._dummy(),
        "checkpointInterval",
        "steps from one checkpoint to the next; 0: at the end of each epoch",
        TypeConverters.toInt,
    )
    validationInterval = Param(
        Params._dummy(),
        "validationInterval",
        "steps from one validation to the next; 0: at the end of each epoch",
        TypeConverters.toInt,
    )

    def __init__(self, parts: Parts, **params: Any) -> None:
        if not isinstance(parts, Parts):
            raise UsageError(
                "ShoalEstimator takes Parts: the functions that make model, loss and optimizer",
                got=repr(parts)[:80],
                do="ShoalEstimator(Parts(model=lambda: …), …)",
            )
        super().__init__(parts)
        self._setDefault(epochs=1, numRanks=2, numServers=0, numTail=0)
        self._setDefault(checkpointFolder="", checkpointInterval=0, validationInterval=0)
        self.setParams(**params)

    def fit(self, dataset: Any, params: Any = None, *, validation: Any = None) -> Any:
        """Train on a DataFrame, as Spark ML's `fit`.

        Args:
            dataset: rows to train on.
            params: as for Spark ML's `fit`.
            validation: a second DataFrame, of rows to validate with, in place of
                `validationIndicatorCol`.

        Returns:
            A `ShoalModel`, or a list of them for a list of params.

        Raises:
            UsageError: the same errors as `run`, or both a second DataFrame and a column of marks.
        """
        if validation is None:
            return super().fit(dataset, params)
        if self.isSet("validationIndicatorCol"):
            raise UsageError(
                "rows to validate with are given twice",
                got=f"validation=… and validationIndicatorCol="
                f"{self.getOrDefault('validationIndicatorCol')!r}",
                do="leave one of them out",
            )
        names = self.columns(self.payload)
        rows, others = (select_columns(df, names) for df in (dataset, validation))
        both = rows.withColumn(_MARK, lit(False)).unionByName(others.withColumn(_MARK, lit(True)))
        return self.copy({self.validationIndicatorCol: _MARK}).fit(both, params)

    def _fit(self, df: Any) -> ShoalModel:
        of = self.getOrDefault
        mark = of("validationIndicatorCol") if self.isSet("validationIndicatorCol") else ""
        self._check_intervals(mark)
        training = FitFunction(
            self.payload,
            of("featuresCol"),
            of("labelCol"),
            of("epochs"),
            of("seed"),
            _folder(of("checkpointFolder")),
            of("validationInterval"),
            of("checkpointInterval"),
        )
        result, *_ = run(
            training,
            df,
            num_ranks=of("numRanks"),
            num_servers=of("numServers"),
            num_tail=of("numTail"),
            batch_size=of("batchSize"),
            epochs=of("epochs"),
            columns=self.columns(self.payload),
            to_batch=training.batch,
            seed=of("seed"),
            validation=mark,
        )
        model = ShoalModel(TrainedModel(self.payload, result.state))
        model._summary = Summary(result.losses, result.validations)
        self._copyValues(model)  # the parameters that both have
        return model

    def _check_intervals(self, mark: str) -> None:
        """Check the intervals of validations and checkpoints before anything starts."""
        of = self.getOrDefault
        interval, folder = of("validationInterval"), of("checkpointFolder")
        if interval < 0 or (interval and not mark):
            raise UsageError(
                "validationInterval is a number of steps between validations",
                got=f"{interval}" + ("" if mark else ", and no validationIndicatorCol"),
                do="name the column that marks rows to validate with, or give fit(…, validation=…)",
            )
        interval = of("checkpointInterval")
        if interval < 0 or (interval and not folder):
            raise UsageError(
                "checkpointInterval is a number of steps between checkpoints",
                got=f"{interval}" + ("" if folder else ", and no checkpointFolder"),
                do="name a folder that all executors see: checkpointFolder=…",
            )
        if of("numTail") and folder:
            raise UsageError(
                "a model whose end is on tail hosts is not saved while it is fitted",
                got=f"numTail={of('numTail')} and a checkpointFolder",
                do="leave one of them out",
            )


def _folder(path: str) -> str:
    """Return an absolute path, because executors have other working folders, or the address."""
    if not path:
        return ""
    place = place_of(path, "checkpointFolder")
    return str(place.absolute()) if isinstance(place, Path) else place.url


def _summing(trained: TrainedModel, features: str, label: str, batch_size: int) -> Any:
    """Return a function for mapInArrow: it gives one row of sums for each partition with rows."""

    def summing(batches: Iterator[Any]) -> Iterator[Any]:
        sums = Sums()
        for batch in batches:
            if batch.num_rows:
                columns = columns_of(pa.Table.from_batches([batch]))
                sums += trained.sums(columns, features, label, batch_size)
        yield pa.RecordBatch.from_pydict({k: [value] for k, value in asdict(sums).items()})

    return summing


def _computing(trained: TrainedModel, names: tuple[str, ...], batch_size: int) -> Any:
    """Return a function for arrow_udf: it gives a struct of the layers' outputs for every row."""
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
