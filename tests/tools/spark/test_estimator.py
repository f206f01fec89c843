"""A model in a pipeline of Spark ML: fitted, validated, saved, loaded; its outputs as columns."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from shoal.core.errors import SampleError, UsageError
from shoal.integrations import spark as stages
from shoal_tools.spark import Parts

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]

SOURCE = Path(__file__).parents[3] / "src"
SIZES = (400, 30, 0, 170, 900, 1, 296)  # rows of each partition: all digits
EPOCHS, RANKS, BATCH = 12, 3, 16


def digits(spark: Any, sizes: tuple[int, ...] = SIZES) -> Any:
    """Digits in uneven partitions; every fifth is held out."""
    data = load_digits()
    rows, start = [], 0
    for size in sizes:
        ids = range(start, start + size)
        rows.append([(i, data.data[i].tolist(), int(data.target[i]), i % 5 == 0) for i in ids])
        start += size
    parts = spark.sparkContext.parallelize(rows, len(rows)).flatMap(lambda part: part)
    return spark.createDataFrame(parts, "id long, x array<double>, y long, held boolean")


def parts(**more: Any) -> Parts:
    """Functions that are sent by value: executors do not have the tests."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    plain: dict[str, Any] = {
        "model": model,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=4e-3),
        "to_input": lambda x: x.float() / 16,
        "metric": lambda output, y: (int((output.argmax(1) == y).sum()), len(y)),
    }
    return Parts(**{**plain, **more})


def noting(folder: Path) -> Callable[[dict[str, Any]], Any]:
    """A `to_batch` that writes down which rows it was given, a line a batch."""

    def to_batch(columns: dict[str, Any]) -> Any:
        name = f"{importlib.import_module('os').getpid()}"
        with (folder / name).open("a") as file:
            file.write(" ".join(map(str, columns["id"].tolist())) + "\n")
        return columns["x"].float() / 16, columns["y"]

    return to_batch


def noted(folder: Path) -> list[list[list[int]]]:
    """Rows by rank and step, without the look at the first batch and without validations."""
    ranks = []
    for file in folder.iterdir():
        steps = [[int(i) for i in line.split()] for line in file.read_text().splitlines()]
        first, *steps = [ids for ids in steps if ids[0] % 5]
        assert first == steps[0]
        ranks.append(steps)
    return ranks


def test_digits_from_fit_to_a_loaded_pipeline(spark: Any, tmp_path: Path) -> None:
    def model() -> nn.Module:
        images = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()
        more = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        return nn.Sequential(*images, *more, nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))

    ml, df = importlib.import_module("pyspark.ml"), digits(spark)
    (tmp_path / "rows").mkdir()
    given_parts = parts(
        model=model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
        to_batch=noting(tmp_path / "rows"),
        options={"pins": {"7": "factor", "9": "head"}},
    )
    estimator = stages.ShoalEstimator(
        given_parts,
        featuresCol="x",
        labelCol="y",
        inputCols=["id"],
        validationIndicatorCol="held",
        numRanks=RANKS,
        epochs=EPOCHS,
        batchSize=BATCH,
    ).setOutputCols({"8": "features", "": "scores"})
    estimator.write().overwrite().save(str(tmp_path / "estimator"))
    loaded = stages.ShoalEstimator.load(str(tmp_path / "estimator"))
    assert loaded.getOrDefault("numRanks") == RANKS and loaded.uid == estimator.uid

    fitted = ml.Pipeline(stages=[loaded]).fit(df)
    trained = [i for i in range(sum(SIZES)) if i % 5]
    ranks, num = noted(tmp_path / "rows"), -(-len(trained) // (RANKS * BATCH))
    assert [len(steps) for steps in ranks] == [num * EPOCHS] * RANKS
    for epoch in range(EPOCHS):
        here = [ids for steps in ranks for ids in steps[epoch * num : (epoch + 1) * num]]
        assert sorted(i for ids in here for i in ids) == trained

    (model,) = fitted.stages
    losses = model.summary.objectiveHistory
    assert len(losses) == EPOCHS and losses[-1] < losses[0] / 5
    told = model.summary.validation.orderBy("step").collect()
    assert [(row.epoch, row.step) for row in told] == [(e, (e + 1) * num) for e in range(EPOCHS)]
    assert told[-1].right >= 0.97 and told[-1].rows == sum(SIZES) - len(trained)
    found = model.evaluate(df.where("held"))
    assert found["right"] == pytest.approx(told[-1].right) and found["rows"] == told[-1].rows
    assert found["loss"] == pytest.approx(told[-1].loss, rel=1e-5)

    fitted.write().overwrite().save(str(tmp_path / "pipeline"))
    again = ml.PipelineModel.load(str(tmp_path / "pipeline"))
    given = {row.id: row for row in again.transform(df).collect()}
    assert sorted(given) == list(range(sum(SIZES)))
    module, x = model.trained.model(), torch.tensor(load_digits().data).float() / 16
    with torch.no_grad():
        features, scores = module[:9](x), module(x)
    for name, expected in (("features", features), ("scores", scores)):
        values = torch.tensor([given[row][name] for row in range(len(x))])
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)

    assert not again.stages[0].hasSummary
    with pytest.raises(UsageError, match="has no summary"):
        _ = again.stages[0].summary
    with pytest.raises(UsageError, match="no such layer"):
        model.copy().setOutputCols({"fc7": "features"}).transform(df)
    with pytest.raises(UsageError, match="has that column already"):
        model.copy().setOutputCols({"": "x"}).transform(df)


def test_images_as_bytes_with_a_second_dataframe(spark: Any) -> None:
    data = load_digits()
    rows = [
        (bytearray(map(int, image)), int(label))
        for image, label in zip(data.data, data.target, strict=True)
    ]
    train, held = (
        spark.createDataFrame(r, "image binary, y long") for r in (rows[300:], rows[:300])
    )

    def to_input(images: list[bytes]) -> Any:
        pixels = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8)
        return pixels.reshape(len(images), 1, 8, 8).float() / 16

    def model() -> nn.Module:
        conv = nn.Conv2d(1, 12, 3, padding=1)
        return nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 10))

    def compute_loss(model: nn.Module, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metric(model: nn.Module, batch: Any) -> tuple[int, int]:
        return int((model(batch[0]).argmax(1) == batch[1]).sum()), len(batch[1])

    estimator = stages.ShoalEstimator(
        parts(model=model, to_input=to_input, compute_loss=compute_loss, metric=metric),
        featuresCol="image",
        labelCol="y",
        epochs=3,
        validationInterval=20,
    )
    fitted = estimator.fit(train, validation=held)
    steps = -(-1497 // 64)
    told = fitted.summary.validations
    ends = [steps, 2 * steps, 3 * steps]
    assert [each["step"] for each in told] == sorted({20, 40, 60, *ends})
    assert {each["rows"] for each in told} == {300} and told[-1]["right"] > 0.8
    assert fitted.evaluate(held)["right"] == pytest.approx(told[-1]["right"])
    given = fitted.setOutputCols({"": "scores"}).transform(held).select("scores").collect()
    with torch.no_grad():
        scores = fitted.trained.model()(to_input([bytes(image) for image, _ in rows[:300]]))
    values = torch.tensor([row.scores for row in given])
    torch.testing.assert_close(values, scores, rtol=1e-5, atol=1e-5)

    marked = estimator.copy().setParams(validationIndicatorCol="held")
    with pytest.raises(UsageError, match="given twice"):
        marked.fit(train, validation=held)


def test_text_with_a_model_that_returns_its_own_loss(spark: Any) -> None:
    words = [("good fine great", 1), ("bad poor awful sad", 0), ("fine", 1), ("sad bad", 0)] * 20
    df = spark.createDataFrame(words, "text string, label long")

    def ids(texts: list[str]) -> Any:
        numbers = [[1 + sum(word.encode()) % 96 for word in text.split()] for text in texts]
        return nn.utils.rnn.pad_sequence([torch.tensor(n) for n in numbers], batch_first=True)

    def model() -> nn.Module:
        class Classifier(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table, self.head = nn.Embedding(97, 8, padding_idx=0), nn.Linear(8, 2)

            def forward(self, ids: Any, labels: Any = None) -> Any:
                logits = self.head(self.table(ids).mean(1))
                if labels is None:
                    return {"logits": logits}
                return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}

        return Classifier()

    text = Parts(
        model,
        loss=None,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.05),
        to_input=ids,
        to_batch=lambda columns: {"ids": ids(columns["text"]), "labels": columns["label"]},
        metric=lambda output, batch: (
            int((output["logits"].argmax(1) == batch["labels"]).sum()),
            len(batch["labels"]),
        ),
    )
    fitted = stages.ShoalEstimator(text, featuresCol="text", batchSize=8, epochs=4).fit(df)
    assert fitted.evaluate(df)["right"] == 1.0
    found = fitted.setOutputCols({"head": "logits"}).transform(df).collect()
    right = [row.logits[row.label] > row.logits[1 - row.label] for row in found]
    assert all(right) and len(right) == len(words)
    with pytest.raises(Exception, match="a row for each row"):
        fitted.setOutputCols({"": "logits"}).transform(df).collect()


def test_servers_and_tail_hosts_beside_the_ranks(spark: Any) -> None:
    df = digits(spark, (90, 0, 60))
    for others, pins in (({"numServers": 1}, {"*": "server"}), ({"numTail": 1}, {"2": "stage"})):
        estimator = stages.ShoalEstimator(
            parts(options={"pins": pins}),
            featuresCol="x",
            labelCol="y",
            validationIndicatorCol="held",
            epochs=2,
            **others,
        )
        model = estimator.fit(df)
        (_, told) = model.summary.validations
        found = model.evaluate(df.where("held"))
        assert found["rows"] == told["rows"] == 30
        assert found["right"] == pytest.approx(told["right"])
        assert found["loss"] == pytest.approx(told["loss"], rel=1e-5)


def test_the_example_is_short_and_learns() -> None:
    example = Path(__file__).parents[3] / "examples" / "spark_digits.py"
    assert len(example.read_text().splitlines()) <= 60
    ended = subprocess.run(
        [sys.executable, str(example), "--master", "local[2]", "--epochs", "4"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = ast.literal_eval(ended.stdout.splitlines()[-1])
    assert found["rows"] == 360 and found["right"] > 0.93


def test_what_is_wrong_is_told_at_the_driver(spark: Any, no_rank_left: Any) -> None:
    df = digits(spark, (40, 0, 9))
    estimator = stages.ShoalEstimator(parts(), featuresCol="x", labelCol="y", numRanks=2)
    wide = parts(to_input=lambda x: x.float()[:, :60])
    with pytest.raises(SampleError, match="does not take the sample") as unfit:
        stages.ShoalEstimator(wide, featuresCol="x", labelCol="y").fit(df)
    assert "float32 (25, 60)" in unfit.value.got and "executor on host" in unfit.value.where
    assert unfit.value.do
    no_rank_left()
    with pytest.raises(UsageError, match="no such column") as missing:
        estimator.copy().setParams(featuresCol="image").fit(df)
    assert "'image'" in missing.value.got and missing.value.do
    with pytest.raises(UsageError, match="no such column"):
        estimator.copy().setParams(validationIndicatorCol="kept").fit(df)
    with pytest.raises(UsageError, match="no truth values"):
        estimator.copy().setParams(validationIndicatorCol="y").fit(df)
    with pytest.raises(UsageError, match="cannot reach that store"):
        estimator.copy().setParams(checkpointFolder="nowhere://name/run").fit(df)
    with pytest.raises(UsageError, match="has no such parameter"):
        estimator.copy().setParams(numRank=2)
    with pytest.raises(UsageError, match="on tail hosts is not saved"):
        estimator.copy().setParams(checkpointFolder="run", numTail=1).fit(df)
    for interval in ("validationInterval", "checkpointInterval"):
        with pytest.raises(UsageError, match=f"{interval} is a number of steps"):
            estimator.copy().setParams(**{interval: 5}).fit(df)
    with pytest.raises(UsageError, match="more ranks than tasks") as many:
        estimator.copy().setParams(numRanks=4).fit(df)
    assert many.value.do
    with pytest.raises(UsageError, match="no rows to train on"):
        estimator.fit(df.limit(0))
    halves = df.withColumn("y", df["y"] + 0.5)
    with pytest.raises(UsageError, match="a value that is no class"):
        estimator.fit(halves)
    few = df.where("not held or id < 10")  # two held out
    with pytest.raises(UsageError, match="fewer rows to validate with than ranks"):
        estimator.copy().setParams(numRanks=3, validationIndicatorCol="held").fit(few)


KILLS = {
    "a rank": "import os; os.kill(os.getpid(), 9)",
    "a rank, with checkpoints of each step": "import os, pathlib, time\n"
    "while not pathlib.Path(checkpoints, 'step-00000007', 'state.json').exists():\n"
    "    time.sleep(0.1)\n"
    "os.kill(os.getpid(), 9)",
    "an executor": "import os\n"
    "pid = os.getppid()\n"
    "while b'CoarseGrainedExecutorBackend' not in open(f'/proc/{pid}/cmdline', 'rb').read():\n"
    "    pid = int(open(f'/proc/{pid}/stat').read().rpartition(') ')[2].split()[1])\n"
    "os.kill(pid, 9)\n"
    "import time; time.sleep(60)",
}


def test_labels_as_string_indexer_gives_them_are_classes(spark: Any) -> None:
    indexer = importlib.import_module("pyspark.ml.feature").StringIndexer
    df = digits(spark, (40, 0, 60))
    text = df.withColumn("name", df["y"].cast("string"))
    indexed = indexer(inputCol="name", outputCol="label").fit(text).transform(text)
    assert dict(indexed.dtypes)["label"] == "double"
    model = stages.ShoalEstimator(parts(), featuresCol="x", numRanks=2).fit(indexed)
    assert model.evaluate(indexed)["rows"] == 100


def test_what_is_killed_goes_on_by_itself(spark: Any, tmp_path: Path, no_rank_left: Any) -> None:
    """As if nothing had been: weights, losses and validations."""
    df = digits(spark, (90, 0, 31, 59))

    def fitted(name: str, kill: str, interval: int = 0) -> Any:
        folder = tmp_path / name
        (folder / "calls").mkdir(parents=True)

        def to_batch(columns: dict[str, Any]) -> Any:
            os = importlib.import_module("os")
            calls = folder / "calls" / str(os.getpid())
            with calls.open("ab") as file:
                file.write(b".")
            held = int(columns["id"][0]) % 5 == 0
            late = calls.stat().st_size > 8 and not held  # in mid of the third epoch
            if kill and late and os.environ["RANK"] == "1" and not (folder / "killed").exists():
                (folder / "killed").touch()
                exec(kill, {"checkpoints": str(folder / "checkpoints")})
            return columns["x"] / 16, columns["y"]

        double = parts(
            model=made,
            to_batch=to_batch,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        )
        estimator = stages.ShoalEstimator(
            double,
            featuresCol="x",
            labelCol="y",
            inputCols=["id"],
            validationIndicatorCol="held",
            numRanks=3,
            epochs=4,
            seed=5,
            checkpointFolder=str(folder / "checkpoints"),
            checkpointInterval=interval,
        )
        model = estimator.fit(df)
        assert (folder / "killed").exists() == bool(kill)
        sizes = sorted(path.stat().st_size for path in (folder / "calls").iterdir())
        return model, sizes

    def made() -> nn.Module:
        layers = nn.Linear(64, 20), nn.Tanh(), nn.Dropout(0.2), nn.Linear(20, 10)
        return nn.Sequential(*layers).double()

    whole, calls = fitted("whole", "")
    assert calls == [13] * 3  # a look, and 2 steps and a validation an epoch
    for name, kill in KILLS.items():
        every_step = int("each step" in name)
        again, own = fitted(name, kill, every_step)
        # two epochs once more, or all but the first step of them
        assert len(own) == 6 and own[:3] == [7 - every_step] * 3, name
        assert again.summary.objectiveHistory == pytest.approx(
            whole.summary.objectiveHistory, rel=0, abs=1e-10
        )
        assert len(again.summary.validations) == 4
        for told, expected in zip(
            again.summary.validations, whole.summary.validations, strict=True
        ):
            assert told == pytest.approx(expected, rel=0, abs=1e-10)
        for key, value in whole.trained.state.items():
            torch.testing.assert_close(again.trained.state[key], value, rtol=0, atol=1e-10)
