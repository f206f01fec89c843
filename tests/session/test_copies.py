"""Copies and pickles of a parallelised model are ordinary modules."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

HOSTS = Cluster(Topology(("host",) * 2), Link(1e-4, 1e8))  # nothing is measured

WAYS = ["replicate", "sliced", "factor", "column"]


class Own(nn.Module):
    """A model of somebody's own, with a hook of his."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Loss(nn.Module):
    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y)


def seen(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    module.seen = len(args)


def trained(comm: ThreadComm, model: nn.Module, way: str, **options: Any) -> tuple[Any, Any]:
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, comm.rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, loss, optimizer = shoal.parallelize(
        model, Loss(), optimizer, sample=(x, y), pins={"*": way}, **options
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model, loss


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_an_ordinary_module(way: str) -> None:
    models = [Own() for _ in range(2)]

    def work(comm: ThreadComm) -> None:
        models[comm.rank].register_forward_hook(seen, with_kwargs=True)
        with using(comm, HOSTS):
            model, _ = trained(comm, models[comm.rank], way)
            copied, pickled = copy.deepcopy(model), saved(model)
            averaged = AveragedModel(model)
            assert b"shoal" not in pickled
            assert b"shoal" not in pickle.dumps(copy.deepcopy(model))
            loaded = torch.load(io.BytesIO(pickled), weights_only=False)
            for ordinary in (copied, loaded, averaged.module):
                assert type(ordinary) is Own and type(ordinary.first) is nn.Linear
                assert list(ordinary._forward_hooks.values()) == [seen]
                assert not ordinary._forward_pre_hooks
                assert ordinary._forward_hooks_with_kwargs.keys() == ordinary._forward_hooks.keys()
                assert not ordinary._forward_pre_hooks_with_kwargs
                assert not ordinary._forward_hooks_always_called
                assert all(type(p) is nn.Parameter for p in ordinary.parameters())
                ordinary(torch.randn(2, 6)).sum().backward()
                for ours, theirs in zip(
                    model.state_dict().values(), ordinary.state_dict().values(), strict=True
                ):
                    assert torch.equal(ours, theirs)
            # the original goes on
            model(torch.randn(3, 6))
            assert len(model._forward_hooks) > 1

    run(2, work, timeout_s=20)


def test_a_copy_within_another_module_and_a_counted_loss() -> None:
    models = [Own() for _ in range(2)]

    def work(comm: ThreadComm) -> None:
        with using(comm, HOSTS):
            model, loss = trained(
                comm, models[comm.rank], "replicate", count=lambda output, y: len(y)
            )
            both = nn.ModuleDict({"model": model, "loss": loss})
            assert b"shoal" not in saved(both)
            copied = copy.deepcopy(both)
            assert not copied["loss"]._forward_hooks and not copied["model"]._forward_pre_hooks
            assert not copied["loss"]._forward_hooks_with_kwargs

    run(2, work, timeout_s=20)


class CopiesItself(Own):
    """Copies as it likes to."""

    def __deepcopy__(self, memo: Any) -> CopiesItself:
        other = CopiesItself.__new__(CopiesItself)
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def __getstate__(self) -> Any:
        return {"own": self.__dict__}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state["own"])


def test_a_class_that_copies_itself_names_nothing_of_shoals() -> None:
    models = [CopiesItself() for _ in range(2)]

    def work(comm: ThreadComm) -> None:
        with using(comm, HOSTS):
            model, _ = trained(comm, models[comm.rank], "replicate")
            copied = copy.deepcopy(model)
            assert b"shoal" not in saved(model) and b"shoal" not in saved(copied)
            copied(torch.randn(2, 6)).sum().backward()

    run(2, work, timeout_s=20)


LOADS = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "shoal":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
model = torch.load(sys.argv[1], weights_only=False)
def hook(module, args, output):
    assert output.shape == (2, 3)
for _ in range(9):  # numbers that the saved model's hooks had
    model.register_forward_hook(hook)
    model.register_forward_pre_hook(lambda module, args: None)
model(torch.ones(2, 6)).sum().backward()
"""


def test_a_saved_model_is_loaded_where_there_is_no_shoal(tmp_path: Any) -> None:
    models = [nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(2)]

    def work(comm: ThreadComm) -> None:
        with using(comm, HOSTS):
            model, _ = trained(comm, models[comm.rank], "sliced")
            if comm.rank == 0:
                torch.save(model, tmp_path / "model.pt")

    run(2, work, timeout_s=20)
    subprocess.run([sys.executable, "-c", LOADS, tmp_path / "model.pt"], check=True, timeout=60)
