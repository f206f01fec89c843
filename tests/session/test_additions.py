"""What a parallelised model has besides: `no_sync`, and what refuses wrappers of torch's."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

WAYS = ["replicate", "factor", "sliced"]
Training = Callable[[nn.Module, Any, Any, Tensor, Tensor], Any]


def made() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return model


def on_ranks(
    ranks: int, training: Training, way: str, before: Callable[[nn.Module], Any] | None = None
) -> list[Any]:
    """What a training gives on each rank, on its own rows; `before` is done before parallelize."""

    def work(comm: ThreadComm) -> Any:
        hosts = tuple(f"h{rank}" for rank in range(comm.size))
        with using(comm, Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)):
            model = made()
            kept = before(model) if before else None
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            x = torch.arange(32.0, dtype=torch.float64).reshape(8, 4).sin()[comm.rank :: comm.size]
            y = (torch.arange(8) % 3 % 2)[comm.rank :: comm.size]
            loss_fn = nn.CrossEntropyLoss()
            pins = {"*": way} if comm.size > 1 else None
            shoal.parallelize(model, loss_fn, optimizer, sample=(x, y), pins=pins)
            return training(model if kept is None else kept, loss_fn, optimizer, x, y)

    return run(ranks, work, timeout_s=20)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, which DistributedDataParallel asks for."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def a_step(model: nn.Module, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss_fn(model(x), y).backward()
    optimizer.step()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("way", WAYS)
def test_ddp_around_a_parallelised_model_is_refused_as_it_is_made(way: str) -> None:
    def training(model: nn.Module, *_: Any) -> None:
        with pytest.raises(UsageError, match="DistributedDataParallel is around"):
            DistributedDataParallel(model)

    on_ranks(2, training, way)


class Holds(nn.Module):
    """A module that has the model, as Lightning's do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("holds", [nn.Identity, Holds], ids=["itself", "a module that holds it"])
def test_ddp_that_was_made_before_is_refused_before_it_trains(holds: type[nn.Module]) -> None:
    def before(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model if holds is nn.Identity else holds(model))

    def training(wrapped: nn.Module, *rest: Any) -> None:
        with pytest.raises(UsageError, match="DistributedDataParallel is around"):
            a_step(wrapped, *rest)
        with torch.no_grad():
            wrapped(rest[2])  # which trains nothing

    on_ranks(2, training, "replicate", before)


@pytest.mark.usefixtures("group")
def test_ddp_around_a_module_that_holds_the_model_is_refused_before_it_trains() -> None:
    def training(model: nn.Module, *rest: Any) -> None:
        with pytest.raises(UsageError, match="DistributedDataParallel is around"):
            a_step(DistributedDataParallel(Holds(model)), *rest)

    on_ranks(2, training, "replicate")


@pytest.mark.usefixtures("group")
def test_ddp_of_another_model_may_call_it() -> None:
    class Student(nn.Module):
        def __init__(self, teacher: nn.Module) -> None:
            super().__init__()
            self.own = nn.Linear(4, 2).double()
            self.teacher = (teacher,)

        def forward(self, x: Tensor) -> Any:
            return self.own(x) + self.teacher[0](x)

    def training(model: nn.Module, loss_fn: Any, _: Any, x: Tensor, y: Tensor) -> None:
        loss_fn(DistributedDataParallel(Student(model))(x), y).backward()

    on_ranks(2, training, "replicate")


@pytest.mark.usefixtures("group")
def test_fully_shard_is_refused_before_it_trains() -> None:
    mesh = init_device_mesh("cpu", (1,))

    def training(model: nn.Module, *rest: Any) -> None:
        fully_shard(model, mesh=mesh)
        with pytest.raises(UsageError, match="of another class"):
            a_step(model, *rest)

    on_ranks(2, training, "replicate")


def test_a_replica_of_data_parallel_is_refused() -> None:
    def training(model: nn.Module, *rest: Any) -> None:
        with pytest.raises(UsageError, match="DataParallel is around"):
            a_step(model._replicate_for_data_parallel(), *rest)

    on_ranks(2, training, "replicate")


def without_sync(more: Callable[[nn.Module, Any], Any]) -> Training:
    def training(
        model: nn.Module, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor
    ) -> list[Tensor]:
        for number in range(6):
            quiet = number % 3 < 2
            with more(model, optimizer) if quiet else nullcontext():
                (loss_fn(model(x + number), y) / 3).backward()
            if not quiet:
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    return training


@pytest.mark.parametrize("way", WAYS)
def test_no_sync_is_as_accumulate(way: str) -> None:
    by_model = on_ranks(2, without_sync(lambda model, _: model.no_sync()), way)
    by_optimizer = on_ranks(2, without_sync(lambda _, optimizer: optimizer.accumulate()), way)
    (alone,) = on_ranks(1, without_sync(lambda model, _: model.no_sync()), way)
    for found in by_model:
        assert all(map(torch.equal, found, by_optimizer[0]))
        for got, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_a_step_within_no_sync_is_refused() -> None:
    def training(model: Any, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        with model.no_sync(), pytest.raises(UsageError, match="have not been sent"):
            a_step(model, loss_fn, optimizer, x, y)

    on_ranks(2, training, "replicate")


def test_a_model_that_has_a_no_sync_keeps_it() -> None:
    class Own(nn.Sequential):
        def no_sync(self) -> str:
            return "own"

    def before(model: nn.Module) -> nn.Module:
        model.__class__ = Own
        return model

    def training(model: Any, *_: Any) -> None:
        assert model.no_sync() == "own"
        shoal.unparallelize(model)
        assert model.no_sync() == "own"

    on_ranks(2, training, "replicate", before)
    on_ranks(1, training, "replicate", before)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_left_behind(ranks: int) -> None:
    def training(model: nn.Module, *_: Any) -> None:
        names = {"no_sync", "_ddp_params_and_buffers_to_ignore"}
        assert names & vars(model).keys()
        shoal.unparallelize(model)
        assert not names & vars(model).keys()

    on_ranks(ranks, training, "replicate")


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_take_nothing_along(ranks: int) -> None:
    def training(model: nn.Module, *_: Any) -> None:
        names = {"no_sync", "_ddp_params_and_buffers_to_ignore"}
        assert not names & vars(copy.deepcopy(model)).keys()
        whole = io.BytesIO()
        torch.save(model, whole)
        assert b"shoal" not in whole.getvalue()

    on_ranks(ranks, training, "replicate")


def test_names_that_were_to_be_ignored_come_back() -> None:
    def before(model: nn.Module) -> nn.Module:
        model.__dict__["_ddp_params_and_buffers_to_ignore"] = ["0.weight"]
        return model

    def training(model: nn.Module, *_: Any) -> None:
        name = "_ddp_params_and_buffers_to_ignore"
        assert vars(copy.deepcopy(model))[name] == ["0.weight"]
        shoal.unparallelize(model)
        assert vars(model)[name] == ["0.weight"]

    on_ranks(2, training, "replicate", before)
