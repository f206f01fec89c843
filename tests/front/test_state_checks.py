"""States that torch's objects would take unseen: of another class, form, shape or type."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import shoal
from shoal.checkpoint.folder import STATE
from shoal.checkpoint.state import _packed
from shoal.checkpoint.tensors import checksum
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import ShoalError, UsageError
from shoal.front.session_start import using
from shoal.front.state_checks import check_class


def net() -> nn.Linear:
    return nn.Linear(4, 2)


def adamw(model: nn.Module) -> optim.Optimizer:
    """Return an AdamW that has made a step."""
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def without_classes(folder: Path) -> None:
    """Make a checkpoint as earlier releases wrote it, without the classes of objects."""
    document = json.loads((folder / STATE).read_text())
    del document["state"]["classes"]
    document["crc32"] = checksum(_packed(document["state"]))
    (folder / STATE).write_text(json.dumps(document))


OTHERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": optim.SGD,
    "Adagrad": optim.Adagrad,
    "RMSprop": optim.RMSprop,
    "Adam": optim.Adam,  # AdamW derives from it, and its state has the same form
}


@pytest.mark.parametrize("kind", OTHERS)
def test_an_optimizer_takes_no_state_of_another_class(tmp_path: Path, kind: str) -> None:
    with using(ThreadComm()):
        model = net()
        shoal.save(tmp_path / "saved", model=model, optimizer=adamw(model))
        other = net()
        before = copy.deepcopy(other.state_dict())
        optimizer = OTHERS[kind](other.parameters(), lr=0.5)
        with pytest.raises(UsageError, match=rf"another class(.|\n)*got: {kind}\n(.|\n)*AdamW"):
            shoal.load(tmp_path / "saved", model=other, optimizer=optimizer)
        if kind != "Adam":
            without_classes(tmp_path / "saved")
            with pytest.raises(UsageError, match=r"does not take(.|\n)*got: no "):
                shoal.load(tmp_path / "saved", model=other, optimizer=optimizer)
        assert all(map(torch.equal, before.values(), other.state_dict().values()))
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert not any("exp_avg" in state for state in optimizer.state.values())
        shoal.load(tmp_path / "saved", model=other)
        assert torch.equal(other.weight, model.weight)


def test_a_scheduler_takes_no_state_of_another_class(tmp_path: Path) -> None:
    with using(ThreadComm()):
        optimizer = optim.SGD(net().parameters(), 0.1)
        shoal.save(tmp_path / "saved", scheduler=optim.lr_scheduler.StepLR(optimizer, 3))
        other = optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        with pytest.raises(UsageError, match="scheduler was of another class"):
            shoal.load(tmp_path / "saved", scheduler=other)
        without_classes(tmp_path / "saved")
        shoal.load(tmp_path / "saved", scheduler=other)  # nobody knows


class Own(optim.AdamW):
    """A script's own class."""


def test_a_class_of_the_script_may_derive_from_the_saved_one() -> None:
    parameters = list(net().parameters())
    check_class(Own(parameters), "AdamW", "optimizer")
    check_class(Own(parameters), "", "optimizer")
    for value, saved in ((optim.AdamW(parameters), "Own"), (Own(parameters), "Other")):
        with pytest.raises(UsageError, match=f"another class(.|\n)*expected: {saved}"):
            check_class(value, saved, "optimizer")


def test_state_of_parameters_of_another_size(tmp_path: Path) -> None:
    """As where a layer has grown, and the model is left out of the load."""
    with using(ThreadComm()):
        model, larger = net(), nn.Linear(5, 2)
        shoal.save(tmp_path / "saved", model=model, optimizer=adamw(model))
        optimizer = optim.AdamW(larger.parameters())
        with pytest.raises(UsageError, match=r"weight/exp_avg(.|\n)*\[2, 4\](.|\n)*\[2, 5\]"):
            shoal.load(tmp_path / "saved", optimizer=optimizer)
        assert not optimizer.state


@pytest.mark.parametrize("saved", [torch.complex64, torch.float32])
def test_numbers_that_the_model_could_not_keep(tmp_path: Path, saved: torch.dtype) -> None:
    with using(ThreadComm()):
        model = net()
        model.register_buffer("extra", torch.ones(2, dtype=saved))
        shoal.save(tmp_path / "saved", model=model)
        other = net()
        other.register_buffer("extra", torch.ones(2, dtype=torch.int64))
        with pytest.raises(UsageError, match=r"types of numbers(.|\n)*extra: torch.int64"):
            shoal.load(tmp_path / "saved", model=other)
        model.extra = torch.ones(2, dtype=torch.float64)
        other.extra = torch.ones(2, dtype=torch.float32)
        shoal.save(tmp_path / "saved", model=model)
        shoal.load(tmp_path / "saved", model=other)


class Refusing:
    """An object that refuses its state half-way, on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.value = rank, 0

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.rank == 1:
            raise IndexError("half-way")


def test_an_object_that_refuses_on_one_rank_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    with using(ThreadComm()):
        model = net()
        shoal.save(tmp_path / "saved", model=model, optimizer=adamw(model), own=Refusing(0))

    def work(comm: ThreadComm) -> None:
        with using(comm):
            other, own = net(), Refusing(comm.rank)
            optimizer = optim.AdamW(other.parameters(), lr=0.5)
            before = copy.deepcopy(other.state_dict())
            with pytest.raises(ShoalError, match=r"own does not take(.|\n)*IndexError: half-way"):
                shoal.load(tmp_path / "saved", model=other, optimizer=optimizer, own=own)
            assert all(map(torch.equal, before.values(), other.state_dict().values()))
            assert optimizer.param_groups[0]["lr"] == 0.5 and not optimizer.state
            assert own.value == (comm.rank == 0)

    run(2, work, timeout_s=20)
