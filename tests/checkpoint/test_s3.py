"""Checkpoints at s3:// addresses, by s3fs, in a server that the package moto brings.

`make test-trainers` installs both: constraints-trainers.txt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

import shoal
from shoal.checkpoint.folder import LATEST, STATE
from shoal.checkpoint.store import Store
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

s3fs = pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of those packages
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
URL = "s3://bucket/runs/first"
FILES = ["model.safetensors", "random-state.safetensors", STATE]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of S3 on this machine."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    started = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    yield f"http://{host}:{port}"
    started.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket with nothing in it, and credentials for it."""
    settings = {"ENDPOINT_URL": server, "ACCESS_KEY_ID": "name", "SECRET_ACCESS_KEY": "secret"}
    settings |= {"DEFAULT_REGION": "us-east-1", "EC2_METADATA_DISABLED": "true"}
    settings |= {"MAX_ATTEMPTS": "1", "SHARED_CREDENTIALS_FILE": "/dev/null"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    made = boto3.resource("s3").create_bucket(Bucket="bucket")
    yield made
    made.objects.all().delete()
    made.delete()
    s3fs.S3FileSystem.clear_instance_cache()


def keys(bucket: Any, url: str = URL) -> list[str]:
    """The files below an address."""
    prefix = url.removeprefix("s3://bucket/") + "/"
    return sorted(each.key.removeprefix(prefix) for each in bucket.objects.filter(Prefix=prefix))


def on_ranks(size: int, work: Any) -> list[Any]:
    """The work of each rank, all on one host."""
    cluster = Cluster(Topology(("host",) * size), Link(1e-4, 1e8))

    def join(comm: ThreadComm) -> Any:
        with using(comm, cluster):
            return work(comm)

    return run(size, join)


def filled(value: float) -> nn.Module:
    """A layer of six equal weights and two biases of the same value."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def saved(first: int, last: int, keep: int = 2) -> Any:
    """The work of a rank that saves behind each step, with the step's number as weights."""

    def work(comm: ThreadComm) -> None:
        model = filled(0.0)
        optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
        objects = {"model": model, "optimizer": optimizer}
        with shoal.Checkpoints(URL, every_s=1e6, keep=keep, **objects, epoch=0) as checkpoints:
            assert checkpoints.resume() == {"epoch": first - 1}
            for number in range(first, last + 1):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(number)
                checkpoints.step(epoch=number)
                checkpoints.save()

    return work


def gone_on(comm: ThreadComm) -> tuple[int, float]:
    """The work of a rank that goes on, and tells steps and weights."""
    model = filled(0.0)
    with shoal.Checkpoints(URL, every_s=1e6, model=model, epoch=0) as checkpoints:
        checkpoints.resume()
        return checkpoints.steps, model.weight.sum().item()


def test_a_run_is_kept_to_its_last_checkpoints_and_goes_on_with_any_number_of_ranks(
    bucket: Any,
) -> None:
    on_ranks(2, saved(1, 4))
    kept = [f"step-0000000{number}/{name}" for number in (3, 4) for name in FILES]
    assert keys(bucket) == [LATEST, *kept]
    assert bucket.Object("runs/first/LATEST").get()["Body"].read() == b"step-00000004\n"
    for size in (1, 3):
        assert on_ranks(size, gone_on) == [(4, 24.0)] * size
    on_ranks(3, saved(5, 5))
    assert on_ranks(2, gone_on) == [(5, 30.0)] * 2


def test_an_upload_that_breaks_leaves_the_checkpoint_before(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_ranks(2, saved(1, 2))
    call = s3fs.S3FileSystem._call_s3

    async def breaks(self: Any, method: str, *given: Any, **named: Any) -> Any:
        if method == "put_object" and "3/random-state" in named.get("Key", ""):
            raise ConnectionResetError("the network is gone")
        return await call(self, method, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "_call_s3", breaks)
        with pytest.raises(UsageError, match="cannot be written") as caught:
            on_ranks(2, saved(3, 3))
    assert "the network is gone" in caught.value.got
    assert f"{URL}/step-00000003" in caught.value.where
    assert "step-00000003/model.safetensors" in keys(bucket)
    assert on_ranks(3, gone_on) == [(2, 12.0)] * 3

    def other_steps(comm: ThreadComm) -> None:
        with shoal.Checkpoints(URL, every_s=1e6, model=filled(0.0), epoch=0) as checkpoints:
            checkpoints.resume()
            for _ in range(5):
                checkpoints.step()
            checkpoints.save()

    on_ranks(2, other_steps)  # and nothing stays of the one that broke
    assert {key.partition("/")[0] for key in keys(bucket)} == {
        LATEST,
        "step-00000001",
        "step-00000002",
        "step-00000007",
    }


def test_one_checkpoint_is_saved_replaced_and_loaded(bucket: Any) -> None:
    def work(comm: ThreadComm) -> tuple[dict[str, Any], float]:
        shoal.save(URL, model=filled(1.0), epoch=1)
        shoal.save(URL, model=filled(2.0), epoch=2)
        model = filled(0.0)
        return shoal.load(URL, model=model, epoch=0), model.weight.sum().item()

    assert on_ranks(2, work) == [({"epoch": 2}, 12.0)] * 2
    assert keys(bucket) == FILES


def test_a_bucket_that_is_not_there_is_told_and_not_made(bucket: Any) -> None:
    wrong, model = "s3://buckett/run", filled(1.0)
    with pytest.raises(UsageError, match="cannot be written") as one:
        shoal.save(wrong, model=model)
    with pytest.raises(UsageError, match="cannot be written there") as of_run:
        shoal.Checkpoints(wrong, model=model)
    for caught in (one, of_run):
        assert "there is no bucket 'buckett'" in caught.value.got
        assert "address" in caught.value.do
    with pytest.raises(UsageError, match="no such checkpoint"):
        shoal.load(wrong, model=model)
    assert [each.name for each in boto3.resource("s3").buckets.all()] == ["bucket"]


def test_credentials_that_lack_are_told(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = filled(1.0)
    shoal.save(URL, model=model)
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        s3fs.S3FileSystem.clear_instance_cache()
        for attempt in (
            lambda: shoal.save(URL, model=model),
            lambda: shoal.Checkpoints(URL, model=model),
            lambda: shoal.load(URL, model=model),
        ):
            with pytest.raises(UsageError, match="cannot be") as caught:
                attempt()
            assert "Unable to locate credentials" in caught.value.got
            assert "credentials" in caught.value.do
    s3fs.S3FileSystem.clear_instance_cache()
    assert Store(URL).has("")  # nothing was lost
