"""Digits from a DataFrame: trained on Spark's executors, validated, then used as a column.

    pip install -e '.[spark,examples]'                                 # in a clone of Shoal
    python examples/spark_digits.py --master spark://head:7077 --ranks 3

Without --master Spark's own is taken: all cores of this machine, if nothing else is said.
"""

import argparse

import torch
from pyspark.ml import Pipeline
from shoal.integrations.spark import Parts, ShoalEstimator, session
from sklearn.datasets import load_digits
from torch import nn


def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def pixels(images):
    return images.float() / 16


def right(scores, labels):
    return int((scores.argmax(1) == labels).sum()), len(labels)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--master", default="")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--epochs", type=int, default=8)
    options = options.parse_args()
    images, labels = load_digits(return_X_y=True)
    held = [row % 5 == 0 for row in range(len(labels))]
    rows = list(zip(images.tolist(), labels.tolist(), held, strict=True))
    parts = Parts(model, optimizer=optimizer, to_input=pixels, metric=right)
    estimator = ShoalEstimator(
        parts, labelCol="digit", validationIndicatorCol="held", numRanks=options.ranks
    ).setParams(epochs=options.epochs)
    with session(options.master) as spark:
        df = spark.createDataFrame(rows, "features array<double>, digit long, held boolean")
        fitted = Pipeline(stages=[estimator]).fit(df)
        fitted.stages[0].summary.validation.show()
        fitted.transform(df.where("held")).select("digit", "output").show(5)
        print(fitted.stages[0].evaluate(df.where("held")))


if __name__ == "__main__":
    main()
