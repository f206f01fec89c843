"""`save` and `load`: what a checkpoint has; what does not fit is said, and changes nothing."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_process import cluster_of, features
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

import shoal
from shoal.checkpoint.folder import STATE
from shoal.checkpoint.state import _packed
from shoal.checkpoint.tensors import checksum
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer, UsageError
from shoal.front.session_start import using


def mlp(width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, width), nn.BatchNorm1d(width), nn.Linear(width, 3)).double()


def stepped(model: nn.Module, *optimizers: optim.Optimizer, loss_fn: Any = F.cross_entropy) -> None:
    for x, y in features(7, 3, steps=2):
        loss_fn(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def alone(work: Callable[[], Any]) -> Any:
    with using(ThreadComm()):
        return work()


def together(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    def each(comm: ThreadComm) -> Any:
        with using(comm, cluster_of(ranks)):
            return work(comm.rank)

    return run(ranks, each, timeout_s=20)


def test_three_lines_read_the_weights(tmp_path: Path) -> None:
    model = mlp()
    alone(lambda: shoal.save(tmp_path / "saved", model=model))
    other = mlp()
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    other.load_state_dict(weights)
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("parallelized", [False, True])
def test_every_kind_of_object(tmp_path: Path, parallelized: bool) -> None:
    def made() -> dict[str, Any]:
        model = mlp()
        first, second = [*model[:2].parameters()], [*model[2].parameters()]
        optimizers = [optim.SGD(second, 0.1, momentum=0.9), optim.AdamW(first)]
        if parallelized:
            shoal.parallelize(model, None, optimizers)
        return {
            "model": model,
            "optimizers": optimizers,
            "schedulers": {"one": optim.lr_scheduler.LinearLR(optimizers[0])},
            "averaged": AveragedModel(model),
            "scaler": torch.amp.GradScaler("cpu"),
            "step": 7,
            "history": [0.5, {"best": torch.ones(2)}],
        }

    def work() -> None:
        saved = made()
        stepped(saved["model"], *saved["optimizers"])
        saved["schedulers"]["one"].step()
        saved["averaged"].update_parameters(saved["model"])
        shoal.save(tmp_path / "saved", **saved)
        got = made()
        asked = {**got, "step": 0, "history": None}
        plain = shoal.load(tmp_path / "saved", **asked)
        assert plain["step"] == 7
        assert plain["history"][0] == 0.5
        assert torch.equal(plain["history"][1]["best"], torch.ones(2))
        for name in ("model", "averaged", "scaler"):
            assert_same(saved[name].state_dict(), got[name].state_dict())
        for one, other in zip(saved["optimizers"], got["optimizers"], strict=True):
            assert_same(one.state_dict(), other.state_dict())
        assert_same(saved["schedulers"]["one"].state_dict(), got["schedulers"]["one"].state_dict())

    alone(work)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def test_parameters_are_known_by_name_in_whatever_order(tmp_path: Path) -> None:
    model = mlp()
    optimizer = optim.AdamW(model.parameters())
    stepped(model, optimizer)
    alone(lambda: shoal.save(tmp_path / "saved", model=model, optimizer=optimizer))
    other = copy.deepcopy(model)
    turned = optim.AdamW(list(other.parameters())[::-1])
    alone(lambda: shoal.load(tmp_path / "saved", model=other, optimizer=turned))
    for one, copied in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], turned.state[copied]["exp_avg"])


def test_what_is_drawn_goes_on(tmp_path: Path) -> None:
    model = mlp()
    optimizer = optim.SGD(model.parameters(), 0.1)
    objects = {"model": model, "optimizer": optimizer}
    with torch.random.fork_rng(devices=()):
        alone(lambda: shoal.save(tmp_path / "saved", **objects))
        expected = torch.rand(3)
        alone(lambda: shoal.load(tmp_path / "saved", model=model))
        assert not torch.equal(torch.rand(3), expected), "weights alone restored it"
        alone(lambda: shoal.load(tmp_path / "saved", **objects))
        assert torch.equal(torch.rand(3), expected)


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "shapes": (
        lambda: {"model": mlp(6)},
        r"another model than model: shapes differ\n(.|\n)*0.weight: \[6, 7\], saved \[5, 7\]",
    ),
    "names": (
        lambda: {"model": nn.Sequential(*mlp(), nn.Linear(3, 3).double())},
        r"names differ\n  got: not saved: 3.weight, 3.bias; not in the model model: none",
    ),
    "keyword": (lambda: {"net": mlp()}, r"nothing under net\n(.|\n)*it has model, optimizer"),
    "members": (lambda: {"models": [mlp(), mlp()]}, "models has other members"),
    "optimizer": (
        lambda: {"optimizer": optim.SGD(mlp()[:1].parameters(), 0.1)},
        "another number of parameters",
    ),
}


@pytest.mark.parametrize(("objects", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_said_before_anything_changes(
    tmp_path: Path, objects: Callable[[], dict[str, Any]], message: str
) -> None:
    model = mlp()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    stepped(model, optimizer)
    saved = {"model": model, "optimizer": optimizer, "models": [mlp()]}
    alone(lambda: shoal.save(tmp_path / "saved", **saved))
    given = objects()
    before = copy.deepcopy([getattr(o, "state_dict", dict)() for o in given.values()])
    with pytest.raises(UsageError, match=message):
        alone(lambda: shoal.load(tmp_path / "saved", **given))
    for old, value in zip(before, given.values(), strict=True):
        assert_same(old, getattr(value, "state_dict", dict)())


def test_a_changed_bit_is_found_and_named(tmp_path: Path) -> None:
    alone(lambda: shoal.save(tmp_path / "saved", model=mlp()))
    path = tmp_path / "saved" / "model.safetensors"
    weights = bytearray(path.read_bytes())
    header = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    del header["__metadata__"]
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    weights[-1] ^= 4
    path.write_bytes(weights)
    with pytest.raises(UsageError, match=f"corrupted: the tensor {last}\n(.|\n)*model.safetensors"):
        alone(lambda: shoal.load(tmp_path / "saved", model=mlp()))


def test_a_newer_format_is_said(tmp_path: Path) -> None:
    alone(lambda: shoal.save(tmp_path / "saved", model=mlp()))
    path = tmp_path / "saved" / STATE
    path.write_text(path.read_text().replace('"version": 1', '"version": 3'))
    with pytest.raises(UsageError, match=r"newer format(.|\n)*version 3(.|\n)*version 2 at most"):
        alone(lambda: shoal.load(tmp_path / "saved", model=mlp()))


@pytest.mark.parametrize("text", ["", "[]", "{}", None])
def test_a_corrupted_state_is_said(tmp_path: Path, text: str | None) -> None:
    alone(lambda: shoal.save(tmp_path / "saved", model=mlp(), epoch=3))
    path = tmp_path / "saved" / STATE
    path.write_text(path.read_text().replace('"epoch": 3', '"epoch": 4') if text is None else text)
    with pytest.raises(UsageError, match=r"state.json of the checkpoint is corrupted"):
        alone(lambda: shoal.load(tmp_path / "saved", model=mlp()))


def test_a_folder_where_nobody_may_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def work(rank: int) -> None:
        with pytest.raises(UsageError, match=r"the checkpoint cannot be written(.|\n)*file/saved"):
            shoal.save(tmp_path / "file" / "saved", model=mlp())

    together(2, work)


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such checkpoint(.|\n)*saved"):
        alone(lambda: shoal.load(tmp_path / "saved", model=mlp()))


@pytest.mark.parametrize("sees", [0, 1])
def test_ranks_that_do_not_see_the_files_are_sent_them(tmp_path: Path, sees: int) -> None:
    model = mlp()
    alone(lambda: shoal.save(tmp_path / "saved", model=model, epoch=3))

    def work(rank: int) -> None:
        got = mlp()
        where = tmp_path / ("saved" if rank == sees else "none")
        assert shoal.load(where, model=got, epoch=0) == {"epoch": 3}
        assert_same(got.state_dict(), model.state_dict())

    together(3, work)


def test_files_that_nobody_asks_for_are_not_sent(tmp_path: Path) -> None:
    model = mlp()
    alone(lambda: shoal.save(tmp_path / "saved", model=model, averaged=mlp()))
    (tmp_path / "saved" / "averaged.safetensors").unlink()

    def work(rank: int) -> None:
        got, where = mlp(), tmp_path / ("saved" if rank == 0 else "none")
        shoal.load(where, model=got)
        assert_same(got.state_dict(), model.state_dict())
        with pytest.raises(UsageError, match=r"cannot be read(.|\n)*averaged.safetensors"):
            shoal.load(where, model=got, averaged=mlp())

    together(2, work)


def test_ranks_that_see_different_checkpoints(tmp_path: Path) -> None:
    for rank in range(2):
        alone(lambda rank=rank: shoal.save(tmp_path / str(rank), epoch=rank))

    def work(rank: int) -> None:
        with pytest.raises(RanksDiffer, match="ranks 0 and 1 see different checkpoints"):
            shoal.load(tmp_path / str(rank), epoch=0)

    together(2, work)


def test_a_loader_that_cannot_say_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"loader cannot be saved(.|\n)*DataLoader"):
        alone(lambda: shoal.save(tmp_path / "a", loader=DataLoader([1])))


class Own(IterableDataset[int]):
    """A rank's own stream of six rows, which can say where it is, as arrays and sets too."""

    def __init__(self, rank: int, has_state: bool = True) -> None:
        self.rank, self.taken, self.begins = rank, 0, 0
        if has_state:
            self.state_dict, self.load_state_dict = self._state, self._load

    def __iter__(self) -> Iterator[int]:
        begin, self.begins = self.begins, 0
        for number in range(begin, 6):
            self.taken = number + 1
            yield 100 * self.rank + number

    def _state(self) -> dict[str, Any]:
        return {"taken": np.array([self.taken]), "of": {self.rank}, "t": torch.ones(2) * self.rank}

    def _load(self, state: dict[str, Any]) -> None:
        assert state["of"] == {self.rank} and bool((state["t"] == self.rank).all())
        self.begins = int(state["taken"][0])


@pytest.mark.parametrize("has_state", [True, False])
def test_a_position_of_each_rank_is_saved_in_mid_epoch(tmp_path: Path, has_state: bool) -> None:
    def work(rank: int) -> None:
        loaders = [
            shoal.shard(DataLoader(Own(rank, has_state), 2), shards_itself=True) for _ in range(2)
        ]
        batches = iter(loaders[0])
        next(batches)
        shoal.save(tmp_path / "saved", loader=loaders[0])
        shoal.load(tmp_path / "saved", loader=loaders[1])
        rest = [batch.tolist() for batch in loaders[1]]
        assert rest == [[100 * rank + 2, 100 * rank + 3], [100 * rank + 4, 100 * rank + 5]]
        list(batches)
        shoal.save(tmp_path / "saved", loader=loaders[0])
        shoal.load(tmp_path / "saved", loader=loaders[1])
        assert (loaders[1].epoch, loaders[1].state_dict()["position"]) == (1, [])

    together(2, work)


def test_positions_of_other_ranks_begin_the_epoch_and_say_so(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        loader = shoal.shard(DataLoader(Own(rank), 2), shards_itself=True)
        list(loader)
        next(iter(loader))
        shoal.save(tmp_path / "saved", loader=loader)

    def load(rank: int) -> None:
        loader = shoal.shard(DataLoader(Own(rank), 2), shards_itself=True)
        shoal.load(tmp_path / "saved", loader=loader)
        assert (loader.epoch, loader.state_dict()["position"]) == (1, [])

    together(2, save)
    with pytest.warns(UserWarning, match="2 ranks had rows of its own, and now there are 3"):
        together(3, load)


class Unsaved(Own):
    """A stream whose own state is code."""

    def _state(self) -> dict[str, Any]:
        return {"made by": slice}


def test_a_state_that_no_checkpoint_holds_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int) -> None:
        loaders = [shoal.shard(DataLoader(Unsaved(rank), 2), shards_itself=True) for _ in range(2)]
        next(iter(loaders[0]))
        shoal.save(tmp_path / "saved", loader=loaders[0])
        shoal.load(tmp_path / "saved", loader=loaders[1])
        assert [len(batch) for batch in loaders[1]] == [2, 2]

    together(2, work)
    assert "its rows will be read again" in caplog.text


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is given"):
        alone(lambda: shoal.save(tmp_path / "saved"))


@pytest.mark.parametrize("path", [None, "", "a\0b", 3])
def test_a_path_that_is_none(tmp_path: Path, path: Any) -> None:
    def work(rank: int) -> None:
        wrong = path if rank else tmp_path / "saved"
        with pytest.raises(UsageError, match=r"shoal.save takes the path of a folder"):
            shoal.save(wrong, model=mlp())
        with pytest.raises(UsageError, match=r"shoal.load takes the path of a folder"):
            shoal.load(wrong, model=mlp())

    together(2, work)
    assert os.listdir(tmp_path) == []


def test_names_that_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="cannot be saved under that name"):
        alone(lambda: shoal.save(tmp_path / "run" / "saved", **{"../../x": mlp()}))
    assert os.listdir(tmp_path) == ["run"] and os.listdir(tmp_path / "run") == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [STATE, "model.safetensors", "random-state.safetensors"])
@pytest.mark.parametrize("other", ["FIFO", "device", "folder", "half", "none"])
def test_something_else_where_a_file_was(tmp_path: Path, name: str, other: str) -> None:
    model = mlp()
    optimizer = optim.SGD(model.parameters(), 0.1)
    alone(lambda: shoal.save(tmp_path / "saved", model=model, optimizer=optimizer))
    path = tmp_path / "saved" / name
    content = path.read_bytes()
    path.unlink()
    if other == "FIFO":
        os.mkfifo(path)
    elif other == "device":
        path.symlink_to("/dev/zero")
    elif other == "folder":
        path.mkdir()
    elif other == "half":
        path.write_bytes(content[: len(content) // 2])

    def work(rank: int) -> None:
        got = mlp()
        before = copy.deepcopy(got.state_dict())
        where = tmp_path / ("saved" if rank == 0 else "none")
        with pytest.raises(UsageError, match=r"no such checkpoint|cannot be read|corrupted"):
            shoal.load(where, model=got, optimizer=optim.SGD(got.parameters(), 0.1))
        assert_same(before, got.state_dict())

    together(2, work)


@pytest.mark.parametrize("value", [10**5000, [[]] * 2], ids=["digits", "itself"])
def test_plain_data_that_could_not_be_read_again(tmp_path: Path, value: Any) -> None:
    if isinstance(value, list):
        value[0] = value
    with pytest.raises(UsageError, match="cannot be saved"):
        alone(lambda: shoal.save(tmp_path / "saved", value=value))


def test_a_file_that_has_other_tensors_than_were_written(tmp_path: Path) -> None:
    alone(lambda: shoal.save(tmp_path / "saved", model=mlp()))
    path = tmp_path / "saved" / STATE
    document = json.loads(path.read_text())
    document["state"]["files"]["model.safetensors"].pop("0.weight")
    document["crc32"] = checksum(_packed(document["state"]))
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"corrupted: its tensors(.|\n)*other names"):
        alone(lambda: shoal.load(tmp_path / "saved", model=mlp()))


def test_states_that_ranks_have_unlike_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int) -> None:
        model = mlp()
        optimizer = optim.SGD(model.parameters(), 0.1)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 10)
        alike = {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0), "best": float(rank)}
        shoal.save(tmp_path / "alike", model=model, schedulers=[scheduler], **alike)
        assert not caplog.records
        scheduler.last_epoch += rank
        shoal.save(tmp_path / "unlike", model=model, schedulers=[scheduler], **alike)

    together(2, work)
    (record,) = caplog.records
    assert "schedulers.0.last_epoch is 0 on rank 0, and 1 on rank 1" in record.getMessage()
