"""A stage that is watched, without Spark: who leaves is named, and nobody is waited for forever."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shoal.core.errors import WorldError
from shoal_tools.launch import cluster
from shoal_tools.launch.cluster import BarrierStage

pytestmark = pytest.mark.quick


class Py4JError(Exception):
    """As Spark's own are, by their module."""

    __module__ = "py4j.protocol"


class Context:
    """Of a driver; what the watch asks of it is patched below."""

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.is_cancelled = threading.Event()

    def addJobTag(self, tag: str) -> None:
        self.tags.append(tag)

    def removeJobTag(self, tag: str) -> None:
        self.tags.remove(tag)

    def cancelJobsWithTag(self, tag: str) -> None:
        assert tag in self.tags
        self.is_cancelled.set()


class Session:
    def __init__(self) -> None:
        self.sparkContext = Context()


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two executors with a core each, of which one has left at the second look."""
    looks: list[None] = []

    def there(session: Any) -> set[str]:
        looks.append(None)
        return {"a:1", "b:2"} if len(looks) < 2 else {"a:1"}

    monkeypatch.setattr(cluster, "_LOOK_S", 0.01)
    monkeypatch.setattr(cluster, "_AGAIN_S", 0.05)
    monkeypatch.setattr(cluster, "_executors", there)
    monkeypatch.setattr(cluster, "slots", lambda session: 1)
    return Session()


def test_too_few_executors_end_the_stage_and_the_one_that_left_is_named(
    spark: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def action() -> None:
        assert spark.sparkContext.is_cancelled.wait(60)
        raise Py4JError("cancelled")

    with pytest.raises(WorldError, match="none has come in its place") as caught:
        BarrierStage(spark, 2).run(action)
    assert "b:2" in caught.value.where and "room for 1 tasks, 2" in caught.value.got
    assert "the executor at b:2 has left" in capfd.readouterr().err
    assert not spark.sparkContext.tags


def test_where_enough_are_left_the_stage_goes_on(spark: Any) -> None:
    seen = threading.Event()
    stage = BarrierStage(spark, 1)

    def action() -> int:
        while not stage.left:
            seen.wait(0.01)
        seen.wait(0.3)
        return 7

    assert stage.run(action) == 7 and not spark.sparkContext.is_cancelled.is_set()


def test_what_spark_says_is_told_and_what_it_does_not_stays(spark: Any) -> None:
    said = "job aborted\nshoal.core.errors.PeerLost: the process of a rank ended without a word"

    def action() -> None:
        raise Py4JError(said)

    with pytest.raises(WorldError, match="Spark gave the stage up") as caught:
        BarrierStage(spark, 1).run(action)
    assert caught.value.got == said.splitlines()[1]
    with pytest.raises(ZeroDivisionError):
        BarrierStage(spark, 1).run(lambda: 1 / 0)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "An error occurred while calling collect.\n: org.apache.spark.SparkException: Job "
            "aborted\n  File x\nModuleNotFoundError: No module named 'shoal'\n",
            "ModuleNotFoundError: No module named 'shoal'",
        ),
        (
            "An error occurred.\n: org.apache.spark.SparkException: All masters are unresponsive!",
            "org.apache.spark.SparkException: All masters are unresponsive!",
        ),
        ("stopped", "stopped"),
        ("", "Py4JError"),
    ],
)
def test_the_line_that_says_most_is_told(spark: Any, said: str, told: str) -> None:
    def action() -> None:
        raise Py4JError(said)

    with pytest.raises(WorldError) as caught:
        BarrierStage(spark, 1).run(action)
    assert caught.value.got == told
