"""A state.json of any form with a right checksum: it is loaded, or refused with nothing changed."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import SMALL, built, cluster_of, features, plain, rows_of, state
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import shoal
from shoal.checkpoint.folder import STATE
from shoal.checkpoint.state import _packed
from shoal.checkpoint.tensors import checksum
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import ShoalError
from shoal.front.session_start import using

FULL = (pytest.mark.slow, pytest.mark.timeout(600))
GONE = object()  # the node is removed
OTHERS: tuple[Any, ...] = (
    *(GONE, None, True, -1, 0.5, float("nan"), 10**30, "x", "../x", "", [], [1], {}, {"x": 1}),
    *({"$": "evil"}, {"$": "tensor", "name": "none"}, {"$": "float", "value": "x"}),
)
Way = tuple[str | int, ...]

FORMATS = Path(__file__).parents[1] / "formats" / "checkpoints"
INT8 = "replicate:direct+int8(block=8)"
OPTIONS: dict[str, dict[str, Any]] = {
    "residuals": {"pins": {"*": INT8}},
    "update_every": {"pins": {"*": "replicate:direct"}, "update_every": {"2": 3}},
    "local_steps": {"local_steps": 3, "outer": shoal.Outer(rule="slowmo")},
}
EARLIER = {"residuals": "residuals", "local-codec": "local_steps"}  # cases of version 1
Work = Callable[[nn.Module, optim.Optimizer, Callable[[], None]], None]


def nodes(value: Any, way: Way = ()) -> Iterator[Way]:
    """Yield the ways to all values within a value."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*way, key)
            yield from nodes(part, (*way, key))


def changed(document: Any, way: Way, other: Any) -> Any:
    """Return a copy of a state.json with another value at one place, and the right checksum."""
    document = copy.deepcopy(document)
    *most, last = way
    parent = document
    for key in most:
        parent = parent[key]
    if other is GONE:
        del parent[last]
    else:
        parent[last] = other
    if way[0] != "crc32" and "state" in document:
        document["crc32"] = checksum(_packed(document["state"]))
    return document


def folder_of(sound: Path, folder: Path, document: Any) -> Path:
    """Make a checkpoint of this state.json and the files of a sound one."""
    folder.mkdir(exist_ok=True, parents=True)
    for file in sound.glob("*.safetensors"):
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    (folder / STATE).write_text(json.dumps(document))
    return folder


def kept(objects: dict[str, Any]) -> Any:
    """Return the states of objects, as they are now."""
    having = {name: value for name, value in objects.items() if hasattr(value, "state_dict")}
    return copy.deepcopy({name: value.state_dict() for name, value in having.items()})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def made() -> dict[str, Any]:
    model = built(lambda: nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    optimizer = optim.AdamW([{"params": model[0].parameters()}, {"params": model[1:].parameters()}])
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0),
        "loader": shoal.shard(DataLoader(range(8), 2)),
        "history": [0.5, {"best": torch.ones(2), 3: (1, None)}],
    }


def stepped(objects: dict[str, Any]) -> None:
    x, y = next(iter(features(7, 3, steps=1)))
    objects["scaler"].scale(F.cross_entropy(objects["model"](x), y)).backward()
    objects["scaler"].step(objects["optimizer"])
    objects["scaler"].update()
    objects["optimizer"].zero_grad()
    objects["scheduler"].step()


def sampled(ways: list[Way], number: int | None) -> list[tuple[Way, Any]]:
    pairs = [(way, other) for way in ways for other in OTHERS]
    return pairs if number is None else random.Random(0).sample(pairs, number)


@pytest.mark.parametrize("number", [60, pytest.param(None, marks=FULL)])
def test_each_node_of_another_type(tmp_path: Path, number: int | None) -> None:
    with using(ThreadComm()), torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        objects = made()
        stepped(objects)
        sound = tmp_path / "sound"
        shoal.save(sound, **objects)
        document = json.loads((sound / STATE).read_text())
        refused = 0
        for way, other in sampled(list(nodes(document)), number):
            folder = folder_of(sound, tmp_path / "changed", changed(document, way, other))
            before, drawn = kept(objects), torch.get_rng_state()
            try:
                shoal.load(folder, **objects)
            except ShoalError:
                refused += 1
                assert same(before, kept(objects)), f"{way}: {other} has changed something"
                assert torch.equal(drawn, torch.get_rng_state())
            except Exception as error:
                raise AssertionError(f"{way}: {other} is a bare {type(error).__name__}") from error
            else:  # a value that may be right: begin again
                objects = made()
                shoal.load(sound, **objects)
    assert refused > len(sampled(list(nodes(document)), number)) / 2


def on_two_ranks(feature: str, work: Work) -> None:
    """Do something with a model that follows a feature, its optimizer, and its two steps."""
    batches = features(6, 4, steps=2)

    def each(comm: ThreadComm) -> None:
        model = built(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)))
        optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
        rows = [rows_of(batch, comm.rank, 2) for batch in batches]
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                model,
                F.cross_entropy,
                optimizer,
                sample=rows[0],
                search_options=SMALL,
                **OPTIONS[feature],
            )
            work(model, optimizer, lambda: plain(model, loss_fn, optimizer, rows))

    with torch.random.fork_rng(devices=()):
        run(2, each, timeout_s=100)


def check_each(sound: Path, folder: Path, fields: tuple[str, ...], number: int | None) -> Work:
    """Return work that loads a checkpoint in many wrong forms, then as it is, and trains."""
    document = json.loads((sound / STATE).read_text())
    ways = [way for field in fields for way in nodes(document["state"][field], ("state", field))]
    wrong = {
        folder_of(sound, folder / str(index), changed(document, way, other)): f"{way}: {other}"
        for index, (way, other) in enumerate(sampled(ways, number))
    }

    def load(model: nn.Module, optimizer: optim.Optimizer, train: Callable[[], None]) -> None:
        refused = 0
        for one, words in wrong.items():
            before = state(model)
            try:
                shoal.load(one, model=model, optimizer=optimizer)
            except ShoalError:
                refused += 1
                assert same(before, state(model)), f"{words} has changed something"
            except Exception as error:
                raise AssertionError(f"{words} is a bare {type(error).__name__}") from error
        assert refused
        shoal.load(sound, model=model, optimizer=optimizer)
        train()

    return load


@pytest.mark.parametrize("number", [12, pytest.param(None, marks=FULL)])
@pytest.mark.parametrize("feature", OPTIONS)
def test_states_of_features(tmp_path: Path, feature: str, number: int | None) -> None:
    sound = tmp_path / "sound"

    def save(model: nn.Module, optimizer: optim.Optimizer, train: Callable[[], None]) -> None:
        train()
        shoal.save(sound, model=model, optimizer=optimizer)

    on_two_ranks(feature, save)
    assert feature in json.loads((sound / STATE).read_text())["state"]["features"]
    on_two_ranks(feature, check_each(sound, tmp_path / "wrong", ("features",), number))


@pytest.mark.parametrize("number", [12, pytest.param(None, marks=FULL)])
@pytest.mark.parametrize("name", EARLIER)
def test_states_of_an_earlier_release(tmp_path: Path, name: str, number: int | None) -> None:
    fields = ("residuals", "outer", "models")
    load = check_each(FORMATS / name / "saved", tmp_path / "wrong", fields, number)
    on_two_ranks(EARLIER[name], load)
